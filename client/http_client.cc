#include "client/http_client.h"

#include <array>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/buffer.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/ssl/host_name_verification.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <optional>
#include <thread>
#include <vector>

#include "core/cat.h"

namespace kvasir::client {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;
constexpr auto kAwait = asio::as_tuple(asio::use_awaitable);

// Bytes both ways; gcc 12 wants each co_await in a statement of its own.
class Connection {
 public:
  Connection(asio::io_context& io, asio::ssl::context* tls) : socket_(io) {
    if (tls) tls_.emplace(socket_, *tls);
  }
  asio::awaitable<Status> open(const tcp::resolver::results_type& where, const std::string& host) {
    error_code failed = asio::error::host_not_found, ignored;
    for (const auto& entry : where) {
      auto [error] = co_await socket_.async_connect(entry.endpoint(), kAwait);
      failed = error;
      if (!failed || failed == asio::error::operation_aborted) break;
      socket_.close(ignored);
    }
    if (failed) co_return unavailable(failed.message());
    socket_.set_option(tcp::no_delay(true), ignored);
    if (!tls_) co_return Status();
    SSL_set_tlsext_host_name(tls_->native_handle(), host.c_str());
    tls_->set_verify_callback(asio::ssl::host_name_verification(host));
    auto [refused] = co_await tls_->async_handshake(asio::ssl::stream_base::client, kAwait);
    if (refused) co_return unavailable(cat("no TLS: ", refused.message(), why_untrusted()));
    co_return Status();
  }
  asio::awaitable<std::pair<error_code, size_t>> read(asio::mutable_buffer to) {
    if (tls_) {
      auto [error, n] = co_await tls_->async_read_some(to, kAwait);
      co_return std::pair(error == asio::ssl::error::stream_truncated ? asio::error::eof : error, n);
    }
    auto [error, n] = co_await socket_.async_read_some(to, kAwait);
    co_return std::pair(error, n);
  }
  asio::awaitable<error_code> write(std::string_view bytes) {
    while (!bytes.empty()) {
      if (tls_) {
        auto [error, n] = co_await tls_->async_write_some(asio::buffer(bytes), kAwait);
        if (error) co_return error;
        bytes.remove_prefix(n);
      } else {
        auto [error, n] = co_await socket_.async_write_some(asio::buffer(bytes), kAwait);
        if (error) co_return error;
        bytes.remove_prefix(n);
      }
    }
    co_return error_code();
  }
  void cancel() {
    error_code ignored;
    socket_.cancel(ignored);
  }

 private:
  std::string why_untrusted() {
    const long verdict = SSL_get_verify_result(tls_->native_handle());
    return verdict == X509_V_OK ? "" : cat(" (", X509_verify_cert_error_string(verdict), ")");
  }
  tcp::socket socket_;
  std::optional<asio::ssl::stream<tcp::socket&>> tls_;
};

class AsioClient final : public HttpClient {
 public:
  AsioClient(HttpEndpoint server, std::string host, std::unique_ptr<asio::ssl::context> tls,
             tcp::resolver::results_type where, std::chrono::milliseconds timeout)
      : server_(std::move(server)),
        host_(std::move(host)),
        tls_(std::move(tls)),
        where_(std::move(where)),
        timeout_(timeout),
        work_(asio::make_work_guard(io_)) {
    thread_ = std::thread([this] { io_.run(); });
  }
  ~AsioClient() override {
    io_.stop();
    thread_.join();
  }

  void post(const std::string& path, const std::string& json, OnBody body, OnDone done) override {
    send(cat(head("POST", path), "Content-Type: application/json\r\nContent-Length: ", json.size(), "\r\n\r\n", json),
         std::move(body), std::move(done));
  }
  void get(const std::string& path, OnBody body, OnDone done) override {
    send(cat(head("GET", path), "\r\n"), std::move(body), std::move(done));
  }

 private:
  std::string head(const char* method, const std::string& path) const {
    return cat(method, " ", path, " HTTP/1.1\r\nHost: ", server_.address, "\r\n",
               server_.api_key.empty() ? "" : cat("Authorization: Bearer ", server_.api_key, "\r\n"));
  }
  void send(std::string request, OnBody body, OnDone done) {
    asio::co_spawn(io_, one(std::move(request), std::move(body), std::move(done)), asio::detached);
  }

  asio::awaitable<void> one(std::string request, OnBody body, OnDone done) {
    HttpStream answer;
    Status status = co_await exchange(request, answer, body);
    done(answer, status);
  }

