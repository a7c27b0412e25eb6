// The HTTP port: accepts connections, spreads them over a few threads, and ends them in order.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "core/status.h"
#include "server/http/http.h"

namespace boost::asio::ssl {
class context;
}

namespace kvasir::server::http {

struct HttpServerOptions {
  std::string host = "127.0.0.1";
  int port = 8000;  // 0 takes a free one
  int threads = 2;
  int workers = 2;  // threads the handler runs on
  int max_connections = 4096;
  size_t max_body = 8 << 20;
  // Requests that neither work nor wait: answered where the bytes are read, whatever the workers do.
  std::function<bool(const Request&)> at_once;
  std::chrono::milliseconds header_timeout{10'000}, idle_timeout{75'000}, write_timeout{60'000};
  // The TLS settings of the moment, asked for at each new connection; none: plain HTTP.
  std::function<std::shared_ptr<boost::asio::ssl::context>()> tls;
};

class HttpServer {
 public:
  using Handler = std::function<Reply(const Request&)>;  // runs on a worker thread

  // Connections that are taken over max_connections, for health alone and for a moment.
  static constexpr int kSpare = 16;

  virtual ~HttpServer() = default;  // stops
  static Result<std::unique_ptr<HttpServer>> start(const HttpServerOptions& options, Handler handler);

  virtual int port() const = 0;
  virtual int connections() const = 0;
  // Replies now end their connections; those that are idle close. New ones are still answered, so that
  // probes and refusals get through.
  virtual void drain() = 0;
  virtual void stop() = 0;  // closes everything and joins the threads
};

}  // namespace kvasir::server::http
