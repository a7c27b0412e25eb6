#include "server/http/http_server.h"

#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <boost/asio/basic_socket_acceptor.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

#include "core/check.h"
#include "server/http/connection.h"
#include "server/listen.h"

namespace kvasir::server::http {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;
constexpr asio::use_awaitable_t<Executor> kAwait;
constexpr size_t kMostQueued = 4096;                   // requests that wait for a worker
constexpr std::chrono::milliseconds kSpareTime{1000};  // for a spare connection to say what it wants

class HttpServerImpl final : public HttpServer {
 public:
  HttpServerImpl(const HttpServerOptions& options, Handler handler)
      : options_(options), workers_(options.workers, kMostQueued), loops_(make_loops(options.threads)) {
    context_.limits.max_body_bytes = options.max_body;
    context_.limits.header_time = options.header_timeout;
    context_.limits.idle_time = options.idle_timeout;
    context_.limits.write_time = options.write_timeout;
    context_.handler = std::move(handler);
    context_.workers = &workers_;
    context_.budget = options.budget;
    context_.draining = [this] { return draining_.load(std::memory_order_relaxed); };
    spare_context_ = context_;
    spare_context_.spare = true;
    spare_context_.limits.header_time = spare_context_.limits.write_time = std::min(options.header_timeout, kSpareTime);
  }
  ~HttpServerImpl() override { stop(); }

  Status listen() {
    KVASIR_ASSIGN(Listening listening, listen_on(options_.host, options_.port, "--http-port"));
    port_ = listening.port;
    for (int fd : listening.sockets) {
      auto& acceptor = acceptors_.emplace_back(loops_[0]->io.get_executor());
      error_code error;
      const auto local = address_family(fd) == AF_INET6 ? tcp::v6() : tcp::v4();
      acceptor.assign(local, fd, error);
      KVASIR_CHECK(!error, "a listening socket was not taken: ", error.message());
    }
    for (auto& acceptor : acceptors_) asio::co_spawn(loops_[0]->io.get_executor(), accept(acceptor), asio::detached);
    for (auto& loop : loops_) {
      guards_.emplace_back(loop->io.get_executor());
      threads_.emplace_back([&loop] { loop->io.run(); });
    }
    return {};
  }

  int port() const override { return port_; }
  int connections() const override { return connections_.load(); }
  void drain() override {
    draining_.store(true);
    for (auto& loop : loops_)
      asio::post(loop->io, [idle = &loop->idle] {
        for (Transport* t : *idle) t->interrupt();
      });
  }

  void stop() override {
    if (stopped_.exchange(true)) return;
    for (auto& loop : loops_) loop->io.stop();
    for (std::thread& t : threads_) t.join();
    workers_.stop();  // what they make wakes connections: those go after it
    guards_.clear();
    acceptors_.clear();
    loops_.clear();  // destroys the connections' coroutines, and with them their producers
  }

 private:
  using Acceptor = asio::basic_socket_acceptor<tcp, Executor>;
  struct Loop {
    IdleSet idle;  // outlives the coroutines that io's destructor ends
    asio::io_context io{1};
  };
  static std::vector<std::unique_ptr<Loop>> make_loops(int count) {
    std::vector<std::unique_ptr<Loop>> loops(static_cast<size_t>(count));
    for (auto& loop : loops) loop = std::make_unique<Loop>();
    return loops;
  }

  static int address_family(int fd) {
    int family = AF_INET;
    socklen_t size = sizeof family;
    ::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &size);
    return family;
  }

  Task<void> accept(Acceptor& acceptor) {
    while (true) {
      auto& loop = *loops_[turn_++ % loops_.size()];
      error_code error;
      Socket socket(loop.io.get_executor());
      co_await acceptor.async_accept(socket, asio::redirect_error(kAwait, error));
      if (error == asio::error::operation_aborted) co_return;
      if (error) {  // out of file descriptors, most likely: let some connections end
        Timer pause(acceptor.get_executor(), std::chrono::milliseconds(50));
        co_await pause.async_wait(asio::redirect_error(kAwait, error));
        continue;
      }
      // Over the limit a few are taken all the same, and asked to be quick: health is heard whoever fills the rest.
      const bool spare = connections_.load() >= options_.max_connections;
      if (spare && spare_.load() >= kSpare) continue;  // closes it
      std::atomic<int>& count = spare ? spare_ : connections_;
      ++count;
      asio::co_spawn(loop.io.get_executor(), serve(std::move(socket), loop, spare ? spare_context_ : context_),
                     [this, spare](std::exception_ptr) { ended(spare); });
    }
  }

  void ended(bool spare) {
    if (spare) {
      --spare_;
      return;
    }
    const int before = connections_--;
    bool few_left = false;
    {
      std::lock_guard lock(peak_mutex_);
      peak_.grew(size_t(before));
      few_left = peak_.fell(size_t(before - 1));
    }
    if (few_left) give_memory_back();
  }

  Task<void> serve(Socket socket, Loop& loop, const ConnectionContext& context) {
    std::unique_ptr<Transport> transport;
    if (options_.tls)
      transport = co_await tls_transport(std::move(socket), options_.tls(), context.limits.header_time);
    else
      transport = plain_transport(std::move(socket));
    if (transport) co_await serve_connection(std::move(transport), context, loop.idle, loop.io.get_executor());
  }

  HttpServerOptions options_;
  ConnectionContext context_, spare_context_;
  std::atomic<bool> draining_{false}, stopped_{false};
  std::atomic<int> connections_{0}, spare_{0};
  std::mutex peak_mutex_;
  PeakWatch peak_;  // of connections
  int port_ = -1;
  Workers workers_;
  std::vector<std::unique_ptr<Loop>> loops_;
  std::list<Acceptor> acceptors_;
  size_t turn_ = 0;  // of the loops; the first loop's thread counts
  std::vector<asio::executor_work_guard<Executor>> guards_;
  std::vector<std::thread> threads_;
};

}  // namespace

Result<std::unique_ptr<HttpServer>> HttpServer::start(const HttpServerOptions& options, Handler handler) {
  auto server = std::make_unique<HttpServerImpl>(options, std::move(handler));
  KVASIR_TRY(server->listen());
  return std::unique_ptr<HttpServer>(std::move(server));
}

}  // namespace kvasir::server::http
