#include "server/grpc/unread.h"

#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <string>

#include "core/cat.h"

namespace kvasir::server::rpc {
namespace {

namespace g = grpc::experimental;
using Point = g::InterceptionHookPoints;

// "/kvasir.v1.Inference/Generate" -> "kvasir.v1.GenerateRequest"
std::string input_type(std::string_view method) {
  std::string name(method.substr(method.find_first_not_of('/')));
  std::replace(name.begin(), name.end(), '/', '.');
  const auto* found = google::protobuf::DescriptorPool::generated_pool()->FindMethodByName(name);
  return found ? found->input_type()->full_name() : "message of this method";
}

class Interceptor final : public g::Interceptor {
 public:
  explicit Interceptor(const char* method) : method_(method) {}
  void Intercept(g::InterceptorBatchMethods* batch) override {
    if (batch->QueryInterceptionHookPoint(Point::POST_RECV_MESSAGE)) unread_ = batch->GetRecvMessage() == nullptr;
    if (unread_ && batch->QueryInterceptionHookPoint(Point::PRE_SEND_STATUS))
      batch->ModifySendStatus(
          {grpc::StatusCode::INTERNAL, cat("what was sent is no ", input_type(method_),
                                           ": its bytes do not parse, or a string in it is not UTF-8")});
    batch->Proceed();
  }

 private:
  const char* const method_;
  bool unread_ = false;
};

class Factory final : public g::ServerInterceptorFactoryInterface {
 public:
  g::Interceptor* CreateServerInterceptor(g::ServerRpcInfo* call) override {
    using Type = g::ServerRpcInfo::Type;
    bool one_message = call->type() == Type::UNARY || call->type() == Type::SERVER_STREAMING;
    return one_message ? new Interceptor(call->method()) : nullptr;  // else no message is how a stream ends
  }
};

}  // namespace

std::unique_ptr<g::ServerInterceptorFactoryInterface> answer_the_unread() { return std::make_unique<Factory>(); }

}  // namespace kvasir::server::rpc
