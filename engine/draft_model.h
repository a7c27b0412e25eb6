// A second, smaller model of the same vocabulary that runs ahead of the first: greedy continuations, which a step of
// the first one then verifies (speculative decoding with a draft model). It has a cache of its own, in pages: what a
// sequence has there is what it was last given, less what turned out otherwise. Whatever it lacks (prompts, tokens of a
// prefix that the first model had cached, what was drafted by others, all of it after its pages went to somebody else)
// it prefills when it is next asked. The step thread's.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "engine/drafter.h"
#include "kvcache/cache_starts.h"
#include "scheduler/learned_cost.h"

namespace kvasir::engine {

class DraftModel final : public Drafter {
 public:
  struct Limits {
    int64_t pages = 0;
    int32_t page_size = 16;
    int64_t max_tokens = 512;  // of a step
    int32_t vocab = 0;         // of the first model: what lies beyond is never drafted
  };
  // With its cache, and after a few steps that say what one takes.
  static Result<std::unique_ptr<DraftModel>> create(std::unique_ptr<model::Runner> runner, const Limits& limits);

  Status draft(std::span<Want> wants, double seconds) override;
  void forget(scheduler::SeqId seq) override;
  bool takes(scheduler::SeqId seq, std::span<const int32_t> tokens) const override;
  int64_t lacks(scheduler::SeqId seq, std::span<const int32_t> tokens) const override;
  double token_us(int64_t context, double sequences) const override;
  double prefill_us(int64_t begin, int64_t count) const override;

  const model::ModelInfo& info() const override { return runner_->info(); }
  int64_t pages() const override { return limits_.pages; }
  int64_t free_pages() const override { return int64_t(free_.size()); }
  double seconds() const override { return seconds_; }

 private:
  DraftModel(std::unique_ptr<model::Runner> runner, const Limits& limits);

  struct Held {
    std::vector<int32_t> tokens;  // in its cache; the last ones may have been drafts
    size_t known = 0;             // of them, what is the sequence's own for certain
    std::vector<int32_t> pages;
    uint64_t used = 0;  // the call that last asked for it
    bool off = false;   // its logits were no numbers, or a token of its is none of this model's
  };
  struct DraftRow {
    Want* want;
    Held* held;
    int64_t count;  // tokens to prefill
    bool samples;
  };
  Held* prepare(Want& want);
  bool reserve(Held& held, int64_t tokens);
  bool take_from_another();
  void gather(std::span<Want> wants, bool first, double seconds);
  void add(const DraftRow& row);
  void pack();
  Status step();
  Status measure();

  const std::unique_ptr<model::Runner> runner_;
  const Limits limits_;
  scheduler::LearnedCost learned_;
  std::unordered_map<scheduler::SeqId, Held> held_;
  std::vector<int32_t> free_;
  uint64_t call_ = 0;
  double seconds_ = 0;

  // Of one step.
  std::vector<DraftRow> rows_;
  model::Batch batch_;
  kvcache::CacheStarts starts_;
  model::SamplingParams greedy_;
  std::vector<model::SampleRow> samples_;
  scheduler::StepTime work_;
};

// Whether two models' tokens are the same: of a draft model and the one it drafts for. Where one is a dummy the sizes
// alone count.
struct Vocabulary {
  std::string model;
  int32_t size = 0;  // of the logits
  const text::Tokenizer* tokenizer = nullptr;
};
Status same_vocabulary(const Vocabulary& model, const Vocabulary& draft);

}  // namespace kvasir::engine
