// How many strings and messages a message is made of, told from its bytes: an empty one takes two of them on the wire
// and a hundred in memory.
#pragma once

#include <google/protobuf/descriptor.h>
#include <grpcpp/support/byte_buffer.h>

#include <cstddef>

namespace kvasir::server::rpc {

constexpr size_t kMostParts = 200'000;

// False: there are more than kMostParts. What cannot be read is left to the parser.
bool few_parts(grpc::ByteBuffer& bytes, const google::protobuf::Descriptor& type);

}  // namespace kvasir::server::rpc
