// GET over HTTP/1.1, with TLS where the address says so: one connection a request, redirects followed, the
// token shown only to the origin it is for.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "cli/hub/url.h"
#include "core/status.h"

namespace kvasir::hub {

struct HttpHead {
  int status = 0;
  int64_t length = -1;  // of this body; -1: not said
  std::string content_range;
};

class HttpClient {
 public:
  struct Options {
    std::string token;                          // empty: none
    std::chrono::milliseconds patience{30000};  // the longest wait for a connection, and for the next byte
    int redirects = 8;
  };
  explicit HttpClient(Options options) : options_(std::move(options)) {}

  // Calls `head` once, for the answer that is no redirect, then `body` with each piece. Either may end it.
  using OnHead = std::function<Status(const HttpHead&)>;
  using OnBody = std::function<Status(std::string_view)>;
  Status get(const Url& url, int64_t from_byte, const OnHead& head, const OnBody& body) const;
  // A whole small answer.
  Result<std::string> get_text(const Url& url, size_t limit) const;

 private:
  Options options_;
};

// What a status other than 2xx means to whoever asked for `what`.
Status refusal(int status, std::string_view what);

}  // namespace kvasir::hub
