// New tokens as models have them: RoPE over whole heads, its pairs half a head apart, or none. A warp has a token, or
// some of its rows: the angles are read once for all of its heads. A lane has 16 elements of a row, which are
// rotated by the same eight angles.
#include <algorithm>

#include "attention/cuda/append.cuh"
#include "attention/params.h"

namespace kvasir::attention::cuda {
namespace {

constexpr int kWarps = 4, kFlight = 2;

template <DType kIo, int kD>
__global__ void __launch_bounds__(kWarps * 32, 4)
    append_tokens_kernel(const __grid_constant__ Shape s, const __grid_constant__ StepView v,
                         const __grid_constant__ Layer l, bool queries, bool store, int pieces) {
  let_next_kernel_start();
  constexpr int kLanes = kD / 16, kRows = 32 / kLanes;  // rows a warp has at once
  const int lane = threadIdx.x % kLanes, mine = threadIdx.x % 32 / kLanes, tokens = v.counts[kCountTokens];
  const int first = queries ? 0 : s.heads, rows = s.heads + (store ? 2 * s.kv_heads : 0);
  const int in_group = l.cache.quant_group ? l.cache.quant_group / 8 : 1;
  const int step = kRows * pieces;
  for (int64_t task = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32; task < int64_t(tokens) * pieces;
       task += int64_t(gridDim.x) * kWarps) {
    const int token = int(uint32_t(task) / uint32_t(pieces)), piece = int(uint32_t(task) % uint32_t(pieces));
    const Token info = v.tokens[token];
    const bool deferred = info.flags & kDeferred, write = store && info.place >= 0 && !deferred;
    const bool contiguous = !l.given && info.flags & (kContiguous | kDeferred);
    Angles angles;
    if (s.rope_style != 0) angles = angles_of(s, token, kD, lane * 8);
    for (int row = first + piece * kRows; row < rows; row += step * kFlight) {
      uint4 raw[kFlight][2];
#pragma unroll
      for (int u = 0; u < kFlight; ++u) {
        const int r = row + u * step + mine, part = r < s.heads ? 0 : r < s.heads + s.kv_heads ? 1 : 2;
        const int head = part == 0 ? r : r - s.heads - (part - 1) * s.kv_heads;
        if (r < rows) {
          const uint4* from = reinterpret_cast<const uint4*>(given_row(s, l, part, head, token, kD)) + lane;
          raw[u][0] = __ldcs(from), raw[u][1] = __ldcs(from + kLanes);
        }
      }
#pragma unroll
      for (int u = 0; u < kFlight; ++u) {
        if (row + u * step >= rows) break;  // of the whole warp
        const int r = row + u * step + mine, part = r < s.heads ? 0 : r < s.heads + s.kv_heads ? 1 : 2;
        const bool live = r < rows;
        const int head = part == 0 ? r : r - s.heads - (part - 1) * s.kv_heads;
        constexpr bool kBrain = kIo == DType::bf16;
        Vec8 x = load16(raw[u][0], kBrain), y = load16(raw[u][1], kBrain);
        if (l.bias && live) add_bias(l, kBrain, r * kD + lane * 8, kD, x, y);
        if (part != 2 && s.rope_style != 0) rotate_pairs(angles, x, y);
        if (part == 0 && live) {
          const int64_t to = (int64_t(token) * s.heads + head) * kD + lane * 8;
          query_as_fp8(l, x), query_as_fp8(l, y);
          store_query(l, kIo, info.flags, to, x);
          store_query(l, kIo, info.flags, to + kD / 2, y);
        }
        if (row + u * step + kRows <= s.heads) continue;  // queries alone: all of the warp
        uint8_t *to = nullptr, *scale_to = nullptr;
        if (live && part != 0 && write) cache_row(l.cache, part == 2, info.place, head, to, scale_to);
        through_cache(l.cache, false, false, part == 2, lane, in_group, x, to, scale_to);
        through_cache(l.cache, false, false, part == 2, lane + kLanes, in_group, y, to, scale_to);
        if (live && part != 0 && contiguous) {
          void* out = part == 2 ? l.v_new : l.k_new;
          const int64_t at = (int64_t(token) * s.kv_heads + head) * kD + lane * 8;
          store8(out, kIo, at, x);
          store8(out, kIo, at + kD / 2, y);
        }
      }
    }
  }
}

template <DType kIo, int kD>
void run(const Shape& s, const StepView& v, const Layer& l, int64_t tokens, bool queries, bool store,
         cudaStream_t stream) {
  constexpr int kRows = 512 / kD;
  const int64_t turns = ((queries ? s.heads : 0) + (store ? 2 * s.kv_heads : 0) + kRows - 1) / kRows;
  // A token a warp where that fills the device, else a token's rows over some.
  const int64_t pieces = std::min((turns + kFlight - 1) / kFlight, std::max<int64_t>(1, 132 * 16 / tokens));
  const int64_t blocks = (tokens * pieces + kWarps - 1) / kWarps;
  append_tokens_kernel<kIo, kD>
      <<<int(std::min<int64_t>(blocks, 132 * 64)), kWarps * 32, 0, stream>>>(s, v, l, queries, store, int(pieces));
}

}  // namespace

bool append_tokens_takes(const Shape& s, const CacheLayer& c) {
  return (s.io == DType::bf16 || s.io == DType::f16) && (s.head_dim == 64 || s.head_dim == 128 || s.head_dim == 256) &&
         (s.rope_style == 0 || (s.rope_style == int(RopeStyle::neox) && s.rotary_dim == s.head_dim && !s.streaming)) &&
         c.quant_group <= s.head_dim / 2;
}

void launch_append_tokens(const Shape& s, const StepView& v, const Layer& l, int64_t tokens, bool queries, bool store,
                          cudaStream_t stream) {
  const bool brain = s.io == DType::bf16;
  switch (s.head_dim) {
    case 64: return (brain ? run<DType::bf16, 64> : run<DType::f16, 64>)(s, v, l, tokens, queries, store, stream);
    case 128: return (brain ? run<DType::bf16, 128> : run<DType::f16, 128>)(s, v, l, tokens, queries, store, stream);
    default: return (brain ? run<DType::bf16, 256> : run<DType::f16, 256>)(s, v, l, tokens, queries, store, stream);
  }
}

}  // namespace kvasir::attention::cuda
