#include "client/verify.h"

#include <cmath>
#include <condition_variable>
#include <mutex>

#include "core/cat.h"

namespace kvasir::client {
namespace {

constexpr double kNearTie = 1e-3;
constexpr size_t kMostExamples = 5;

class Alone final : public Sink {
 public:
  void on_tokens(const AnswerPiece& piece) override {
    pieces_.push_back({text.size(), piece.top_gap, piece.logprob});
    text += piece.text;
  }
  void on_done(const Status& s, const Usage&) override {
    std::lock_guard lock(mutex_);
    status = s;
    done_ = true;
    changed_.notify_one();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_; });
  }
  // Whether rounding alone may have chosen what stands at this place of the text.
  bool near_tie(size_t at, const Record& under_load) const {
    const Begin* here = nullptr;
    for (const Begin& piece : pieces_) {
      if (piece.at <= at) here = &piece;
    }
    if (!here) return false;
    if (here->top_gap >= 0) return here->top_gap < kNearTie;
    double other = NAN;
    for (const auto& [begin, logprob] : under_load.odds) {
      if (begin <= at) other = logprob;
    }
    return std::abs(here->logprob - other) < kNearTie;  // false where either is not known
  }

  std::string text;
  Status status;

 private:
  struct Begin {
    size_t at;
    double top_gap, logprob;
  };
  std::vector<Begin> pieces_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
};

void compare(const Record& r, const Alone& alone, Verification& v) {
  ++v.compared;
  std::string what;
  if (!alone.status.ok()) {
    ++v.failed;
    what = alone.status.to_string();
  } else if (alone.text == r.text) {
    ++v.equal;
    return;
  } else {
    size_t at = 0;
    while (at < alone.text.size() && at < r.text.size() && alone.text[at] == r.text[at]) ++at;
    const bool tie = alone.near_tie(at, r);
    ++(tie ? v.near_ties : v.different);
    what = cat(tie ? "parts at a near-tie" : "differs", " from character ", at, ": under load \"",
               r.text.substr(at, 40), "\", alone \"", alone.text.substr(at, 40), "\"");
  }
  if (v.examples.size() < kMostExamples) v.examples.push_back(cat("request ", r.prompt, ": ", what));
}

}  // namespace

Verification verify(Target& target, const Workload& workload, const LoadOptions& options, const LoadRun& run,
                    int sample, const std::atomic<bool>& stop) {
  std::vector<int> good;
  for (size_t i = 0; i < run.records.size(); ++i) {
    if (run.records[i].status.ok()) good.push_back(static_cast<int>(i));
  }
  Verification v;
  const int n = std::min<int>(sample, static_cast<int>(good.size()));
  for (int k = 0; k < n && !stop; ++k) {
    const Record& r = run.records[good[static_cast<size_t>(k) * good.size() / n]];
    Ask ask = ask_of(workload, r, options);
    ask.top_two = true;
    auto alone = std::make_shared<Alone>();
    target.start(ask, alone);
    alone->wait();
    compare(r, *alone, v);
  }
  return v;
}

}  // namespace kvasir::client
