// A second, smaller model of the same vocabulary that runs ahead of the first: greedy continuations, which a step of
// the first one then verifies (speculative decoding with a draft model). It has a cache of its own, in pages, which
// holds of a sequence what the model was last given, up to the first token that turned out otherwise. What is missing
// (prompts, tokens of a prefix that the first model had cached, tokens drafted by others, all of it after its pages
// were taken) is prefilled before the next draft. Of the step thread alone.
#pragma once

#include <string>
#include <unordered_map>

#include "engine/cached_drafter.h"
#include "model/text/text.h"

namespace kvasir::engine {

class DraftModel final : public CachedDrafter {
 public:
  static Result<std::unique_ptr<DraftModel>> create(std::unique_ptr<model::Runner> runner, const Limits& limits) {
    return make<DraftModel>(std::move(runner), limits);
  }

  Status draft(std::span<Want> wants, double seconds) override;
  void forget(scheduler::SeqId seq) override;
  bool takes(scheduler::SeqId seq, std::span<const int32_t> tokens) const override;
  int64_t lacks(scheduler::SeqId seq, std::span<const int32_t> tokens) const override;

 private:
  friend CachedDrafter;
  using CachedDrafter::CachedDrafter;

  struct Held : HeldPages {
    std::vector<int32_t> tokens;  // in its cache; the last ones may have been drafts
    size_t known = 0;             // of them, what is the sequence's own for certain
  };
  struct DraftRow {
    Want* want;
    Held* held;
    int64_t count;  // tokens to prefill
    bool samples;
  };
  Status try_out(std::span<const int32_t> tokens) override;
  Held* prepare(Want& want);
  bool take_from_another() override;
  void gather(std::span<Want> wants, bool first, double seconds);
  void add(const DraftRow& row);
  Status step();

  std::unordered_map<scheduler::SeqId, Held> held_;
  std::vector<DraftRow> rows_;  // of one step
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
