// VllmEngine's Generate.
#pragma once

#include <memory>

#include "server/grpc/incoming.h"

namespace kvasir::server::rpc {

std::shared_ptr<Incoming> vllm_generate(Opening opening);

}  // namespace kvasir::server::rpc
