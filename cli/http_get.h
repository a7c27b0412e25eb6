// One GET, over plain HTTP or TLS, for health checks inside a container that has no curl.
#pragma once

#include <chrono>
#include <string>

#include "core/status.h"

namespace kvasir::cli {

// How to speak TLS: whom to trust, and what to show who asks for a certificate. No CA and nobody: plain.
struct TlsFiles {
  std::string ca, cert, key;
  bool trust_anybody = false;  // who is asked is known otherwise, and nothing is told to it
  bool plain() const { return ca.empty() && !trust_anybody; }
};

struct HttpReply {
  int status = 0;
  std::string body;
};

Result<HttpReply> http_get(const std::string& host, int port, const std::string& path, const TlsFiles& tls,
                           std::chrono::milliseconds limit);

}  // namespace kvasir::cli
