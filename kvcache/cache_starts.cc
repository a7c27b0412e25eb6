#include "kvcache/cache_starts.h"

#include <algorithm>

namespace kvasir::kvcache {
namespace {

// Rows are this much longer than the longest table at least, so that they seldom have to be moved.
constexpr int64_t kRowStep = 16;

}  // namespace

void CacheStarts::begin(int64_t sequences, int64_t longest, int64_t most_pages, std::vector<int64_t>& out) {
  next_ = 0;
  if (mode_ != IndexMode::page_table) return out.clear();
  const int64_t length = std::min(std::max(longest, most_pages), (longest + kRowStep - 1) / kRowStep * kRowStep);
  if (length > row_length_ || 4 * length < row_length_) {
    row_length_ = length;
    rows_.clear();
  }
  rows_.resize(static_cast<size_t>(sequences));
  out.resize(static_cast<size_t>(sequences * row_length_));
}

void CacheStarts::add(uint64_t version, std::span<const int32_t> pages, int64_t kvlen, std::vector<int64_t>& out) {
  switch (mode_) {
    case IndexMode::offset: out.push_back(pages.empty() ? 0 : pages[0] * page_size_); return;
    case IndexMode::token_table:
      for (int64_t t = 0; t < kvlen; ++t)
        out.push_back(pages[static_cast<size_t>(t / page_size_)] * page_size_ + t % page_size_);
      return;
    case IndexMode::page_table: break;
  }
  FilledRow& row = rows_[next_];
  if (version == 0 || row.version != version || row.filled > pages.size()) row = {version, 0};
  int64_t* starts = out.data() + next_ * static_cast<size_t>(row_length_);
  for (; row.filled < pages.size(); ++row.filled) starts[row.filled] = pages[row.filled] * page_size_;
  ++next_;
}

}  // namespace kvasir::kvcache
