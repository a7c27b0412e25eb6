#include "client/openai_target.h"

#include <array>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/connect.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <functional>
#include <future>
#include <nlohmann/json.hpp>
#include <thread>

#include "client/http_stream.h"

namespace kvasir::client {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using Json = nlohmann::json;
constexpr auto kAwait = asio::as_tuple(asio::use_awaitable);

Code code_of_http(int status) {
  switch (status) {
    case 400: return Code::invalid_argument;
    case 401: return Code::unauthenticated;
    case 403: return Code::permission_denied;
    case 404: return Code::not_found;
    case 429: return Code::resource_exhausted;
    case 501: return Code::unimplemented;
    case 503: return Code::unavailable;
    case 504: return Code::deadline_exceeded;
    default: return Code::internal;
  }
}

class OpenAiTarget final : public Target {
 public:
  OpenAiTarget(TargetOptions options, bool chat, tcp::resolver::results_type where)
      : options_(std::move(options)), chat_(chat), where_(std::move(where)), work_(asio::make_work_guard(io_)) {
    thread_ = std::thread([this] { io_.run(); });
  }
  ~OpenAiTarget() override {
    io_.stop();
    thread_.join();
  }

  void start(const Ask& ask, std::shared_ptr<Sink> sink) override {
    asio::co_spawn(io_, one(post(ask), std::move(sink)), asio::detached);
  }

  std::string server_figures() override {
    struct Text : Sink {
      void on_tokens(int, std::string_view, double) override {}
      void on_done(const Status&, const Usage&) override { ended.set_value(); }
      std::promise<void> ended;
    };
    std::string text;
    auto sink = std::make_shared<Text>();
    auto ended = sink->ended.get_future();
    asio::co_spawn(
        io_, fetch("GET /metrics HTTP/1.1\r\nHost: " + options_.address + authorization() + "\r\n\r\n", text, sink),
        asio::detached);
    if (ended.wait_for(std::chrono::seconds(3)) != std::future_status::ready) return {};
    return metrics_json(text);
  }

 private:
  std::string authorization() const {
    return options_.api_key.empty() ? "" : "\r\nAuthorization: Bearer " + options_.api_key;
  }

  std::string post(const Ask& ask) const {
    Json body = {{"model", options_.model},
                 {"max_tokens", ask.max_tokens},
                 {"temperature", ask.temperature},
                 {"ignore_eos", ask.ignore_eos},
                 {"stream", true},
                 {"stream_options", {{"include_usage", true}}}};
    if (ask.seed) body["seed"] = *ask.seed;
    if (chat_) {
      body["messages"] = {{{"role", "user"}, {"content", ask.prompt}}};
    } else {
      body["prompt"] = ask.prompt;
    }
    const std::string text = body.dump(-1, ' ', false, Json::error_handler_t::replace);
    return std::string("POST ") + (chat_ ? "/v1/chat/completions" : "/v1/completions") +
           " HTTP/1.1\r\nHost: " + options_.address + authorization() +
           "\r\nContent-Type: application/json\r\nContent-Length: " + std::to_string(text.size()) + "\r\n\r\n" + text;
  }

  // Counters and gauges without labels, as a JSON object.
  static std::string metrics_json(const std::string& text) {
    Json out = Json::object();
    size_t at = 0;
    while (at < text.size() && out.size() < 200) {
      const size_t end = std::min(text.find('\n', at), text.size());
      const std::string line = text.substr(at, end - at);
      at = end + 1;
      const size_t space = line.find(' ');
      if (line.empty() || line[0] == '#' || space == std::string::npos || line.find('{') != std::string::npos) continue;
      char* stop = nullptr;
      const double value = std::strtod(line.c_str() + space, &stop);
      if (stop != line.c_str() + space) out[line.substr(0, space)] = value;
    }
    return out.empty() ? std::string() : out.dump();
  }

  struct Stream {
    HttpStream http;
    EventLines lines;
    std::string error_body;
    Usage usage;
    bool any = false, finished = false;
  };

  void take_event(std::string_view data, Stream& s, Sink& sink) const {
    if (data == "[DONE]") {
      s.finished = true;
      return;
    }
    const Json j = Json::parse(data, nullptr, false);
    if (!j.is_object()) return;
    if (j.contains("error")) {
      s.error_body = data;
      return;
    }
    if (const auto u = j.find("usage"); u != j.end() && u->is_object()) {
      s.usage.prompt_tokens = u->value("prompt_tokens", -1);
      s.usage.output_tokens = u->value("completion_tokens", -1);
      if (const auto d = u->find("prompt_tokens_details"); d != u->end() && d->is_object()) {
        s.usage.cached_tokens = d->value("cached_tokens", -1);
      }
    }
    const auto choices = j.find("choices");
    if (choices == j.end() || !choices->is_array() || choices->empty()) return;
    const Json& choice = (*choices)[0];
    const Json* text = nullptr;
    if (chat_) {
      if (const auto d = choice.find("delta"); d != choice.end() && d->contains("content")) text = &(*d)["content"];
    } else if (choice.contains("text")) {
      text = &choice["text"];
    }
    if (text && text->is_string() && !text->get_ref<const std::string&>().empty()) {
      sink.on_tokens(1, text->get_ref<const std::string&>(), -1);
    }
  }

