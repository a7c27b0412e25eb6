// Each tenant's share of the clock: requests and tokens a minute as buckets that refill, and how many
// requests it may have open at once. What a bucket holds is a share of the limit, not a count: keys of one tenant may
// have different limits or none, and a limit may change while the server runs.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "core/clock.h"
#include "core/status.h"
#include "server/caller.h"

namespace kvasir::server {

class Limiter {
 public:
  explicit Limiter(const Clock& clock) : clock_(clock) {}

  // A refusal is RESOURCE_EXHAUSTED with the time after which it would pass.
  Status room(const Caller& caller);  // whether it may ask now; costs nothing
  Status ask(const Caller& caller);   // one request, whatever becomes of it: what is looked at costs
  Status admit(const Caller& caller, int64_t prompt_tokens);  // one that asked is taken: it is open until release()
  void spend(const Caller& caller, int64_t output_tokens);    // output counts as it comes
  void release(const Caller& caller);                         // an admitted request is over

 private:
  struct Tenant {
    double requests = 1, tokens = 1;  // what the buckets hold, of a minute's allowance
    int64_t open = 0;
    Time filled{};
  };
  Tenant& refilled(const Caller& caller);
  static Status may_ask(const Caller& caller, const Tenant& t);

  const Clock& clock_;
  std::mutex mutex_;
  std::unordered_map<std::string, Tenant> tenants_;  // only tenants of keys: a client cannot add one
};

}  // namespace kvasir::server
