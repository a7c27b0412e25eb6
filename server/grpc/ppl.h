// ppl.llm.proto.LLMService: one call carries many requests, each of which fails alone.
#pragma once

#include <grpcpp/impl/service_type.h>

#include <memory>

#include "server/grpc/call.h"

namespace kvasir::server::rpc {

std::unique_ptr<grpc::Service> ppl_service(const Context& context);

}  // namespace kvasir::server::rpc
