// The pages of one layer group: who refers to each, which are kept for later though nobody does,
// which are free. A page is free exactly when nobody refers to it and nothing keeps it.
#pragma once

#include <cstdint>
#include <vector>

#include "core/check.h"

namespace kvasir::kvcache {

class PagePool {
 public:
  // Contiguous pools hand out runs (offset mode) instead of single pages.
  explicit PagePool(int64_t pages, bool contiguous = false);

  int64_t size() const { return static_cast<int64_t>(refs_.size()); }
  int64_t free_pages() const { return free_count_; }
  int64_t idle_pages() const { return idle_count_; }  // kept, referred to by nobody
  int32_t refs(int32_t page) const { return refs_[page]; }
  bool kept(int32_t page) const { return kept_[page]; }

  int32_t take();               // -1: none free
  int32_t take_run(int64_t n);  // its first page, or -1; contiguous pools only

  void ref(int32_t page) {
    KVASIR_CHECK(refs_[page] > 0 || kept_[page], "page ", page, " is free");
    if (refs_[page]++ == 0) --idle_count_;
  }
  // True when nobody refers to it any more: it is then idle if kept, else free.
  bool unref(int32_t page) {
    KVASIR_CHECK(refs_[page] > 0, "page ", page, " has no references");
    if (--refs_[page] > 0) return false;
    if (kept_[page]) {
      ++idle_count_;
    } else {
      put_back(page);
    }
    return true;
  }
  void keep(int32_t page);    // a page someone refers to
  void forget(int32_t page);  // no longer kept; free if nobody refers to it

  void check_integrity() const;

 private:
  void put_back(int32_t page);

  std::vector<int32_t> refs_;
  std::vector<uint8_t> kept_;
  std::vector<int32_t> free_;  // a stack; unused when contiguous
  int64_t free_count_ = 0, idle_count_ = 0;
  bool contiguous_;
};

}  // namespace kvasir::kvcache
