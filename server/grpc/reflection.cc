#include "server/grpc/reflection.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>

#include <set>
#include <string>
#include <vector>

#include "core/cat.h"
#include "reflection.pb.h"
#include "reflection_v1alpha.pb.h"

namespace kvasir::server::rpc {
namespace {

using google::protobuf::DescriptorPool;
using google::protobuf::FileDescriptor;

constexpr size_t kMostBytes = 4096;  // a name, and what it is the name of

const FileDescriptor* file_of(const std::string& symbol) {
  return DescriptorPool::generated_pool()->FindFileContainingSymbol(symbol);
}

// The file and all that it needs.
template <class Files>
void add_files(const FileDescriptor& file, std::set<const FileDescriptor*>& seen, Files& to) {
  if (!seen.insert(&file).second) return;
  google::protobuf::FileDescriptorProto proto;
  file.CopyTo(&proto);
  to.add_file_descriptor_proto(proto.SerializeAsString());
  for (int i = 0; i < file.dependency_count(); ++i) add_files(*file.dependency(i), seen, to);
}

// One question, one answer, as often as the client likes; silence ends it.
template <class Request, class Response>
class ReflectionCall final : public Incoming {
 public:
  ReflectionCall(Opening opening, std::shared_ptr<const std::vector<std::string>> services)
      : Incoming(std::move(opening)), services_(std::move(services)) {}

  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
    if (ok && !finished()) listen();
  }
  void OnCancel() override { end(grpc::Status(grpc::StatusCode::CANCELLED, "the client went away")); }

 private:
  void no_message() override { end(grpc::Status::OK); }
  void message() override {
    Request request;
    if (received_.Length() > kMostBytes)
      return end({grpc::StatusCode::INVALID_ARGUMENT,
                  cat("the message has ", received_.Length(), " bytes; at most ", kMostBytes, " are taken here")});
    if (Status parsed = parse(received_, request); !parsed.ok()) return end(to_grpc(parsed, call_));
    Response response;
    response.set_valid_host(request.host());
    *response.mutable_original_request() = request;
    answer(request, response);
    serialize(response, bytes_);
    std::lock_guard lock(mutex_);
    if (!finished()) StartWrite(&bytes_);
  }

  void answer(const Request& request, Response& to) {
    switch (request.message_request_case()) {
      case Request::kListServices:
        for (const std::string& name : *services_) to.mutable_list_services_response()->add_service()->set_name(name);
        return;
      case Request::kFileByFilename:
        return answer(DescriptorPool::generated_pool()->FindFileByName(request.file_by_filename()), to);
      case Request::kFileContainingSymbol: return answer(file_of(request.file_containing_symbol()), to);
      case Request::kAllExtensionNumbersOfType:
        if (!file_of(request.all_extension_numbers_of_type())) return none(to);
        to.mutable_all_extension_numbers_response()->set_base_type_name(request.all_extension_numbers_of_type());
        return;  // no message here has extensions
      default: return none(to);
    }
  }
  static void answer(const FileDescriptor* file, Response& to) {
    if (!file) return none(to);
    std::set<const FileDescriptor*> seen;
    add_files(*file, seen, *to.mutable_file_descriptor_response());
  }
  static void none(Response& to) {
    to.mutable_error_response()->set_error_code(grpc::StatusCode::NOT_FOUND);
    to.mutable_error_response()->set_error_message("there is nothing of that name here");
  }

  const std::shared_ptr<const std::vector<std::string>> services_;
  grpc::ByteBuffer bytes_;
};

}  // namespace

void add_reflection(Door& door) {
  auto names = std::make_shared<std::vector<std::string>>();
  auto add = [&]<class Request, class Response>(const char* package) {
    door.add(cat('/', package, ".ServerReflection/ServerReflectionInfo"), std::nullopt,
             [names](Opening o) -> std::shared_ptr<Incoming> {
               return std::make_shared<ReflectionCall<Request, Response>>(std::move(o), names);
             });
  };
  namespace v1 = grpc::reflection::v1;
  namespace v1alpha = grpc::reflection::v1alpha;
  add.operator()<v1::ServerReflectionRequest, v1::ServerReflectionResponse>("grpc.reflection.v1");
  add.operator()<v1alpha::ServerReflectionRequest, v1alpha::ServerReflectionResponse>("grpc.reflection.v1alpha");
  *names = door.services();
}

}  // namespace kvasir::server::rpc
