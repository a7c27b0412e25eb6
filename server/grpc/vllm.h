// vllm.grpc.engine.VllmEngine: what fleet gateways and routers drive an engine by.
#pragma once

#include "server/grpc/door.h"
#include "server/grpc/kv_events.h"

namespace kvasir::server::rpc {

void add_vllm(Door& door, Services& services, KvEvents& kv_events);

}  // namespace kvasir::server::rpc
