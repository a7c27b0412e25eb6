#include "server/caller.h"

#include <algorithm>

#include "core/cat.h"

namespace kvasir::server {

const char* role_name(Role role) {
  switch (role) {
    case Role::user: return "user";
    case Role::metrics: return "metrics";
    case Role::admin: return "admin";
  }
  return "?";
}

bool Caller::may_use(const std::string& model) const {
  return adapters.empty() || std::find(adapters.begin(), adapters.end(), model) != adapters.end();
}

Status Caller::require(Role role, const char* what) const {
  if (may(role)) return {};
  return {Code::permission_denied, cat(what, " needs the role ", role_name(role), ", which the key ", key_id,
                                       " does not have; use a key made with --role ", role_name(role))};
}

Caller everyone() {
  Caller caller;
  caller.user = caller.metrics = caller.admin = true;
  caller.priority_ceiling = INT32_MAX;
  return caller;
}

}  // namespace kvasir::server
