// How much memory the cache takes when nobody said: a quarter of what is free, and at most 4 GiB.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/status.h"

namespace kvasir::engine {

inline int64_t default_kv_memory(int64_t free_bytes) { return std::min<int64_t>(free_bytes / 4, int64_t(4) << 30); }

// Pages of `page_size` tokens in `kv_memory` bytes; an error when not even one sequence of a page fits.
Result<int64_t> kv_pages(int64_t kv_memory, int32_t page_size, int64_t bytes_per_token);

}  // namespace kvasir::engine
