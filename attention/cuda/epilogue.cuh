// Stage 3 of every attention kernel: a row's softmax ends, its results are divided by the sum of their weights, with
// the learned sink's share in it, and its log-sum-exp is stored. `base` is the log2 of what a sum is counted in.
#pragma once

#include "attention/cuda/device.cuh"

namespace kvasir::attention::cuda {

// Of a row that saw no key: its result is exact zeros.
__device__ __forceinline__ bool no_weight(float sum) { return !(sum > 0.0f); }

// The sink meets a row once, when all of its keys are in the sum (`whole`).
__device__ __forceinline__ void add_sink(const Layer& l, int head, float base, bool masked, bool whole, float& sum) {
  if (whole && l.sink_logits && !masked) sum += exp2f(l.sink_logits[head] * kLog2e - base);
}

__device__ __forceinline__ float log_sum_exp(float base, bool masked, float sum) {
  return masked ? -INFINITY : base * kLn2 + logf(sum);
}

// A row of a stream kernel's tile as it leaves, straight to the output or as a part to be merged:
// store(partial, to, factor) takes its elements to row `to` of either; one lane stores the log-sum-exp.
template <class Store>
__device__ __forceinline__ void finish_row(const Shape& s, const StepView& v, const Layer& l, const Segment& seg,
                                           int kv_head, int r, float base, float sum, float value_scale,
                                           bool stores_lse, Store&& store) {
  const int flat = seg.row_begin + r, query = flat / s.group, head = kv_head * s.group + flat % s.group;
  const bool masked = no_weight(sum);
  const bool partial = seg.slot >= 0;
  const int64_t row = int64_t(partial ? seg.slot + query : v.rows[seg.tokens + query].token) * s.heads + head;
  add_sink(l, head, base, masked, !partial, sum);
  store(partial, row, masked ? 0.0f : value_scale / sum * (partial ? 1.0f : s.out_inv_scale));
  float* lse = partial ? l.partial_lse : l.lse;
  if (lse && stores_lse) lse[row] = log_sum_exp(base, masked, sum);
}

}  // namespace kvasir::attention::cuda
