// SIMD on the host: online softmax over fixed tiles of keys, no score matrix, work split over
// sequences, kv heads, blocks of queries and ranges of keys.
//
// The same bytes whatever the batch, the chunking and the thread count: every (token, head) row is
// computed by one sequence of operations that depends on its own keys only (tile.h says which).
#pragma once

#include "attention/backend.h"

namespace kvasir::attention {

const Backend& cpu_backend();

}  // namespace kvasir::attention
