// inference.GRPCInferenceService (KServe version 2): text_input in, text_output out.
#pragma once

#include <grpcpp/impl/service_type.h>

#include <memory>

#include "server/grpc/call.h"

namespace kvasir::server::rpc {

std::unique_ptr<grpc::Service> kserve_service(const Context& context);

}  // namespace kvasir::server::rpc
