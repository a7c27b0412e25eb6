// kvasir.v1.Inference: our own contract, nearest to engine::Request.
#pragma once

#include "server/grpc/door.h"

namespace kvasir::server::rpc {

void add_kvasir_v1(Door& door, Services& services);

}  // namespace kvasir::server::rpc
