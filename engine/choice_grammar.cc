#include "engine/choice_grammar.h"

#include <algorithm>

#include "core/cat.h"
#include "engine/grammar_worker.h"

namespace kvasir::engine {
namespace {

// A grammar whose masks, or what it forces, take longer is not asked on the step thread (again).
constexpr std::chrono::milliseconds kQuick{2};

}  // namespace

bool ChoiceGrammar::take(int32_t token, bool masked) {
  const bool too_early =
      taken_ < job_.request.min_tokens && std::binary_search(job_.stop_set.begin(), job_.stop_set.end(), token);
  if (too_early && !masked) return false;
  const Status taken = matcher_->consume(token);
  if (taken.ok()) {
    ++taken_;
    state_ = State::unknown;
    return true;
  }
  if (masked) job_.fail_mask(internal_error(cat("the grammar refuses what it allowed: ", taken.message())));
  return false;
}

std::vector<int32_t> ChoiceGrammar::forced() {
  if (pending() || took_ > kQuick || !tells_quickly_) return {};
  const Time began = std::chrono::steady_clock::now();
  auto tokens = matcher_->forced();
  // Where it reached the matcher's limits, what follows says so if it must.
  tells_quickly_ = tokens.ok() && std::chrono::steady_clock::now() - began <= kQuick;
  if (tokens.ok()) return std::move(*tokens);
  return {};
}

const uint32_t* ChoiceGrammar::mask() {
  if (state_ == State::unknown) ask(false);
  came();
  return state_ == State::there && !job_.mask_failed.load(std::memory_order_acquire) ? mask_.data() : nullptr;
}

void ChoiceGrammar::ask(bool slow) {
  state_ = State::pending;
  worker_.compute(job_.shared_from_this(), *this, slow);
}

bool ChoiceGrammar::came() {
  if (state_ != State::pending || !done_.load(std::memory_order_acquire)) return false;
  done_.store(false, std::memory_order_relaxed);
  state_ = State::there;
  return true;
}

Status ChoiceGrammar::compute() {
  const Time began = std::chrono::steady_clock::now();
  mask_.assign((size_t(worker_.vocab_size()) + 31) / 32, 0);
  KVASIR_TRY(matcher_->mask(mask_));
  if (!job_.allowed_mask.empty()) {
    uint32_t left = 0;
    for (size_t i = 0; i < mask_.size(); ++i) left |= mask_[i] &= job_.allowed_mask[i];
    if (left == 0)
      return invalid_argument(cat("after ", taken_,
                                  " tokens none of allowed_token_ids continues the grammar; allow the ",
                                  "ids that it needs, those that end the answer among them"))
          .with_field("allowed_token_ids");
  }
  if (taken_ < job_.request.min_tokens) forbid_stops(mask_, job_.stop_set);
  took_ = std::chrono::steady_clock::now() - began;
  return {};
}

Status ChoiceGrammar::compute_first() {
  KVASIR_TRY(compute());
  state_ = State::there;
  return {};
}

bool forbid_stops(std::vector<uint32_t>& mask, const std::vector<int32_t>& stops) {
  std::vector<uint32_t> without = mask;
  for (int32_t t : stops) without[size_t(t) / 32] &= ~(1u << (t % 32));
  const bool some = std::any_of(without.begin(), without.end(), [](uint32_t word) { return word != 0; });
  if (some) mask = std::move(without);
  return some;
}

}  // namespace kvasir::engine
