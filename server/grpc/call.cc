#include "server/grpc/call.h"

#include <algorithm>

#include "core/cat.h"

namespace kvasir::server::rpc {

grpc::Status to_grpc(const Status& status, grpc::ServerContextBase* call) {
  if (status.ok()) return grpc::Status::OK;
  if (auto after = status.retry_after(); after && call) {
    call->AddTrailingMetadata("retry-after", cat((after->count() + 999) / 1000));
    call->AddTrailingMetadata("grpc-retry-pushback-ms", cat(after->count()));
  }
  return {grpc::StatusCode(int(status.code())), status.message()};
}

std::string metadata(const grpc::ServerContextBase& call, const char* key) {
  const auto& all = call.client_metadata();
  auto it = all.find(key);
  return it == all.end() ? std::string() : std::string(it->second.data(), it->second.size());
}

Result<Caller> caller_of(Services& services, const grpc::ServerContextBase& call) {
  if (!services.has_keys()) return everyone();
  std::string key = metadata(call, "authorization");
  if (key.empty()) key = metadata(call, "x-api-key");
  return services.authenticate(key);
}

std::optional<Time> deadline_of(const grpc::ServerContextBase& call) {
  auto deadline = call.deadline();
  auto left = deadline - std::chrono::system_clock::now();
  if (left > std::chrono::hours(24 * 365)) return std::nullopt;  // none was set
  return std::chrono::steady_clock::now() + std::chrono::duration_cast<Duration>(left);
}

void carry(const grpc::ServerContextBase& call, engine::Request& request) {
  request.deadline = deadline_of(call);
  request.trace_parent = metadata(call, "traceparent");
  if (request.trace_parent.size() > 64) request.trace_parent.clear();  // not a W3C traceparent
}

}  // namespace kvasir::server::rpc
