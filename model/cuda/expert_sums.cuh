// What becomes of the sums of an expert's products.
#pragma once

#include <cuda_bf16.h>

#include "model/cuda/expert_tiles.h"

namespace kvasir::model::cuda {

// What a block needs of a matrix.
struct ExpertProduct {
  const uint8_t* tiles;
  const float* bias;
  const ExpertItem* items;
  const int32_t *count, *rows;  // rows: null where slots are the rows
  const __nv_bfloat16* in;
  void* out;
  int64_t expert_bytes;
  int32_t k, results, steps, down;  // down: tiles, or parts of them, below one another
  Gate gate;
};

__device__ inline float gated(const Gate& by, float gate, float up) {
  gate = fminf(gate, by.limit), up = fminf(fmaxf(up, -by.limit), by.limit);
  const float z = gate * (by.slope + by.cubic * gate * gate);
  return (up + by.shift) * gate / (1 + __expf(-z));
}

// Result `f` of a slot, of the sums of its gate and of what that opens; and of a sum.
__device__ inline void put_gated(const ExpertProduct& p, int expert, int64_t slot, int f, float gate, float up) {
  if (f >= p.results) return;
  if (p.bias) {
    const float* bias = p.bias + int64_t(expert) * 2 * p.results + f;
    gate += bias[0], up += bias[p.results];
  }
  static_cast<__nv_bfloat16*>(p.out)[slot * p.results + f] = __float2bfloat16_rn(gated(p.gate, gate, up));
}
__device__ inline void put_sum(const ExpertProduct& p, int expert, int64_t slot, int f, float sum) {
  if (f >= p.results) return;
  if (p.bias) sum += p.bias[int64_t(expert) * p.results + f];
  static_cast<float*>(p.out)[slot * p.results + f] = sum;
}

inline ExpertProduct product_of(const ExpertMatrix& m, const Routed& routed, const void* in, bool by_slot, void* out,
                                int64_t down) {
  return {.tiles = static_cast<const uint8_t*>(m.tiles),
          .bias = m.bias,
          .items = routed.items,
          .count = routed.count,
          .rows = by_slot ? nullptr : routed.slot_rows,
          .in = static_cast<const __nv_bfloat16*>(in),
          .out = out,
          .expert_bytes = m.bytes(),
          .k = int32_t(m.cols),
          .results = int32_t(m.results()),
          .steps = int32_t(m.steps()),
          .down = int32_t(down),
          .gate = m.gate};
}

}  // namespace kvasir::model::cuda
