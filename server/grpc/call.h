// What every gRPC adapter needs of a call: who calls, how long it may take, and our Status as gRPC's.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>
#include <grpcpp/support/status.h>

#include <optional>
#include <string>

#include "core/clock.h"
#include "core/status.h"
#include "server/services.h"
#include "server/workers.h"

namespace kvasir::server::rpc {

class Calls;

// What the adapters share: one set for the gRPC port.
struct Context {
  Services& services;
  Calls& calls;
  Workers& workers;   // parse, render, tokenize, submit
  Workers& delivery;  // events to messages
};

// Adds retry-after (seconds) and grpc-retry-pushback-ms to the trailers when the status has one.
grpc::Status to_grpc(const Status& status, grpc::ServerContextBase* call);

std::string metadata(const grpc::ServerContextBase& call, const char* key);  // empty: not sent
Result<Caller> caller_of(Services& services, const grpc::ServerContextBase& call);
std::optional<Time> deadline_of(const grpc::ServerContextBase& call);

// Deadline and trace id into the request.
void carry(const grpc::ServerContextBase& call, engine::Request& request);

}  // namespace kvasir::server::rpc
