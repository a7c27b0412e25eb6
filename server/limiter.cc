#include "server/limiter.h"

#include <algorithm>
#include <cmath>

#include "core/cat.h"
#include "core/check.h"

namespace kvasir::server {
namespace {

std::chrono::milliseconds until(double missing, int64_t per_minute) {
  return std::chrono::milliseconds(int64_t(std::ceil(missing * 60000.0 / double(per_minute))));
}

}  // namespace

Limiter::Tenant& Limiter::refill(const Caller& caller) {
  Tenant& t = tenants_[caller.tenant];
  Time now = clock_.now();
  double minutes = std::chrono::duration<double, std::ratio<60>>(now - t.filled).count();
  auto fill = [&](double& bucket, int64_t limit) {
    bucket = t.fresh ? double(limit) : std::min(double(limit), bucket + minutes * double(limit));
  };
  fill(t.requests, caller.limits.requests_per_minute);
  fill(t.tokens, caller.limits.tokens_per_minute);
  t.filled = now;
  t.fresh = false;
  return t;
}

Status Limiter::admit(const Caller& caller, int64_t prompt_tokens) {
  const TenantLimits& limits = caller.limits;
  std::lock_guard lock(mutex_);
  Tenant& t = refill(caller);
  if (limits.concurrent > 0 && t.open >= limits.concurrent)
    return resource_exhausted(cat("tenant ", caller.tenant, " has ", t.open, " requests open; its limit is ",
                                  limits.concurrent, "; wait for one to end"))
        .with_retry_after(std::chrono::seconds(1));
  if (limits.requests_per_minute > 0 && t.requests < 1)
    return resource_exhausted(
               cat("tenant ", caller.tenant, " is over its ", limits.requests_per_minute, " requests a minute"))
        .with_retry_after(until(1 - t.requests, limits.requests_per_minute));
  if (limits.tokens_per_minute > 0) {
    if (prompt_tokens > limits.tokens_per_minute)
      return invalid_argument(cat("the prompt has ", prompt_tokens, " tokens; tenant ", caller.tenant, " may use ",
                                  limits.tokens_per_minute, " a minute, so it can never run"));
    if (t.tokens < double(prompt_tokens))
      return resource_exhausted(
                 cat("tenant ", caller.tenant, " is over its ", limits.tokens_per_minute, " tokens a minute"))
          .with_retry_after(until(double(prompt_tokens) - t.tokens, limits.tokens_per_minute));
  }
  t.requests -= 1;
  t.tokens -= double(prompt_tokens);
  ++t.open;
  return {};
}

void Limiter::spend(const Caller& caller, int64_t output_tokens) {
  if (caller.limits.tokens_per_minute <= 0) return;
  std::lock_guard lock(mutex_);
  tenants_[caller.tenant].tokens -= double(output_tokens);
}

void Limiter::release(const Caller& caller) {
  std::lock_guard lock(mutex_);
  Tenant& t = tenants_[caller.tenant];
  KVASIR_CHECK(t.open > 0, "tenant ", caller.tenant, " released more requests than it opened");
  --t.open;
}

}  // namespace kvasir::server
