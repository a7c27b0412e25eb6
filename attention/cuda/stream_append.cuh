// The append of a decode by those that attend it (Layer::appended_here): its key and value go into the cache by the
// warp whose keys end with them, which alone reads them. Blocks that share a kv head rotate their queries into shared
// memory, other warps rotate theirs in registers.
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
    if (part != 2 && s.rope_style != 0) rotate_pairs(angles, x, y);
    if (!fresh) {
      query_as_fp8(l, x), query_as_fp8(l, y);
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

// By a warp, before its first copy of keys: the new tokens that its runs of keys end with. It alone reads them.
template <int kD>
__device__ __forceinline__ void append_runs(const Shape& s, const StepView& v, const Layer& l, const StreamList& list,
                                            const PartHead& head, int kv_head, int lane) {
  constexpr int kLanes = kD / 16, kRuns = 32 / kLanes / 2;  // a key and a value each
  const int sub = lane / kLanes, d = lane % kLanes * 8, part = 1 + sub % 2;
  const bool brain = s.io == DType::bf16;
#pragma unroll 1
  for (int first = head.begin; first < head.end; first += kRuns) {
    const int at = min(first + sub / 2, head.end - 1);
    const Segment& seg = list.segments[at];
    const int end = seg.kv_end;
    const QueryRow& row = v.rows[seg.tokens];
    const int token = row.token;
    const bool live = first + sub / 2 < head.end && seg.kv_begin < end && end == row.own + 1;
    if (!__any_sync(0xffffffffu, live)) continue;
    const uint16_t* from = given_row(s, l, part, kv_head, token, kD) + d;
    const uint4 raw[2] = {*reinterpret_cast<const uint4*>(from), *reinterpret_cast<const uint4*>(from + kD / 2)};
    const int32_t place = v.tokens[token].place;
    Vec8 x = load16(raw[0], brain), y = load16(raw[1], brain);
    if (l.bias) add_bias(l, brain, (s.heads + (part - 1) * s.kv_heads + kv_head) * kD + d, kD, x, y);
    if (part == 1 && s.rope_style != 0) rotate_pairs(angles_of(s, token, kD, d), x, y);
    uint8_t *to = nullptr, *scale_to = nullptr;
    if (live) cache_row(l.cache, part == 2, place, kv_head, to, scale_to);
    through_cache(l.cache, false, false, part == 2, lane % kLanes, 1, x, to, scale_to);
    through_cache(l.cache, false, false, part == 2, lane % kLanes + kLanes, 1, y, to, scale_to);
  }
  __syncwarp();
}

// A query as a lane of the few-rows kernel holds it of a 16-bit cache: q[k][reg] is elements 16 * k + 8 * reg + 2 * tid
// and the next, so their partners half a row on are q[k + kD / 32][reg].
template <int kD>
__device__ __forceinline__ void rotate_query(const Shape& s, const Layer& l, int token, int head, int tid,
                                             uint32_t (&q)[kD / 16][2]) {
  const bool brain = s.io == DType::bf16;
#pragma unroll
  for (int k = 0; k < kD / 32; ++k)
#pragma unroll
    for (int reg = 0; reg < 2; ++reg) {
      const int d = k * 16 + reg * 8 + tid * 2;
      float2 x = pair_of(q[k][reg], brain), y = pair_of(q[k + kD / 32][reg], brain);
      if (l.bias) {
        const uint16_t* bias = static_cast<const uint16_t*>(l.bias) + head * kD + d;
        const float2 to_x = pair_of(*reinterpret_cast<const uint32_t*>(bias), brain),
                     to_y = pair_of(*reinterpret_cast<const uint32_t*>(bias + kD / 2), brain);
        x.x += to_x.x, x.y += to_x.y, y.x += to_y.x, y.y += to_y.y;
      }
      if (s.rope_style != 0) {
        const float4* angle = reinterpret_cast<const float4*>(s.rope) + int64_t(token) * (kD / 2) + d;
        const float4 a = angle[0], b = angle[1];
        const float2 was = x;
        x = {rotated(was.x, y.x, a), rotated(was.y, y.y, b)};
        y = {rotated(y.x, -was.x, a), rotated(y.y, -was.y, b)};
      }
      if (l.q_inverse != 0.0f) {
        x = {as_fp8(l, x.x), as_fp8(l, x.y)};
        y = {as_fp8(l, y.x), as_fp8(l, y.y)};
      }
      q[k][reg] = pair_as(x, brain), q[k + kD / 32][reg] = pair_as(y, brain);
    }
}

}  // namespace kvasir::attention::cuda
