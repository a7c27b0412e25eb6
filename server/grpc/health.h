// grpc.health.v1: the state of the step loop, not of the socket. Its own thread looks at the state only
// while somebody watches.
#pragma once

#include <memory>

#include "server/grpc/door.h"

namespace kvasir::server::rpc {

class HealthService {
 public:
  virtual ~HealthService() = default;  // after the last call
  static std::unique_ptr<HealthService> create(Door& door, Services& services);
  virtual void stop() = 0;  // nothing changes any more
};

}  // namespace kvasir::server::rpc
