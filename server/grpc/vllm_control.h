// vllm.Control: what there is of this server, and who may change it.
#pragma once

#include "server/grpc/door.h"

namespace kvasir::server::rpc {

void add_vllm_control(Door& door, Services& services);

}  // namespace kvasir::server::rpc
