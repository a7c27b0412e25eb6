#include "server/grpc/parts.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <cstdint>

namespace kvasir::server::rpc {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::internal::WireFormatLite;

constexpr int kMostDepth = 100;  // the parser's own

class Counter {
 public:
  explicit Counter(google::protobuf::io::CodedInputStream& in) : in_(in) {}
  size_t parts() const { return parts_; }

  // False: enough was seen.
  bool count(const Descriptor* type, int depth) {
    for (uint32_t tag; (tag = in_.ReadTag()) != 0;) {
      if (WireFormatLite::GetTagWireType(tag) != WireFormatLite::WIRETYPE_LENGTH_DELIMITED) {
        if (!WireFormatLite::SkipField(&in_, tag)) return false;
        continue;
      }
      uint32_t size = 0;
      if (++parts_ > kMostParts || !in_.ReadVarint32(&size)) return false;
      const FieldDescriptor* field = type->FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag));
      if (!field || field->type() != FieldDescriptor::TYPE_MESSAGE) {
        if (!in_.Skip(int(size))) return false;
        continue;
      }
      if (depth >= kMostDepth) return false;
      const auto limit = in_.PushLimit(int(size));
      const bool more = count(field->message_type(), depth + 1);
      in_.PopLimit(limit);
      if (!more) return false;
    }
    return true;
  }

 private:
  google::protobuf::io::CodedInputStream& in_;
  size_t parts_ = 0;
};

}  // namespace

bool few_parts(grpc::ByteBuffer& bytes, const Descriptor& type) {
  if (bytes.Length() <= kMostParts) return true;
  grpc::ProtoBufferReader reader(&bytes);
  google::protobuf::io::CodedInputStream in(&reader);
  Counter counter(in);
  counter.count(&type, 0);
  return counter.parts() <= kMostParts;
}

}  // namespace kvasir::server::rpc
