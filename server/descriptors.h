// How many connections the limit on open files has room for. Over it connections are not refused: they are not
// accepted, and nobody learns why.
#pragma once

#include "core/status.h"

namespace kvasir::server {

// Raises this process's soft limit as far as `ports` times `wanted` connections need and the hard limit allows; says in
// the log what came of it. The connections that each port may have: `wanted`, or fewer.
Result<int> fit_connections(int wanted, int ports);

}  // namespace kvasir::server
