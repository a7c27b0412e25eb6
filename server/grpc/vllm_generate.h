// VllmEngine's Generate.
#pragma once

#include "server/grpc/stream_call.h"
#include "vllm_engine.pb.h"

namespace kvasir::server::rpc {

std::shared_ptr<StreamCall<vllm::grpc::engine::GenerateResponse>> vllm_generate(
    const Context& context, grpc::CallbackServerContext* call, const vllm::grpc::engine::GenerateRequest* request);

}  // namespace kvasir::server::rpc
