// What drafters have in common: a runner that draws greedily, a cache of its own in pages, which sequences take from
// one another, and what its steps take.
#pragma once

#include <memory>
#include <vector>

#include "engine/drafter.h"
#include "kvcache/cache_starts.h"
#include "scheduler/learned_cost.h"

namespace kvasir::engine {

class CachedDrafter : public Drafter {
 public:
  struct Limits {
    int64_t pages = 0;
    int32_t page_size = 16;
    int64_t max_tokens = 512;    // of a step
    int64_t max_sequences = 64;  // likewise
    int32_t vocab = 0;           // of the model that it drafts for: what lies beyond is never drafted
  };

  double token_us(int64_t context, double sequences) const override;
  double prefill_us(int64_t begin, int64_t count) const override;
  const model::ModelInfo& info() const override { return runner_->info(); }
  int64_t pages() const override { return limits_.pages; }
  int64_t free_pages() const override { return int64_t(free_.size()); }
  double seconds() const override { return seconds_; }

 protected:
  static constexpr scheduler::SeqId kMeasured = ~scheduler::SeqId(0);  // no sequence's

  CachedDrafter(std::unique_ptr<model::Runner> runner, const Limits& limits);
  // With its cache, and after a few steps that say what one takes: whether it pays is known only then.
  template <class D>
  static Result<std::unique_ptr<D>> make(std::unique_ptr<model::Runner> runner, const Limits& limits);
  // A draft behind `tokens`, which nobody has seen before.
  virtual Status try_out(std::span<const int32_t> tokens) = 0;

  struct HeldPages {  // of a sequence
    std::vector<int32_t> pages;
    uint64_t used = 0;  // the call that last asked for it
    bool off = false;   // its logits were no numbers, or a token of its is none of this model's
  };
  int64_t most_rows() const;  // of a sequence
  // Pages for so many rows, others' where none are free.
  bool reserve(HeldPages& to, int64_t rows);
  // The pages of whoever was not asked for longest, and not in this call.
  virtual bool take_from_another() = 0;
  void give_back_pages(HeldPages& of);

  // A step: begun; rows whose tokens are in `batch_.tokens`, decodes before prompts; run. What is drawn behind the rows
  // of a Want is added to its draft, or ends it.
  void begin_step(size_t sequences, size_t longest);
  void add_rows(HeldPages& of, int64_t begin, int64_t count, Want* draws);
  Status run_step();

  const std::unique_ptr<model::Runner> runner_;
  const Limits limits_;
  scheduler::LearnedCost learned_;
  std::vector<int32_t> free_;
  uint64_t call_ = 0;
  model::Batch batch_;

 private:
  Status measure();

  double seconds_ = 0;
  // Of one step.
  kvcache::CacheStarts starts_;
  model::SamplingParams greedy_;
  std::vector<model::SampleRow> samples_;
  std::vector<std::pair<Want*, HeldPages*>> drawing_;  // of samples_
  scheduler::StepTime work_;
};

template <class D>
Result<std::unique_ptr<D>> CachedDrafter::make(std::unique_ptr<model::Runner> runner, const Limits& limits) {
  KVASIR_TRY(runner->allocate_cache(limits.pages));
  std::unique_ptr<D> made(new D(std::move(runner), limits));
  KVASIR_TRY(made->measure());
  return made;
}

}  // namespace kvasir::engine
