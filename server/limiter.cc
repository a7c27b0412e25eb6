#include "server/limiter.h"

#include <algorithm>
#include <cmath>

#include "core/cat.h"
#include "core/check.h"

namespace kvasir::server {
namespace {

constexpr double kRounding = 1e-3;  // of a request or a token

// A limit of 0 is none: it costs nothing.
double cost(int64_t amount, int64_t per_minute) { return per_minute > 0 ? double(amount) / double(per_minute) : 0; }

// Until a bucket that holds `share` has room for `amount`; zero: it has.
std::chrono::milliseconds until(double share, int64_t amount, int64_t per_minute) {
  const double missing = double(amount) - share * double(per_minute);
  if (per_minute <= 0 || missing <= kRounding) return std::chrono::milliseconds(0);
  return std::chrono::milliseconds(int64_t(std::ceil(missing * 60000.0 / double(per_minute))));
}

}  // namespace

Limiter::Tenant& Limiter::refilled(const Caller& caller) {
  Tenant& t = tenants_[caller.tenant];
  const Time now = clock_.now();
  const double minutes = std::chrono::duration<double, std::ratio<60>>(now - t.filled).count();
  t.requests = std::min(1.0, t.requests + minutes);
  t.tokens = std::min(1.0, t.tokens + minutes);
  t.filled = now;
  return t;
}

Status Limiter::may_ask(const Caller& caller, const Tenant& t) {
  const TenantLimits& limits = caller.limits;
  if (limits.concurrent > 0 && t.open >= limits.concurrent)
    return resource_exhausted(cat("tenant ", caller.tenant, " has ", t.open, " requests open; its limit is ",
                                  limits.concurrent, "; wait for one to end"))
        .with_retry_after(std::chrono::seconds(1));
  if (auto wait = until(t.requests, 1, limits.requests_per_minute); wait.count() > 0)
    return resource_exhausted(
               cat("tenant ", caller.tenant, " is over its ", limits.requests_per_minute, " requests a minute"))
        .with_retry_after(wait);
  return {};
}

Status Limiter::room(const Caller& caller) {
  std::lock_guard lock(mutex_);
  return may_ask(caller, refilled(caller));
}

Status Limiter::ask(const Caller& caller) {
  std::lock_guard lock(mutex_);
  Tenant& t = refilled(caller);
  KVASIR_TRY(may_ask(caller, t));
  t.requests -= cost(1, caller.limits.requests_per_minute);
  return {};
}

Status Limiter::admit(const Caller& caller, int64_t prompt_tokens) {
  const TenantLimits& limits = caller.limits;
  std::lock_guard lock(mutex_);
  Tenant& t = refilled(caller);
  if (limits.concurrent > 0 && t.open >= limits.concurrent) return may_ask(caller, t);  // another came first
  if (limits.tokens_per_minute > 0 && prompt_tokens > limits.tokens_per_minute)
    return invalid_argument(cat("the prompt has ", prompt_tokens, " tokens; tenant ", caller.tenant, " may use ",
                                limits.tokens_per_minute, " a minute, so it can never run"));
  if (auto wait = until(t.tokens, prompt_tokens, limits.tokens_per_minute); wait.count() > 0)
    return resource_exhausted(
               cat("tenant ", caller.tenant, " is over its ", limits.tokens_per_minute, " tokens a minute"))
        .with_retry_after(wait);
  t.tokens -= cost(prompt_tokens, limits.tokens_per_minute);
  ++t.open;
  return {};
}

void Limiter::spend(const Caller& caller, int64_t output_tokens) {
  if (caller.limits.tokens_per_minute <= 0) return;
  std::lock_guard lock(mutex_);
  tenants_[caller.tenant].tokens -= cost(output_tokens, caller.limits.tokens_per_minute);
}

void Limiter::release(const Caller& caller) {
  std::lock_guard lock(mutex_);
  Tenant& t = tenants_[caller.tenant];
  KVASIR_CHECK(t.open > 0, "tenant ", caller.tenant, " released more requests than it opened");
  --t.open;
}

}  // namespace kvasir::server
