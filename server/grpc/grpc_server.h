// The gRPC port: every service on it, its credentials and its limits.
#pragma once

#include <chrono>
#include <memory>

#include "core/status.h"
#include "server/services.h"
#include "server/tls.h"

namespace kvasir::server::rpc {

class GrpcServer {
 public:
  virtual ~GrpcServer() = default;  // stops
  // No `tls`: it speaks plainly.
  static Result<std::unique_ptr<GrpcServer>> start(Services& services, std::shared_ptr<TlsSource> tls);
  virtual int port() const = 0;
  // Waits for the calls that run, at most until the deadline; then ends what is left.
  virtual void stop(std::chrono::milliseconds limit) = 0;
};

}  // namespace kvasir::server::rpc
