// One GET, over plain HTTP or TLS, for health checks inside a container that has no curl.
#pragma once

#include <chrono>
#include <string>

#include "core/status.h"

namespace kvasir::cli {

// How to speak TLS: whom to trust, and what to show who asks for a certificate. No CA: plain.
struct TlsFiles {
  std::string ca, cert, key;
};

struct HttpReply {
  int status = 0;
  std::string body;
};

Result<HttpReply> http_get(const std::string& host, int port, const std::string& path, const TlsFiles& tls,
                           std::chrono::milliseconds limit);

}  // namespace kvasir::cli
