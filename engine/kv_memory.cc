#include "engine/kv_memory.h"

#include "core/cat.h"

namespace kvasir::engine {
namespace {

// A tiny model's token is a few bytes; a table of more pages than this helps nobody.
constexpr int64_t kMostPages = int64_t(1) << 20;

}  // namespace

Result<int64_t> kv_pages(int64_t kv_memory, int32_t page_size, int64_t bytes_per_token) {
  int64_t page = bytes_per_token * page_size;
  int64_t pages = page > 0 ? std::min(kv_memory / page, kMostPages) : kMostPages;
  if (pages < 2)
    return failed_precondition(cat("kv-memory is ", kv_memory, " bytes; a page of ", page_size,
                                   " tokens of this model takes ", page,
                                   " and two are the least: give --kv-memory at least ", 2 * page));
  return pages;
}

}  // namespace kvasir::engine
