#include "server/grpc/parameters.h"

#include "server/parameters.h"

namespace kvasir::server::rpc {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

int64_t integer(const Message& m, const Reflection& r, const FieldDescriptor* f) {
  switch (f->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32: return r.GetInt32(m, f);
    case FieldDescriptor::CPPTYPE_UINT32: return r.GetUInt32(m, f);
    case FieldDescriptor::CPPTYPE_UINT64: return int64_t(r.GetUInt64(m, f));
    default: return r.GetInt64(m, f);
  }
}

std::vector<int64_t> ids_of(const Message& m, const FieldDescriptor* f) {
  const Reflection& r = *m.GetReflection();
  std::vector<int64_t> ids(size_t(r.FieldSize(m, f)));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = r.GetRepeatedUInt32(m, f, int(i));
  return ids;
}

void read_bias(const Message& m, const FieldDescriptor* f, GenerateInput& in) {
  const Reflection& r = *m.GetReflection();
  const FieldDescriptor *key = f->message_type()->map_key(), *value = f->message_type()->map_value();
  std::vector<std::pair<int64_t, float>> all;
  for (int i = 0; i < r.FieldSize(m, f); ++i) {
    const Message& entry = r.GetRepeatedMessage(m, f, i);
    all.emplace_back(integer(entry, *entry.GetReflection(), key), entry.GetReflection()->GetFloat(entry, value));
  }
  set_bias(std::move(all), in);
}

void read(const Message& m, const FieldDescriptor* f, const Parameter& p, GenerateInput& in) {
  const Reflection& r = *m.GetReflection();
  if (f->is_map()) return read_bias(m, f, in);
  if (f->is_repeated() && f->cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
    std::vector<std::string>& to =
        in.request.*std::get<std::vector<std::string> engine::Request::*>(std::get<RequestMember>(p.to));
    for (int i = 0; i < r.FieldSize(m, f); ++i) to.push_back(r.GetRepeatedString(m, f, i));
    return;
  }
  if (f->is_repeated()) return set_ids(p, ids_of(m, f), in);
  switch (f->cpp_type()) {
    case FieldDescriptor::CPPTYPE_MESSAGE: {  // a list of its own, so that an empty one is seen
      const Message& list = r.GetMessage(m, f);
      return set_ids(p, ids_of(list, list.GetDescriptor()->FindFieldByName("ids")), in);
    }
    case FieldDescriptor::CPPTYPE_FLOAT:
      in.request.sampling.*std::get<float model::SamplingParams::*>(std::get<SamplingMember>(p.to)) = r.GetFloat(m, f);
      return;
    case FieldDescriptor::CPPTYPE_BOOL:
      if (const auto* sampling = std::get_if<SamplingMember>(&p.to))
        in.request.sampling.*std::get<bool model::SamplingParams::*>(*sampling) = r.GetBool(m, f);
      else if (const auto* maybe = std::get_if<std::optional<bool> engine::Request::*>(&std::get<RequestMember>(p.to)))
        in.request.** maybe = r.GetBool(m, f);
      else
        in.request.*std::get<bool engine::Request::*>(std::get<RequestMember>(p.to)) = r.GetBool(m, f);
      return;
    case FieldDescriptor::CPPTYPE_STRING:
      in.request.*std::get<std::string engine::Request::*>(std::get<RequestMember>(p.to)) = r.GetString(m, f);
      return;
    default: set_integer(p, integer(m, r, f), in);
  }
}

}  // namespace

void read_parameters(const Message& from, GenerateInput& in) {
  std::vector<const FieldDescriptor*> set;
  from.GetReflection()->ListFields(from, &set);
  for (const FieldDescriptor* f : set)
    if (const FoundParameter found = find_parameter(in.wire, f->name()); found.row) read(from, f, *found.row, in);
}

}  // namespace kvasir::server::rpc
