// How a tile's results leave the registers of prefill's warps: divided by the sums of their weights, and through the
// place of their own queries to the tensor memory accelerator where they are of its type.
#pragma once

#include "attention/cuda/epilogue.cuh"
#include "attention/cuda/launch.h"
#include "attention/cuda/prefill_feed.cuh"
#include "attention/cuda/softmax.cuh"
#include "attention/cuda/wgmma.cuh"

namespace kvasir::attention::cuda {

// By all of a warp, which has rows `group` * 64 + `thread` / 32 * 16 to + 15 of the tile; `queries` is its place.
template <class M, int kOut>
__device__ __forceinline__ void leave_results(const Shape& s, const Layer& l, const CUtensorMap& map,
                                              const PrefillTile& tile, int head, uint8_t* queries, int group,
                                              int thread, const float (&top)[2], float (&sum)[2], float scale,
                                              const float (&out)[kOut]) {
  constexpr int kD = M::kD;
  const DeviceSequence& seq = tile.of;
  const int warp = thread / 32, lane = thread % 32, g = lane / 4, tid = lane % 4, in_tile = group * 64 + warp * 16 + g;
  float factor[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if constexpr (M::kSums == 0) {
      sum[h] = lanes_sum<1, 2>(sum[h]);
    }
    const bool masked = no_weight(sum[h]);
    const float base = top[h] * scale - M::kShift;  // log2 of what `sum` is counted in
    float all = sum[h];
    add_sink(l, head, base, masked, true, all);
    factor[h] = masked ? 0.0f : M::value_unit(l) * s.out_inv_scale / all;
    const int r = tile.row + in_tile + h * 8;
    if (l.lse && tid == 0 && r < seq.q_len)
      l.lse[int64_t(seq.q_begin + r) * s.heads + head] = log_sum_exp(base, masked, all);
  }
  if (s.out == s.work) {
    // Through the place of this warp's own queries, in their swizzle.
    uint8_t* mine = queries + (group * 64 + warp * 16) * 128;
    const uint32_t to = shared_address(mine) + lane % 16 * 128, swizzled = (lane / 16 ^ lane % 8) * 16;
#pragma unroll
    for (int c = 0; c < kD / 8; c += 2) {  // pieces of 8 columns, of rows g and g + 8
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[i] = M::T::pack(out[c * 4 + i * 2] * factor[i % 2], out[c * 4 + i * 2 + 1] * factor[i % 2]);
      store_matrices(to + c / 8 * kHalfTile + (swizzled ^ c % 8 * 16), x);
    }
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
    __syncwarp();
    const int row = tile.row + group * 64 + warp * 16, rows = seq.q_len - row;
    if (rows >= 16) {
      if (lane == 0)
        for (int h = 0; h < kD / 64; ++h) store_tile(&map, mine + h * kHalfTile, h * 64, head, seq.q_begin + row);
    } else {
#pragma unroll 1
      for (int n = lane; n < rows * (kD / 8); n += 32) {
        const int r = n / (kD / 8), chunk = n % (kD / 8);
        if (chunk * 8 < s.head_dim)
          *reinterpret_cast<uint4*>(static_cast<uint16_t*>(l.out) +
                                    (int64_t(seq.q_begin + row + r) * s.heads + head) * s.head_dim + chunk * 8) =
              *reinterpret_cast<const uint4*>(mine + chunk / 8 * kHalfTile + r * 128 + (chunk % 8 ^ r & 7) * 16);
      }
      asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
    }
  } else {
#pragma unroll
    for (int e = 0; e < kD / 2; ++e) {
      const int h = (e / 2) % 2, r = tile.row + in_tile + h * 8, d = (e / 4) * 8 + tid * 2 + e % 2;
      if (r < seq.q_len && d < s.head_dim)
        store_float(l.out, s.out, (int64_t(seq.q_begin + r) * s.heads + head) * s.head_dim + d, out[e] * factor[h]);
    }
  }
}

}  // namespace kvasir::attention::cuda
