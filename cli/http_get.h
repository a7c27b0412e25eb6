// One GET over plain HTTP, for health checks inside a container that has no curl.
#pragma once

#include <chrono>
#include <string>

#include "core/status.h"

namespace kvasir::cli {

struct HttpReply {
  int status = 0;
  std::string body;
};

Result<HttpReply> http_get(const std::string& host, int port, const std::string& path, std::chrono::milliseconds limit);

}  // namespace kvasir::cli
