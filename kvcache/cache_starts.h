// The operators' `cachestarts` of a packed step, in any of the three index modes. Page tables are kept from step to
// step: as long as the table in a row has only grown, what is written is what it grew by.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvcache/view.h"

namespace kvasir::kvcache {

class CacheStarts {
 public:
  CacheStarts(IndexMode mode, int32_t page_size) : mode_(mode), page_size_(page_size) {}

  // `most_pages`: of the longest table, and of any table ever. `out` is what the last step left in it.
  void begin(int64_t sequences, int64_t longest, int64_t most_pages, std::vector<int64_t>& out);
  // The next sequence. Two tables of the same version begin alike, as far as both go; 0: nothing is known.
  void add(uint64_t version, std::span<const int32_t> pages, int64_t kvlen, std::vector<int64_t>& out);

  int64_t row_length() const { return row_length_; }  // page_table only

 private:
  struct FilledRow {
    uint64_t version = 0;
    size_t filled = 0;
  };
  const IndexMode mode_;
  const int64_t page_size_;
  int64_t row_length_ = 0;
  size_t next_ = 0;
  std::vector<FilledRow> rows_;
};

}  // namespace kvasir::kvcache
