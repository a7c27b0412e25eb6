// The operator in float64, one key at a time, in the order of docs/attention-ops.md. Slow, and meant
// to be read against it; what the fast back ends are tested against.
#pragma once

#include "attention/backend.h"

namespace kvasir::attention {

const Backend& reference_backend();

}  // namespace kvasir::attention
