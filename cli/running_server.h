// Where a `kvasir serve` that runs on this machine listens, read from how it was started.
#pragma once

#include <string>

#include "core/status.h"

namespace kvasir::cli {

struct RunningServer {
  std::string host;                    // an address to reach it by from here
  int http_port = -1, grpc_port = -1;  // -1: off, or not known because a free one was asked for
  bool tls = false, asks_for_certificates = false;
  std::string tls_cert, tls_key;  // its own
};

Result<RunningServer> running_server(int pid);

}  // namespace kvasir::cli
