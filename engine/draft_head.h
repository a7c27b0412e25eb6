// A head that drafts out of the model's own hidden states (model/head.h: EAGLE-3, multi-token prediction). see() shows
// it each row that a step computes of a sequence. The row enters the head's own cache, which is in pages, once the
// token behind it is known and a draft is wanted. Rows that the model did not compute (a prefix hit, a fork) are copied
// from another sequence with the same beginning, running or ended; where there is none, or where drafts did not pay for
// a while, the head works without them. Preemptions do not touch it. Rows of drafts are dropped: the model's own rows
// take their place. Hidden states stay on the device: here they are slots of its memory.
#pragma once

#include <algorithm>
#include <unordered_map>

#include "engine/cached_drafter.h"

namespace kvasir::engine {

class DraftHead final : public CachedDrafter {
 public:
  // Places for the states of the model's steps that are in flight, and of what waits to be taken up.
  static constexpr int64_t places(int64_t max_tokens, int64_t max_sequences, int depth) {
    return depth * max_tokens + 2 * kWaiting * max_sequences;
  }
  // Of its steps, in as many of which a prompt is taken up as it takes.
  static int64_t step_tokens(int64_t max_tokens, int64_t max_sequences) {
    return std::min(max_tokens, std::max<int64_t>(1024, max_sequences));
  }
  static Result<std::unique_ptr<DraftHead>> create(std::unique_ptr<model::Runner> runner, const Limits& limits);

  Status draft(std::span<Want> wants, double seconds) override;
  void forget(scheduler::SeqId seq) override;
  void forget_ended() override;
  void lend_places(int64_t rows, std::vector<int32_t>& out) override;
  void give_back_places(std::span<const int32_t> places) override;
  void see(const Seen& rows) override;
  Status catch_up(bool pays) override;
  bool takes(scheduler::SeqId seq, std::span<const int32_t> tokens) const override;
  int64_t lacks(scheduler::SeqId, std::span<const int32_t>) const override { return 0; }
  int64_t free_pages() const override;  // those of ended sequences are anybody's

 private:
  friend CachedDrafter;
  DraftHead(std::unique_ptr<model::Runner> runner, const Limits& limits);

  // Rows that wait for a draft to be wanted; with twice as many they are taken up, or let go where drafts do not pay.
  static constexpr int64_t kWaiting = 16;
  struct Held : HeldPages {
    std::vector<int32_t> tokens;   // of the sequence
    std::vector<int32_t> at;       // the position that each row of the cache stands for, ascending
    int64_t next = 0;              // the position of the row that is to be seen next
    std::vector<int32_t> waiting;  // places of the rows before it that are not in the cache yet
    bool ended = false;
    bool begun = false;  // others that begin alike were looked for
    int64_t first() const { return next - std::ssize(waiting); }
  };
  struct Row {  // of a step
    Held* held;
    Want* want;            // null: nothing is drawn
    int64_t first, count;  // tokens: of held->tokens, or the draft's last one (first < 0)
    const int32_t* places;
  };
  Status try_out(std::span<const int32_t> tokens) override;
  void let_go(std::vector<int32_t>& waiting, size_t count);
  bool prepare(Held& held, int64_t rows);
  bool take_from_another() override;
  void begin_like_another(Held& held);
  Status copy_rows(const Held& from, int64_t rows, Held& to);
  Status take_up(std::vector<Row> rows);
  Status follow(std::span<Want> wants);
  Status step(const std::vector<Row>& rows);
  void add(const Row& row);

  std::unordered_map<scheduler::SeqId, Held> held_;
  std::vector<int32_t> places_;                     // that nobody has
  std::unordered_map<const Want*, int32_t> state_;  // the place of its last row's
  Status failed_;                                   // of a copy
};

}  // namespace kvasir::engine
