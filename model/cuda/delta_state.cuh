// How a state lies in a slot: as the lanes of a warp have it that takes one row (delta_rule.cu), 8 columns of a head
// after another.
#pragma once

#include "model/cuda/delta_rule.h"

namespace kvasir::model::cuda {

// A lane has columns quad * 4 + (x ^ own), x in [0, 4), of 8, and of each the rows r * 64 + of_row * 4 + [0, 4). As the
// four are in another order in each of four lanes, sums over these lanes need no choice which half to send.
struct StateLane {
  static constexpr int kHigh = 2, kLow = 4;  // lanes whose `own` differs in this bit
  int quad, of_row, own;
  __device__ explicit StateLane(int lane)
      : quad(lane & 1), of_row(lane >> 1), own((lane & kHigh ? 2 : 0) | (lane & kLow ? 1 : 0)) {}
};

__device__ inline int key_head_of(const LinearShape& c, int head) {
  return c.tiled ? head % c.key_heads : head / (c.value_heads / c.key_heads);
}

// Those of a head from `column` on, a multiple of 8.
template <int kDim>
__device__ float* state_columns(const DeltaStep& s, int slot, int head, int column) {
  return s.slots + slot * s.slot_stride + (kTaps - 1) * s.shape.channels +
         (int64_t(head) * s.shape.value_dim + column) * kDim;
}

// Where among them an element lies.
template <int kDim>
__device__ int state_place(int column, int row) {
  const int lane = row % 64 / 4 * 2 + column % 8 / 4, r = row / 64 * 4 + row % 4;
  return (column / 8 * (kDim / 16) + r) * 128 + lane * 4 + (column % 4 ^ StateLane(lane).own);
}

}  // namespace kvasir::model::cuda
