// grpc.health.v1 asked once.
#pragma once

#include "cli/http_get.h"

namespace kvasir::cli {

// "SERVING" or what else it says of itself.
Result<std::string> grpc_health(const std::string& host, int port, const std::string& service, const TlsFiles& tls,
                                std::chrono::milliseconds limit);

}  // namespace kvasir::cli
