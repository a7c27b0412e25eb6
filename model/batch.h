// One packed step, in the operator's own terms: built once from a StepPlan, translated nowhere.
#pragma once

#include <cstdint>
#include <vector>

namespace kvasir::model {

struct PageCopy {
  int32_t from = 0, to = 0;  // page ids; done in order, before anything of the step is written
  int32_t tokens = 0;        // how many of its first tokens matter
};

// A token id < 0 means "what sample row (-1 - id) of the previously launched batch gave":
// so a decode can be enqueued before the step that feeds it has finished.
constexpr int32_t previous_sample(int32_t row) { return -1 - row; }

struct Batch {
  uint64_t step = 0;
  std::vector<int32_t> tokens;       // [T]
  std::vector<int32_t> positions;    // [T]
  std::vector<int64_t> seqstarts;    // [B+1]
  std::vector<int64_t> kvstarts;     // [B+1]
  std::vector<int64_t> start_pos;    // [B]
  std::vector<int64_t> cachestarts;  // [B, max_pages], token indices
  int64_t max_pages = 0;
  int64_t decoding_batches = 0, max_seqlen = 0, max_kvlen = 0;
  std::vector<PageCopy> copies;
  // Rows of `tokens` whose logits are wanted, ascending. A row repeats when n choices draw from it (the end
  // of a prompt that forks); each then has its own SampleRow.
  std::vector<int32_t> logit_rows;

  int64_t size() const { return static_cast<int64_t>(start_pos.size()); }
};

}  // namespace kvasir::model
