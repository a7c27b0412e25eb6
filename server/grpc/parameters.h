// The parameters of a request, read from a protobuf message by its fields' names (server/parameters.h).
#pragma once

#include <google/protobuf/message.h>

#include "server/generate.h"

namespace kvasir::server::rpc {

// Fields that are set, and that in.wire's protocol has in the table; others are the adapter's to read.
void read_parameters(const google::protobuf::Message& from, GenerateInput& in);

}  // namespace kvasir::server::rpc