  asio::awaitable<Status> exchange(const std::string& request, HttpStream& answer, const OnBody& body) {
    for (;;) {
      const bool reused = !idle_.empty();
      auto connection = reused ? std::move(idle_.back()) : std::make_shared<Connection>(io_, tls_.get());
      if (reused) idle_.pop_back();
      asio::steady_timer timer(io_, timeout_);
      timer.async_wait([connection](const error_code& e) {
        if (!e) connection->cancel();
      });
      if (!reused) {
        Status opened = co_await connection->open(where_, host_);
        if (!opened.ok()) co_return unavailable(cat("no connection to ", server_.address, ": ", opened.message()));
      }
      bool any = false;
      Status status = co_await talk(*connection, request, answer, body, any);
      timer.cancel();
      if (status.code() == Code::unavailable && reused && !any) continue;  // it had gone stale while idle
      if (status.ok() && answer.keep_alive() && answer.done()) idle_.push_back(std::move(connection));
      co_return status;
    }
  }

  asio::awaitable<Status> talk(Connection& connection, const std::string& request, HttpStream& answer,
                               const OnBody& body, bool& any) {
    const error_code unsent = co_await connection.write(request);
    if (unsent) co_return broken(unsent);
    std::array<char, 16384> buffer;
    const auto take = [&](std::string_view bytes) { body(answer, bytes); };
    while (!answer.done()) {
      auto [error, n] = co_await connection.read(asio::buffer(buffer));
      any |= n > 0;
      if (error == asio::error::eof && answer.ends_with_connection()) co_return Status();
      if (error) co_return broken(error);
      if (!answer.feed({buffer.data(), n}, take)) co_return internal_error("the answer is not HTTP");
    }
    co_return Status();
  }

  static Status broken(const error_code& error) {
    if (error == asio::error::operation_aborted) return {Code::deadline_exceeded, "no answer in time"};
    return unavailable(cat("the connection broke: ", error.message()));
  }

  const HttpEndpoint server_;
  const std::string host_;
  const std::unique_ptr<asio::ssl::context> tls_;
  const tcp::resolver::results_type where_;
  const std::chrono::milliseconds timeout_;
  asio::io_context io_{1};
  asio::executor_work_guard<asio::io_context::executor_type> work_;
  std::vector<std::shared_ptr<Connection>> idle_;  // the one thread's
  std::thread thread_;
};

Result<std::unique_ptr<asio::ssl::context>> tls_context(const TlsFiles& files) {
  if (!files.wanted()) return std::unique_ptr<asio::ssl::context>();
  KVASIR_ASSIGN(const TlsPems pems, read_tls(files));
  auto context = std::make_unique<asio::ssl::context>(asio::ssl::context::tls_client);
  context->set_verify_mode(asio::ssl::verify_peer);
  error_code error;
  if (pems.ca.empty()) {
    context->set_default_verify_paths(error);
  } else {
    context->add_certificate_authority(asio::buffer(pems.ca), error);
  }
  if (error) return invalid_argument(cat("tls_ca is ", files.ca, ", which is no authority: ", error.message()));
  if (!pems.cert.empty()) {
    context->use_certificate_chain(asio::buffer(pems.cert), error);
    if (!error) context->use_private_key(asio::buffer(pems.key), asio::ssl::context::pem, error);
    if (error)
      return invalid_argument(cat("tls_cert ", files.cert, " with tls_key ", files.key, ": ", error.message()));
  }
  return context;
}

}  // namespace

Result<std::unique_ptr<HttpClient>> HttpClient::create(const HttpEndpoint& server, std::chrono::milliseconds timeout) {
  HttpEndpoint own = server;
  if (own.address.starts_with("https://")) {
    own.address.erase(0, 8);
    own.tls.on = true;
  } else if (own.address.starts_with("http://")) {
    own.address.erase(0, 7);
  }
  while (!own.address.empty() && own.address.back() == '/') own.address.pop_back();
  const size_t colon = own.address.rfind(':');
  if (colon == std::string::npos || own.address.find('/') != std::string::npos)
    return invalid_argument(
        cat("address is ", server.address, "; it must be HOST:PORT, http://HOST:PORT or https://HOST:PORT"));
  KVASIR_ASSIGN(auto tls, tls_context(own.tls));
  std::string host = own.address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);  // IPv6
  asio::io_context io;
  error_code error;
  auto where = tcp::resolver(io).resolve(host, own.address.substr(colon + 1), error);
  if (error) return unavailable(cat("address ", server.address, ": ", error.message()));
  return std::unique_ptr<HttpClient>(
      std::make_unique<AsioClient>(std::move(own), std::move(host), std::move(tls), std::move(where), timeout));
}

}  // namespace kvasir::client
