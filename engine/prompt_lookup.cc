#include "engine/prompt_lookup.h"

#include <algorithm>
#include <bit>

namespace kvasir::engine {
namespace {

constexpr size_t kAlike = 3;       // tokens that must be the same: one less finds chance
constexpr double kNewest = 0.125;  // weight of the newest token in the average

}  // namespace

DraftWorth draft_worth(double right, int most, double gain, double price) {
  DraftWorth worth;
  for (double likely = right; worth.tokens < most && likely * gain > price; likely *= right) {
    ++worth.tokens;
    worth.saves += likely * gain - price;
  }
  return worth;
}

PromptLookup::PromptLookup(std::span<const int32_t> prediction, std::span<const int32_t> prompt)
    : predicted_(prediction.size()) {
  text_.reserve(prediction.size() + prompt.size() + 256);
  text_.assign(prediction.begin(), prediction.end());
  text_.insert(text_.end(), prompt.begin(), prompt.end());
  index_all();
  if (!prediction.empty()) source_ = 0, right_ = 0.9;
  look();
}

void PromptLookup::add(std::span<const int32_t> tokens) {
  for (int32_t token : tokens) {
    if (source_ >= 0) right_ += kNewest * (double(text_[size_t(source_)] == token) - right_);
    take(token);
  }
  answer_ += tokens.size();
}

void PromptLookup::take(int32_t token) {
  source_ = source_ >= 0 && text_[size_t(source_)] == token ? source_ + 1 : -1;
  text_.push_back(token);
  if (2 * text_.size() > after_.size()) index_all();
  look();
}

// Where nothing is being copied: whether the last three tokens stood somewhere before. Then they are what the next look
// finds.
void PromptLookup::look() {
  if (text_.size() < kAlike) return;
  int32_t& after = after_[slot(text_.size())];
  if (source_ < 0) source_ = after;
  after = int32_t(text_.size());
}

// The last place of each three wins. What is at the very end has nothing behind it yet, and is left to look().
void PromptLookup::index_all() {
  after_.assign(std::bit_ceil(4 * text_.size() + 64), -1);
  for (size_t end = kAlike; end < text_.size(); ++end) after_[slot(end)] = int32_t(end);
}

size_t PromptLookup::slot(size_t end) const {
  uint64_t h = 0;
  for (size_t i = end - kAlike; i < end; ++i) h = (h ^ uint32_t(text_[i])) * 0x9e3779b97f4a7c15;
  size_t at = size_t(h >> 20) & (after_.size() - 1);
  auto alike = [&](int32_t other) {
    return std::equal(text_.begin() + other - kAlike, text_.begin() + other, text_.begin() + int64_t(end - kAlike));
  };
  while (after_[at] >= 0 && !alike(after_[at])) at = (at + 1) & (after_.size() - 1);
  return at;
}

DraftWorth PromptLookup::draft_length(int most, double gain, double price) const {
  return source_ < 0 ? DraftWorth() : draft_worth(right_, most, gain, price);
}

std::vector<int32_t> PromptLookup::draft(int count) const {
  std::vector<int32_t> out;
  if (source_ < 0) return out;
  for (size_t i = size_t(source_); int(out.size()) < count; ++i)  // past the end the draft continues its own copy
    out.push_back(i < text_.size() ? text_[i] : out[i - text_.size()]);
  return out;
}

}  // namespace kvasir::engine
