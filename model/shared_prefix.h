// Sequences of a step that read the same pages from their beginning on: an attention that is told so reads them once.
#pragma once

#include <cstdint>
#include <vector>

#include "model/batch.h"

namespace kvasir::model {

class SharedPrefixes {
 public:
  // Shorter prefixes cost more to merge than they save.
  static constexpr int64_t kLeastTokens = 256;

  // Of a batch whose cachestarts are page tables.
  void find(const Batch& batch, int64_t page_size);

  // As attention::Step has them: a group by sequence, -1 for none, and the tokens that each group shares.
  bool any() const { return !lengths_.empty(); }
  const std::vector<int32_t>& groups() const { return groups_; }
  const std::vector<int64_t>& lengths() const { return lengths_; }

 private:
  struct Chosen {
    size_t begin, end;  // of order_
    int64_t pages;
  };
  int64_t choose(size_t begin, size_t end);

  std::vector<int32_t> order_;  // sequences by their tables
  std::vector<int64_t> alike_;  // pages that order_[i] and order_[i + 1] have in common
  std::vector<Chosen> chosen_;
  std::vector<int32_t> groups_;
  std::vector<int64_t> lengths_;
};

}  // namespace kvasir::model
