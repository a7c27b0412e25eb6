// What a call is answered whose message cannot be read (no protobuf of that type, or a string that is not UTF-8).
// Left alone gRPC says UNIMPLEMENTED without a word, as if the method were not there.
#pragma once

#include <grpcpp/support/server_interceptor.h>

#include <memory>

namespace kvasir::server::rpc {

// For every method that takes one message; it becomes INTERNAL, the transport's own status for bytes that it refuses.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> answer_the_unread();

}  // namespace kvasir::server::rpc
