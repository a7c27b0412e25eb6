// The HTTP port: accepts connections, spreads them over a few threads, and ends them in order.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "core/status.h"
#include "server/http/http.h"
#include "server/memory.h"

namespace boost::asio::ssl {
class context;
}

namespace kvasir::server::http {

struct HttpServerOptions {
  std::string host = "127.0.0.1";
  int port = 8000;  // 0 takes a free one
  int threads = 2;
  int workers = 2;  // threads that answers are made on
  int max_connections = 4096;
  size_t max_body = 8 << 20;
  ByteBudget* budget = nullptr;  // outlives the server
  std::chrono::milliseconds header_timeout{10'000}, idle_timeout{75'000}, write_timeout{60'000};
  // The TLS settings of the moment, asked for at each new connection; none: plain HTTP.
  std::function<std::shared_ptr<boost::asio::ssl::context>()> tls;
};

class HttpServer {
 public:
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
