// grpc.health.v1: the state of the step loop, not of the socket. Its own thread looks at the state only
// while somebody watches.
#pragma once

#include <grpcpp/impl/service_type.h>

#include <memory>

#include "server/grpc/call.h"

namespace kvasir::server::rpc {

class HealthService {
 public:
  virtual ~HealthService() = default;
  static std::unique_ptr<HealthService> create(const Context& context);
  virtual grpc::Service* service() = 0;
  virtual void stop() = 0;  // ends the watches, so that the port can close
};

}  // namespace kvasir::server::rpc
