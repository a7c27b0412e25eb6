// inference.GRPCInferenceService (KServe version 2): text_input in, text_output out.
#pragma once

#include "server/grpc/door.h"

namespace kvasir::server::rpc {

void add_kserve(Door& door, Services& services);

}  // namespace kvasir::server::rpc
