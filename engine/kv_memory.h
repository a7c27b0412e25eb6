// How much memory the cache takes, and how it is shared out. The default on a CPU: a quarter of what is free, and at
// most 4 GiB; on a GPU what loading leaves.
//
// Where some layers see a window only, they have a pool of their own, of
//   min(pages of both if every token were kept in all layers,
//       max_running * (pages of a window + 2) + pages of a step)
// pages, and the full layers have what is left.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/status.h"
#include "model/runner.h"
#include "scheduler/options.h"

namespace kvasir::engine {

inline int64_t default_kv_memory(int64_t free_bytes) { return std::min<int64_t>(free_bytes / 4, int64_t(4) << 30); }

// Pages of `page_size` tokens in `kv_memory` bytes; an error when not even one sequence of a page fits.
Result<int64_t> kv_pages(int64_t kv_memory, int32_t page_size, int64_t bytes_per_token);

struct KvSteps {  // what a pool for windows has to have room for
  int32_t page_size = 16;
  int32_t max_running = 64;
  int64_t max_tokens_per_step = 512;
};
// One pool for each group of layers, full attention first. `apart`: windowed layers may have a pool of their own; if
// not, one pool keeps every token that any layer needs.
Result<std::vector<scheduler::PageGroup>> kv_pools(int64_t kv_memory, const model::ModelInfo& model,
                                                   const KvSteps& steps, bool apart);

// Of a model with recurrent states: sequences that may run, states that may be kept for prefixes (`keeps`) beside, and
// what all of them take. At most half of the memory, so that there are pages for them as well; where that is too little
// for as many of both as `max_running`, a quarter of the states are for prefixes.
struct StateSlots {
  int32_t sequences = 0, kept = 0;
  int64_t bytes = 0;  // of all; 0: the model has none
};
Result<StateSlots> state_slots(int64_t kv_memory, const model::ModelInfo& model, int32_t max_running, bool keeps);
// The least that holds so many sequences of so many tokens, with states beside pages as above.
int64_t memory_for(int64_t sequences, int64_t tokens, const model::ModelInfo& model, int32_t max_running);

// What a draft model's cache has of it: as many tokens as the model's own, at most half of the memory, and no more than
// running sequences can have.
struct DraftPages {
  int64_t pages = 0, bytes = 0;
};
DraftPages draft_pages(int64_t kv_memory, const model::ModelInfo& model, const model::ModelInfo& draft,
                       const KvSteps& steps);

}  // namespace kvasir::engine
