// The append of a decode by the blocks that attend it (Layer::appended_here): its queries are turned into the block's
// shared memory, its key and value go into the cache by the warp whose keys end with them, which alone reads them.
#pragma once

#include "attention/cuda/append.cuh"

namespace kvasir::attention::cuda {

// By all warps of a block whose segments are parts of one item, before any copy is under way; `queries`: room for
// row_count rows of kD. Behind it the block must meet.
template <int kD>
__device__ __forceinline__ void append_here(const Shape& s, const StepView& v, const Layer& l, const Segment& seg,
                                            int token, int kv_head, bool ends, int warp, int lane, uint8_t* queries) {
  constexpr int kLanes = kD / 16, kRows = 32 / kLanes;
  const int sub = lane / kLanes, d = lane % kLanes * 8;
  const bool brain = s.io == DType::bf16;
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {
    const bool fresh = turn == 1;  // the key and the value
    if (fresh ? !ends : warp * kRows >= seg.row_count) continue;
    const int row = warp * kRows + sub;
    const bool live = fresh ? sub < 2 : row < seg.row_count;
    const int part = !fresh ? 0 : 1 + (sub & 1);
    const int head = fresh ? kv_head : kv_head * s.group + (row < seg.row_count ? row : 0);
    const uint16_t* from = given_row(s, l, part, head, token, kD) + d;
    const uint4 raw[2] = {*reinterpret_cast<const uint4*>(from), *reinterpret_cast<const uint4*>(from + kD / 2)};
    const int32_t place = fresh ? v.tokens[token].place : 0;
    Angles angles;
    if (s.rope_style != 0) angles = angles_of(s, token, kD, d);
    Vec8 x = load16(raw[0], brain), y = load16(raw[1], brain);
    if (l.bias) add_bias(l, brain, (part == 0 ? head : s.heads + (part - 1) * s.kv_heads + head) * kD + d, kD, x, y);
    if (part != 2 && s.rope_style != 0) turn_pairs(angles, x, y);
    if (!fresh) {
      if (live) {
        uint4* to = reinterpret_cast<uint4*>(queries) + (row * kD + d) / 8;
        to[0] = pack16(x, brain), to[kLanes] = pack16(y, brain);
      }
      continue;
    }
    const int in_group = l.cache.quant_group ? l.cache.quant_group / 8 : 1;
    uint8_t *to = nullptr, *scale_to = nullptr;
    if (live) cache_row(l.cache, part == 2, place, head, to, scale_to);
    through_cache(l.cache, false, false, part == 2, lane % kLanes, in_group, x, to, scale_to);
    through_cache(l.cache, false, false, part == 2, lane % kLanes + kLanes, in_group, y, to, scale_to);
  }
}

}  // namespace kvasir::attention::cuda
