// The few URLs a model comes from: who is asked, and whether a redirect may be followed there.
#pragma once

#include <string>
#include <string_view>

#include "core/status.h"

namespace kvasir::hub {

struct Url {
  bool tls = true;
  std::string host;
  int port = 443;
  std::string target = "/";  // path and query, as they are sent

  bool same_origin(const Url& o) const { return tls == o.tls && host == o.host && port == o.port; }
  bool loopback() const;
  std::string origin() const;  // "https://host:8443"
};

// http:// or https:// and a host; no user names, no spaces, no control characters.
Result<Url> parse_url(std::string_view text);
// What a Location header of an answer from `from` means. From TLS it must be TLS again, and without it
// only this machine may be named.
Result<Url> redirected(const Url& from, std::string_view location);
// Bytes that a path may not hold as they are become %XX; '/' stays.
std::string escape_path(std::string_view path);

}  // namespace kvasir::hub
