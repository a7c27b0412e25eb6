// grpc.reflection.v1 and v1alpha: which services there are and what their messages look like.
#pragma once

#include "server/grpc/door.h"

namespace kvasir::server::rpc {

void add_reflection(Door& door);  // after the services it is to list

}  // namespace kvasir::server::rpc