  static Status refusal(int status, const std::string& body) {
    std::string message = "HTTP " + std::to_string(status);
    const Json j = Json::parse(body, nullptr, false);
    if (j.is_object() && j.contains("error")) {
      const Json& e = j["error"];
      if (e.is_object() && e.contains("message") && e["message"].is_string())
        message += ": " + e["message"].get<std::string>();
    }
    return {code_of_http(status), message.substr(0, 300)};
  }

  // Sends `request` and reads until the answer's end; true when the connection may be used again.
  asio::awaitable<Status> talk(tcp::socket& socket, const std::string& request, Stream& s,
                               const std::function<void(std::string_view)>& body) {
    auto [write_error, written] = co_await asio::async_write(socket, asio::buffer(request), kAwait);
    if (write_error) co_return unavailable("the connection broke: " + write_error.message());
    std::array<char, 16384> buffer;
    while (!s.http.done()) {
      auto [error, n] = co_await socket.async_read_some(asio::buffer(buffer), kAwait);
      s.any |= n > 0;
      if (error == asio::error::eof && s.http.ends_with_connection()) co_return Status();
      if (error == asio::error::operation_aborted) co_return Status(Code::deadline_exceeded, "no answer in time");
      if (error) co_return unavailable("the connection broke: " + error.message());
      if (!s.http.feed({buffer.data(), n}, body)) co_return internal_error("the answer is not HTTP");
    }
    co_return Status();
  }

  asio::awaitable<Status> exchange(const std::string& request, Stream& s,
                                   const std::function<void(std::string_view)>& body) {
    for (;;) {
      const bool reused = !idle_.empty();
      auto socket = reused ? std::move(idle_.back()) : std::make_shared<tcp::socket>(io_);
      if (reused) {
        idle_.pop_back();
      } else {
        auto [error, endpoint] = co_await asio::async_connect(*socket, where_, kAwait);
        if (error) co_return unavailable("no connection to " + options_.address + ": " + error.message());
        boost::system::error_code ignored;
        socket->set_option(tcp::no_delay(true), ignored);
      }
      asio::steady_timer timer(io_, options_.timeout);
      timer.async_wait([socket](const boost::system::error_code& e) {
        boost::system::error_code ignored;
        if (!e) socket->cancel(ignored);
      });
      Status status = co_await talk(*socket, request, s, body);
      timer.cancel();
      if (!status.ok() && reused && !s.any) continue;  // it had gone stale while idle
      if (status.ok() && s.http.keep_alive() && s.http.done()) idle_.push_back(std::move(socket));
      co_return status;
    }
  }

  asio::awaitable<void> one(std::string request, std::shared_ptr<Sink> sink) {
    Stream s;
    const auto body = [&](std::string_view bytes) {
      if (s.http.status() == 200) {
        s.lines.feed(bytes, [&](std::string_view data) { take_event(data, s, *sink); });
      } else if (s.error_body.size() < 4096) {
        s.error_body += bytes;
      }
    };
    Status status = co_await exchange(request, s, body);
    if (status.ok() && (s.http.status() != 200 || !s.error_body.empty())) {
      status = refusal(s.http.status(), s.error_body);
    } else if (status.ok() && !s.finished) {
      status = unavailable("the answer ended early");
    }
    sink->on_done(status, s.usage);
  }

  asio::awaitable<void> fetch(std::string request, std::string& text, std::shared_ptr<Sink> sink) {
    Stream s;
    const Status status = co_await exchange(request, s, [&](std::string_view bytes) { text += bytes; });
    if (s.http.status() != 200) text.clear();
    sink->on_done(status, {});
  }

  TargetOptions options_;
  bool chat_;
  asio::io_context io_{1};
  tcp::resolver::results_type where_;
  asio::executor_work_guard<asio::io_context::executor_type> work_;
  std::vector<std::shared_ptr<tcp::socket>> idle_;  // the one thread's
  std::thread thread_;
};

}  // namespace

Result<std::unique_ptr<Target>> make_openai_target(const TargetOptions& options, bool chat) {
  std::string address = options.address;
  if (address.starts_with("http://")) address.erase(0, 7);
  while (!address.empty() && address.back() == '/') address.pop_back();
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return invalid_argument("address is " + options.address + "; it must be HOST:PORT");
  asio::io_context io;
  boost::system::error_code error;
  auto where = tcp::resolver(io).resolve(address.substr(0, colon), address.substr(colon + 1), error);
  if (error) return unavailable("address " + options.address + ": " + error.message());
  TargetOptions own = options;
  own.address = address;
  return std::unique_ptr<Target>(std::make_unique<OpenAiTarget>(std::move(own), chat, std::move(where)));
}

}  // namespace kvasir::client
