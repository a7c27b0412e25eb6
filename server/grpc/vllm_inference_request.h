// vllm.Inference's GenerateRequest as ours, and what of the answer it asks for.
#pragma once

#include "core/status.h"
#include "server/generate.h"
#include "vllm_inference.pb.h"

namespace kvasir::server::rpc {

constexpr const char* kVllmInference = "vllm.inference";

// The one answer of Generate has no place for a second; GenerateStream numbers them.
Result<GenerateInput> read_vllm_inference(const vllm::GenerateRequest& from, bool streamed,
                                          const ServerOptions& limits);

// Unless it was refused for the asking.
inline bool wants_text(const vllm::GenerateRequest& r) {
  return !r.response().has_output_text() || r.response().output_text();
}

}  // namespace kvasir::server::rpc
