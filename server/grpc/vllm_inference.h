// vllm.Inference: what Dynamo asks vLLM's own server by.
#pragma once

#include "server/grpc/door.h"

namespace kvasir::server::rpc {

void add_vllm_inference(Door& door);

}  // namespace kvasir::server::rpc
