// Who is asking, and what they may do. It comes from the key, never from what a request says of itself.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/status.h"

namespace kvasir::server {

// An admin may do what the others may.
enum class Role : uint8_t { user, metrics, admin };
const char* role_name(Role role);  // "user"

struct TenantLimits {
  int64_t requests_per_minute = 0;  // each 0: no limit
  int64_t tokens_per_minute = 0;    // prompt and output
  int64_t concurrent = 0;
};

struct Caller {
  std::string tenant;  // empty: the one tenant of a server without keys
  std::string key_id;  // which key, for the log; never the key
  bool user = false, metrics = false, admin = false;
  int32_t priority_ceiling = 0;
  double weight = 1;
  TenantLimits limits;
  std::vector<std::string> adapters;  // the only names of models it may use; empty: all

  bool may(Role role) const { return admin || (role == Role::user && user) || (role == Role::metrics && metrics); }
  bool may_use(const std::string& model) const;
  // PERMISSION_DENIED that says which role is missing for `what` ("FlushCache").
  Status require(Role role, const char* what) const;
};

Caller everyone();  // every role, no limits: loopback without keys

}  // namespace kvasir::server
