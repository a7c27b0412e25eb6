// Longest prefix match: what is cached already goes first, while it is still cached. A fully cached prompt
// is worth `patience` of waiting, one that is not cached nothing; so nobody waits for anyone who came
// more than `patience` later. In between what is missing counts more than what is there: where all begin
// with one long system prompt, that part sets nobody apart.
//
// The cache changes while requests wait. Each step looks again at a bounded number of them, in turn, and
// at the one at the front.
#include <algorithm>

#include "scheduler/policy.h"

namespace kvasir::scheduler {
namespace {

class LongestPrefix final : public KeyedPolicy {
 public:
  explicit LongestPrefix(const Settings& o) : patience_(in_seconds(o.patience)) {}

  void push(Sequence* s) override {
    if (kv_ != nullptr) look(s);
    KeyedPolicy::push(s);
  }
  void refresh(kvcache::KvSpace& kv) override {
    kv_ = &kv;
    int64_t tokens = kTokensAStep;
    for (size_t n = std::min<size_t>(queue_.size(), kLooksAStep); n > 0 && tokens > 0; --n) {
      if (turn_ >= queue_.size()) turn_ = 0;
      tokens -= look_again(queue_.at(turn_++));
    }
    for (int n = 0; n < kLooksAtFront && queue_.best() != nullptr; ++n) {
      Sequence* front = queue_.best();
      look_again(front);
      if (queue_.best() == front) break;
    }
  }

 private:
  static constexpr int kLooksAStep = 8, kLooksAtFront = 2;
  static constexpr int64_t kTokensAStep = 2048;
  static constexpr double kMissingCounts = 8;

  // What looking cost, in tokens: a page that does not match ends it.
  int64_t look(Sequence* s) const {
    s->matched =
        static_cast<int32_t>(kv_->match(s->request->cache_key, s->tokens, int64_t(s->tokens.size()) - 1).tokens);
    return s->matched + 64;
  }
  int64_t look_again(Sequence* s) {
    const int32_t before = s->matched;
    const int64_t cost = look(s);
    if (s->matched != before) {
      s->key = key(*s);
      queue_.update(s);
    }
    return cost;
  }
  double key(const Sequence& s) const override {
    const double cached = s.matched, missing = static_cast<double>(s.tokens.size()) - cached;
    const double part = cached / (cached + kMissingCounts * missing);
    return in_seconds(s.request->arrival) - part * patience_;
  }

  double patience_;
  size_t turn_ = 0;
  kvcache::KvSpace* kv_ = nullptr;
};

}  // namespace

std::unique_ptr<Policy> make_lpm(const Settings& o) { return std::make_unique<LongestPrefix>(o); }

}  // namespace kvasir::scheduler
