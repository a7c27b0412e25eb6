// ppl.llm.proto.LLMService: one call carries many requests, each of which fails alone.
#pragma once

#include "server/grpc/door.h"

namespace kvasir::server::rpc {

void add_ppl(Door& door);

}  // namespace kvasir::server::rpc
