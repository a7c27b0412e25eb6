#include "model/shared_prefix.h"

#include <algorithm>

namespace kvasir::model {
namespace {

// Only what was there before the step: its new tokens are written while others read.
int64_t pages_before(const Batch& batch, int64_t page_size, int32_t b) {
  return batch.start_pos[size_t(b)] / page_size;
}

const int64_t* table(const Batch& batch, int32_t b) { return batch.cachestarts.data() + b * batch.max_pages; }

}  // namespace

void SharedPrefixes::find(const Batch& batch, int64_t page_size) {
  const auto n = int32_t(batch.size());
  const int64_t least = (kLeastTokens + page_size - 1) / page_size;
  order_.clear(), alike_.clear(), chosen_.clear(), lengths_.clear();
  groups_.assign(size_t(n), -1);
  for (int32_t b = 0; b < n; ++b)
    if (pages_before(batch, page_size, b) >= least) order_.push_back(b);
  if (order_.size() < 2) return;

  auto common = [&](int32_t a, int32_t b) {
    const int64_t most = std::min(pages_before(batch, page_size, a), pages_before(batch, page_size, b));
    const int64_t* from = table(batch, a);
    return std::mismatch(from, from + most, table(batch, b)).first - from;
  };
  // In the order of their tables those that share anything are neighbors. Most batches share nothing, and their order
  // is known by the first page.
  std::sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
    const int64_t *x = table(batch, a), *y = table(batch, b);
    if (*x != *y) return *x < *y;
    const int64_t nx = pages_before(batch, page_size, a), ny = pages_before(batch, page_size, b);
    return std::lexicographical_compare(x, x + nx, y, y + ny);
  });
  bool any = false;
  for (size_t i = 0; i + 1 < order_.size(); ++i) {
    const int64_t pages = common(order_[i], order_[i + 1]);
    alike_.push_back(pages >= least ? pages : 0);
    any |= pages >= least;
  }
  if (!any) return;
  choose(0, order_.size());
  for (const Chosen& c : chosen_) {
    for (size_t i = c.begin; i < c.end; ++i) groups_[size_t(order_[i])] = int32_t(lengths_.size());
    lengths_.push_back(c.pages * page_size);
  }
}

// A run of neighbors is one group of what all of them share, or its parts are groups of more: whichever saves more
// pages. Returns those.
int64_t SharedPrefixes::choose(size_t begin, size_t end) {
  if (end - begin < 2) return 0;
  const int64_t pages = *std::min_element(alike_.begin() + begin, alike_.begin() + end - 1);
  const int64_t whole = pages * int64_t(end - begin - 1);
  const size_t before = chosen_.size();
  int64_t parts = 0;
  for (size_t i = begin, from = begin; i < end; ++i)
    if (i + 1 == end || alike_[i] == pages) {
      parts += choose(from, i + 1);
      from = i + 1;
    }
  if (whole < parts || whole == 0) return parts;
  chosen_.resize(before);
  chosen_.push_back({begin, end, pages});
  return whole;
}

}  // namespace kvasir::model
