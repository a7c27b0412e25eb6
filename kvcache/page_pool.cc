#include "kvcache/page_pool.h"

namespace kvasir::kvcache {

PagePool::PagePool(int64_t pages, bool contiguous)
    : refs_(pages, 0), kept_(pages, 0), free_count_(pages), contiguous_(contiguous) {
  if (contiguous) return;
  free_.reserve(pages);
  for (int64_t p = pages; p-- > 0;) free_.push_back(static_cast<int32_t>(p));  // page 0 goes out first
}

int32_t PagePool::take() {
  if (contiguous_) return take_run(1);
  if (free_.empty()) return -1;
  int32_t page = free_.back();
  free_.pop_back();
  --free_count_;
  refs_[page] = 1;
  return page;
}

// First fit. Runs live as long as a request, so the scan is rare.
int32_t PagePool::take_run(int64_t n) {
  KVASIR_CHECK(contiguous_, "runs come from contiguous pools only");
  if (n <= 0 || n > free_count_) return -1;
  int64_t run = 0;
  for (int64_t p = 0; p < size(); ++p) {
    run = refs_[p] == 0 && !kept_[p] ? run + 1 : 0;
    if (run < n) continue;
    int64_t first = p + 1 - n;
    for (int64_t q = first; q <= p; ++q) refs_[q] = 1;
    free_count_ -= n;
    return static_cast<int32_t>(first);
  }
  return -1;
}

void PagePool::keep(int32_t page) {
  KVASIR_CHECK(refs_[page] > 0 && !kept_[page], "page ", page, " cannot be kept");
  kept_[page] = 1;
}

void PagePool::forget(int32_t page) {
  KVASIR_CHECK(kept_[page], "page ", page, " is not kept");
  kept_[page] = 0;
  if (refs_[page] > 0) return;
  --idle_count_;
  put_back(page);
}

void PagePool::put_back(int32_t page) {
  ++free_count_;
  if (!contiguous_) free_.push_back(page);
}

void PagePool::check_integrity() const {
  int64_t free = 0, idle = 0;
  for (int64_t p = 0; p < size(); ++p) {
    KVASIR_CHECK(refs_[p] >= 0, "page ", p, " has ", refs_[p], " references");
    if (refs_[p] == 0) ++(kept_[p] ? idle : free);
  }
  KVASIR_CHECK(free == free_count_, "free pages: counted ", free, ", kept count ", free_count_);
  KVASIR_CHECK(idle == idle_count_, "idle pages: counted ", idle, ", kept count ", idle_count_);
  if (contiguous_) return;
  KVASIR_CHECK(static_cast<int64_t>(free_.size()) == free, "free list holds ", free_.size(), " of ", free);
  for (int32_t p : free_) KVASIR_CHECK(refs_[p] == 0 && !kept_[p], "page ", p, " is on the free list and in use");
}

}  // namespace kvasir::kvcache
