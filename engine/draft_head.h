// A head that drafts out of the model's own hidden states (model/head.h: EAGLE-3, multi-token prediction). Each row
// that a step computes of a sequence is shown to it (see()); it becomes a row of the head's own cache, in pages, once
// the token behind it is known and a draft is wanted. So its rows lie where the model has computed: what a sequence has
// by a prefix hit or as a fork is copied from another one that begins alike, running or ended, and where there is none,
// or where drafts did not pay for a while, it does without. Preemptions do not touch it. The drafts' own rows are
// forgotten: the model's take their place.
#pragma once

#include <memory>
#include <unordered_map>

#include "engine/drafter.h"
#include "kvcache/cache_starts.h"
#include "scheduler/learned_cost.h"

namespace kvasir::engine {

class DraftHead final : public Drafter {
 public:
  struct Limits {
    int64_t pages = 0;
    int32_t page_size = 16;
    int64_t max_tokens = 512;    // of a step
    int64_t max_sequences = 64;  // likewise
  };
  // With its cache, and after a few steps that say what one takes.
  static Result<std::unique_ptr<DraftHead>> create(std::unique_ptr<model::Runner> runner, const Limits& limits);

  Status draft(std::span<Want> wants, double seconds) override;
  void forget(scheduler::SeqId seq) override;
  void forget_ended() override;
  bool reads_states() const override { return true; }
  void see(const Seen& rows) override;
  Status catch_up(bool pays) override;
  bool takes(scheduler::SeqId seq, std::span<const int32_t> tokens) const override;
  int64_t lacks(scheduler::SeqId, std::span<const int32_t>) const override { return 0; }
  double token_us(int64_t context, double sequences) const override;
  double prefill_us(int64_t begin, int64_t count) const override;
  const model::ModelInfo& info() const override { return runner_->info(); }
  int64_t pages() const override { return limits_.pages; }
  int64_t free_pages() const override;  // those of ended sequences are anybody's
  double seconds() const override { return seconds_; }

 private:
  DraftHead(std::unique_ptr<model::Runner> runner, const Limits& limits);

  struct Held {
    std::vector<int32_t> tokens;  // of the sequence
    std::vector<int32_t> at;      // the position that each row of the cache stands for, ascending
    std::vector<int32_t> pages;
    int64_t next = 0;            // the position of the row that is to be seen next
    std::vector<float> waiting;  // the rows before it that are not in the cache yet
    uint64_t used = 0;           // the call that last asked for it
    bool off = false;            // its logits were no numbers
    bool ended = false;
    bool begun = false;  // others that begin alike were looked for
  };
  struct Row {  // of a step
    Held* held;
    Want* want;            // null: nothing is drawn
    int64_t first, count;  // tokens: of held->tokens, or the draft's last one (first < 0)
    const float* given;
    int64_t given_cols;
  };
  int64_t waiting(const Held& held) const { return int64_t(held.waiting.size()) / info().given; }
  int64_t most_rows() const;
  bool prepare(Held& held, int64_t rows);
  bool reserve(Held& held, int64_t rows);
  bool take_from_another(const Held* keep);
  void begin_like_another(Held& held);
  Status copy_rows(const Held& from, int64_t rows, Held& to);
  Status take_up(std::vector<Row> rows);
  Status follow(std::span<Want> wants);
  Status step(std::vector<Row>& rows);
  void add(const Row& row);
  void clear(size_t sequences, size_t longest);
  Status measure();

  const std::unique_ptr<model::Runner> runner_;
  const Limits limits_;
  scheduler::LearnedCost learned_;
  std::unordered_map<scheduler::SeqId, Held> held_;
  std::vector<int32_t> free_;
  uint64_t call_ = 0;
  double seconds_ = 0;
  Status failed_;  // of a copy

  // Of one step.
  model::Batch batch_;
  kvcache::CacheStarts starts_;
  model::SamplingParams greedy_;
  std::vector<model::SampleRow> samples_;
  std::vector<float> given_, kept_;
  std::unordered_map<const Want*, std::vector<float>> state_;  // of its last row
  scheduler::StepTime work_;
};

}  // namespace kvasir::engine
