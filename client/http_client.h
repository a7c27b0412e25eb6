// HTTP/1.1 requests to one server, many at a time, plain or TLS, on a thread of its own; connections are kept.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "client/http_stream.h"
#include "client/tls.h"

namespace kvasir::client {

struct HttpEndpoint {
  std::string address;  // HOST:PORT, http://HOST:PORT or https://HOST:PORT
  std::string api_key;
  TlsFiles tls;
};

class HttpClient {
 public:
  static Result<std::unique_ptr<HttpClient>> create(const HttpEndpoint& server, std::chrono::milliseconds timeout);
  virtual ~HttpClient() = default;

  // Both are called on the client's thread; `done` is the last, and says what went wrong with the connection.
  using OnBody = std::function<void(const HttpStream& answer, std::string_view bytes)>;
  using OnDone = std::function<void(const HttpStream& answer, const Status& status)>;
  virtual void post(const std::string& path, const std::string& json, OnBody body, OnDone done) = 0;
  virtual void get(const std::string& path, OnBody body, OnDone done) = 0;
};

}  // namespace kvasir::client
