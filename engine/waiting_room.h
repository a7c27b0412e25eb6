// Who was let in and has not begun to run, in all and by tenant: what the queue's limits are about. Any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>

#include "core/cat.h"
#include "core/status.h"

namespace kvasir::engine {

class WaitingRoom {
 public:
  struct Limits {
    int64_t requests = 0, tokens = 0;
    // What one tenant may have, in parts of what is then left for everybody; 0: no bound. A tenant without a name, as
    // all are where there are no keys, has none.
    double tenant_share = 0;
  };
  struct Held {
    int64_t requests = 0, tokens = 0;
  };

  // `rate`: tokens computed a second lately, for the time to come back.
  Status enter(const std::string& tenant, int64_t tokens, const Limits& limits, double rate) {
    std::lock_guard lock(mutex_);
    // A prompt longer than all that may wait is let in before an empty queue: it would be refused for ever.
    if (all_.requests + 1 > limits.requests)
      return refuse(cat("the queue is full: ", limits.requests, " requests are waiting"), all_.tokens, rate);
    if (all_.tokens + tokens > limits.tokens && all_.requests > 0)
      return refuse(cat("the queue is full: ", limits.tokens, " prompt tokens are waiting"), all_.tokens, rate);
    const auto known = tenants_.find(tenant);
    const Held own = known == tenants_.end() ? Held() : known->second;
    if (limits.tenant_share > 0 && !tenant.empty() && own.requests > 0) {
      const auto over = [&](int64_t mine, int64_t all, int64_t most) {
        return double(mine) > limits.tenant_share * double(most - all);
      };
      if (over(own.requests + 1, all_.requests, limits.requests) ||
          over(own.tokens + tokens, all_.tokens, limits.tokens))
        return refuse(cat(own.requests, " requests of yours with ", own.tokens,
                          " prompt tokens are waiting; what else there is room for is for others, too"),
                      own.tokens, rate);
    }
    for (Held* held : {&all_, &tenants_[tenant]}) ++held->requests, held->tokens += tokens;
    return {};
  }
  void leave(const std::string& tenant, int64_t tokens) {
    std::lock_guard lock(mutex_);
    auto own = tenants_.find(tenant);
    for (Held* held : {&all_, &own->second}) --held->requests, held->tokens -= tokens;
    if (own->second.requests == 0) tenants_.erase(own);
  }
  Held all() const {
    std::lock_guard lock(mutex_);
    return all_;
  }

 private:
  // When a quarter of it is gone there is room again.
  Status refuse(const std::string& why, int64_t queued, double rate) const {
    const double wait = rate > 0 ? std::clamp(double(queued) / rate / 4, 1.0, 60.0) : 1.0;
    return resource_exhausted(cat(why, "; try again in ", int(wait), " s"))
        .with_retry_after(std::chrono::milliseconds(int64_t(wait * 1000)));
  }

  mutable std::mutex mutex_;
  Held all_;
  std::unordered_map<std::string, Held> tenants_;  // with something here
};

}  // namespace kvasir::engine
