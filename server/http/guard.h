// What a browser may not be talked into doing to a server that asks for no key: Host names it was not
// called by (DNS rebinding), pages of other origins, and posts a plain form can make.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/status.h"
#include "server/http/http.h"

namespace kvasir::server::http {

struct GuardOptions {
  bool keyless = true;             // with keys, the key is what proves a caller
  std::vector<std::string> hosts;  // names it answers to, besides loopback's own
  std::vector<std::string> cors;   // origins whose pages may call; "*" is any, "localhost" any of this machine's
  // Allowed pages may say `credentials: "include"`. Nothing here reads cookies; but a browser would send its own
  // certificate along, too, so not where those are asked for.
  bool credentials = true;
};

class Guard {
 public:
  explicit Guard(GuardOptions options) : options_(std::move(options)) {}

  Status check(const HttpRequest& request) const;
  // Adds the headers that let an allowed origin's page read the reply.
  void allow(const HttpRequest& request, HttpResponse& response) const;
  // The answer to a preflight question; without any such header to pages that may not call.
  HttpResponse preflight(const HttpRequest& request) const;

 private:
  bool origin_allowed(std::string_view origin, std::string_view host) const;

  GuardOptions options_;
};

}  // namespace kvasir::server::http
