// VllmEngine's GenerateRequest as ours: its zeros, its refusals by name.
#pragma once

#include "core/status.h"
#include "server/generate.h"
#include "vllm_engine.pb.h"

namespace kvasir::server::rpc {

// `truncate` is set when the prompt is to keep only its last so many tokens (-1: what the context holds).
Result<GenerateInput> read_vllm_request(const vllm::grpc::engine::GenerateRequest& from,
                                        std::optional<int64_t>& truncate);

}  // namespace kvasir::server::rpc
