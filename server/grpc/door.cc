#include "server/grpc/door.h"

#include "core/cat.h"
#include "server/grpc/wire_guard.h"

namespace kvasir::server::rpc {

std::vector<std::string> Door::services() const {
  std::vector<std::string> names;
  for (const auto& [method, _] : methods_) {
    std::string name = method.substr(1, method.rfind('/') - 1);
    if (names.empty() || names.back() != name) names.push_back(std::move(name));  // the map is in their order
  }
  return names;
}

Result<Caller> Door::admit(const Method& method, const grpc::GenericCallbackServerContext& call) {
  if (!method.role) return Caller();
  KVASIR_ASSIGN(Caller caller, caller_of(context_.services, call));
  KVASIR_TRY(caller.require(*method.role, call.method().c_str() + call.method().rfind('/') + 1));
  if (method.costs) KVASIR_TRY(context_.services.may_ask(caller, method.costs));
  return caller;
}

std::shared_ptr<Incoming> Door::open(grpc::GenericCallbackServerContext* call) {
  auto refuse = [&](const Status& why) {
    return std::make_shared<Refused>(Opening{context_, call, {}}, to_grpc(why, call));
  };
  auto found = methods_.find(call->method());
  if (found == methods_.end()) {
    context_.calls.refused(call->peer());
    return refuse(unimplemented(cat("there is no method ", call->method().substr(0, 128), " on this server")));
  }
  const Method& method = found->second;
  auto caller = admit(method, *call);
  if (!caller.ok()) {
    if (caller.status().code() == Code::unauthenticated) context_.calls.refused(call->peer());
    return refuse(caller.status());
  }
  if (method.role) know_connection(call->peer());
  std::shared_ptr<Incoming> made = method.make({context_, call, *std::move(caller)});
  if (context_.calls.enter(*made, !method.role)) return made;
  return refuse(resource_exhausted("the server has as many open calls as it may (max_calls); try again")
                    .with_retry_after(std::chrono::seconds(1)));
}

grpc::ServerGenericBidiReactor* Door::CreateReactor(grpc::GenericCallbackServerContext* call) {
  auto made = open(call);
  made->begin();
  return made.get();
}

}  // namespace kvasir::server::rpc
