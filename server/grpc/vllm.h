// vllm.grpc.engine.VllmEngine: what fleet gateways and routers drive an engine by.
#pragma once

#include <grpcpp/impl/service_type.h>

#include <memory>

#include "server/grpc/call.h"

namespace kvasir::server::rpc {

std::unique_ptr<grpc::Service> vllm_service(const Context& context);

}  // namespace kvasir::server::rpc
