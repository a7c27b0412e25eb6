// kvasir.v1.Inference: our own contract, nearest to engine::Request.
#pragma once

#include <grpcpp/impl/service_type.h>

#include <memory>

#include "server/grpc/call.h"

namespace kvasir::server::rpc {

std::unique_ptr<grpc::Service> kvasir_v1_service(const Context& context);

}  // namespace kvasir::server::rpc
