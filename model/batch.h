// One packed step, in the operator's own terms: built once from a StepPlan, translated nowhere.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "kvcache/orders.h"

namespace kvasir::model {

class Adapter;

using kvcache::PageCopy;
using kvcache::PageMove;

// A token id < 0 means "what sample row (-1 - id) of the previously launched batch gave":
// so a decode can be enqueued before the step that feeds it has finished.
constexpr int32_t previous_sample(int32_t row) { return -1 - row; }

struct Batch {
  uint64_t step = 0;
  std::vector<int32_t> tokens;     // [T]
  std::vector<int32_t> positions;  // [T]
  std::vector<int64_t> seqstarts;  // [B+1]
  std::vector<int64_t> kvstarts;   // [B+1]
  std::vector<int64_t> start_pos;  // [B]
  // Token indices by the runner's index mode: [B, max_pages], [B] or [kvstarts[B]]. Of layer group 0, then of the
  // others, where layers with a window have pages of their own.
  std::vector<int64_t> cachestarts;
  std::vector<std::vector<int64_t>> more_cachestarts;
  int64_t max_pages = 0;
  int64_t decoding_batches = 0, max_seqlen = 0, max_kvlen = 0;
  std::vector<PageMove> moves;   // first of all, in order
  std::vector<PageCopy> copies;  // then these, before anything of the step is written
  // Rows of `tokens` whose logits are wanted, ascending. A row repeats when n choices draw from it (the end
  // of a prompt that forks); each then has its own SampleRow.
  std::vector<int32_t> logit_rows;
  // Rows whose last hidden states are wanted instead, each pool's added to its sum ([hidden]) by wait(). They stand in
  // logit_rows, behind those that are drawn from.
  struct Pool {
    int64_t count = 0;
    float* sum = nullptr;
  };
  std::vector<Pool> pools;
  // Hidden states, for heads that draft: by their places in the memory that Runner::load_head() has made where the
  // model is. Where each row leaves its own, -1: nowhere; empty: nobody reads any.
  std::vector<int32_t> kept_at;  // [T]
  // Of a head: what every row reads beside its token, ModelInfo::given columns of the model's own or as many as this
  // head has kept of the row before. A place is read before it is written.
  std::vector<int32_t> given_at;  // [T]
  int64_t given_cols = 0;
  std::vector<const Adapter*> adapters;  // [B]: of each sequence, or null; empty: none has one
  std::vector<int32_t> types;            // [T]: which text of a pair each token belongs to; empty: all to the first
  // [B]: of an encoder-decoder, tokens at the front of each sequence that its encoder reads; empty: of any other model.
  std::vector<int64_t> sources;
  // [B]: of a model with states, the slot of each sequence's. One that begins at 0 is a new one, whatever the slot
  // holds. Empty: of any other model.
  std::vector<int32_t> states;
  // Called when constraints have refused what was drawn and their masks are still being computed: what is there when it
  // returns is drawn from. Empty: there are no constraints.
  std::function<void()> wait_for_masks;

  int64_t size() const { return static_cast<int64_t>(start_pos.size()); }
  int64_t pooled_rows() const {
    int64_t n = 0;
    for (const Pool& p : pools) n += p.count;
    return n;
  }
};

}  // namespace kvasir::model
