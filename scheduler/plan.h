// What the scheduler says of one step. It owns no tensors: it names sequences, token ranges and pages.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvcache/orders.h"

namespace kvasir::scheduler {

using RequestId = uint64_t;  // chosen by the caller, unique among live requests
using SeqId = uint64_t;      // one running choice of one request

using kvcache::PageCopy;
using kvcache::PageMove;

enum class Phase : uint8_t { decode, verify, prefill };

struct PlanItem {
  SeqId seq = 0;
  RequestId request = 0;
  int32_t choice = 0;  // seq - the SeqId that submit returned
  Phase phase = Phase::decode;
  bool samples = false;  // its last token's logits are wanted (verify: every token's)
  // The last token of `tokens` is not known yet: it is what the plan before this one samples for `seq`.
  // tokens.size() is then count - 1.
  bool awaits_token = false;
  // How many draws of that last row: 1, or n when a prefill ends with n choices to fork; draw c belongs
  // to choice c, whose sequence is seq + c.
  int32_t draws = 1;
  int64_t begin = 0;                // first new token's position (start_pos)
  int32_t count = 0;                // new tokens
  std::span<const int32_t> tokens;  // their ids
  // The page table after this step's reservation, covering [0, begin + count). Entries behind a
  // group's window are stale and never to be read.
  std::span<const int32_t> pages;                    // of group 0
  int32_t cut_begin = 0, cut_end = 0;                // of `pages`: behind the window, after the sinks; gone
  int32_t state = -1;                                // the slot of its recurrent state; -1: the model has none
  uint64_t table_version = 0;                        // tables of the same one differ in length only
  std::span<const std::vector<int32_t>> more_pages;  // of groups 1.., when the model mixes windows
};

// The spans look into the scheduler: read them before the next call that changes it.
struct StepPlan {
  uint64_t step = 0;
  std::vector<PageMove> moves;   // in order, first of all
  std::vector<PageCopy> copies;  // in order, after the moves and before anything is written
  std::vector<PlanItem> items;   // decodes, then verifications, then prefill chunks
  int64_t decoding_batches = 0;
  int64_t tokens = 0;
  bool empty() const { return items.empty() && copies.empty() && moves.empty(); }
};

}  // namespace kvasir::scheduler
