// How one step is cut into work, as plain data made once a step for all layers. Any cut gives the same
// bytes: rows never mix, and ranges of keys are merged in order of their absolute position.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/backend.h"
#include "attention/cpu/kernels.h"
#include "attention/rules.h"

namespace kvasir::attention::cpu {

// Rows (query token x head of the group) that share one pass over the keys.
constexpr int kBlockRows = 96;
// Floats of a partial row in the workspace: maximum, sum, and padding to a vector, before its output.
constexpr int kPartialHead = 16;

constexpr int64_t padded_dim(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

struct AttendItem {
  int32_t sequence = 0, kv_head = 0;
  int32_t token_begin = 0, token_end = 0;  // new tokens of the sequence
  int32_t split_begin = 0, split_end = 0;  // ranges of kSplit keys
  int64_t partial = -1;  // first of (split_end-split_begin) x rows partial rows; -1: writes its output itself
  int64_t cost = 0;
};

// The splits of one block, to be merged in order once all items are done.
struct Merge {
  int32_t sequence = 0, kv_head = 0;
  int32_t token_begin = 0, token_end = 0;
  int32_t splits = 0;
  int64_t partial = 0;
};

struct Plan {
  std::vector<AttendItem> items;  // dearest first
  std::vector<Merge> merges;
  int64_t partial_rows = 0;
};

struct PlanLimits {
  int threads = 1;
  int64_t max_partial_rows = 0;  // what the workspace holds
};

int block_tokens(const Attributes& a);
void make_plan(const Attributes& a, const std::vector<SequenceShape>& shapes, const PlanLimits& limits, Plan* plan);

}  // namespace kvasir::attention::cpu
