// One client connection: reads requests within limits of bytes and time, has each answered on a worker,
// writes the reply at the pace the client reads it, and notices when the client has gone.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <set>

#include "server/http/http.h"
#include "server/http/transport.h"
#include "server/memory.h"
#include "server/workers.h"

namespace kvasir::server::http {

struct ConnectionLimits {
  size_t max_header_bytes = 16 << 10;
  size_t max_body_bytes = 8 << 20;
  std::chrono::milliseconds header_time{10'000};  // for the whole header, and then for the whole body
  std::chrono::milliseconds idle_time{75'000};    // between requests
  std::chrono::milliseconds write_time{60'000};   // a reader that takes nothing for so long is dropped
};

struct ConnectionContext {
  ConnectionLimits limits;
  Handler handler;  // its answers run on `workers`: they may parse and tokenize
  Workers* workers = nullptr;
  ByteBudget* budget = nullptr;    // of bodies and of whole answers
  std::function<bool()> draining;  // then replies say Connection: close
  bool spare = false;              // kept for health: of all else it is said that there is no room
};

// Connections of one loop that wait for a request, so that a drain can end them.
using IdleSet = std::set<Transport*>;

// Lives until the connection ends; `context` and `idle` outlive it.
Task<void> serve_connection(std::unique_ptr<Transport> transport, const ConnectionContext& context, IdleSet& idle,
                            Executor executor);

}  // namespace kvasir::server::http
