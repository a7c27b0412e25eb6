// The kernel that reads the cache once. Every warp walks a part of the plan of its own: runs of keys, each for a tile
// of up to 16 or 32 query rows of one kv head. It has its own ring of shared-memory stages filled by cp.async and its
// own running softmax, so no warp ever waits for another, and loading runs on into the next run of keys meanwhile.
// The warps of a block take neighbouring kv heads of the same part: where heads lie side by side, so do their reads.
//   bytes in flight for head 128, bf16: 8 warps x 2 stages x 8 KB = 128 KB a multiprocessor
#pragma once

#include "attention/cuda/launch.h"
#include "attention/cuda/stream_kind.cuh"

namespace kvasir::attention::cuda {

constexpr int kStreamWarps = 4;

template <class K, int kD, int kRowTiles>
struct StreamSize {
  static constexpr int kRow = K::template kRowBytes<kD>;
  static constexpr int kTile = K::kTile;  // keys
  static constexpr int kTileBytes = 2 * kTile * kRow;
  static constexpr int kFit = 24576 / kTileBytes;
  static constexpr int kStages = kFit > 6 ? 6 : kFit < 3 ? 3 : kFit;
  static constexpr int kBlocks = kStages * kTileBytes <= 28672 ? 2 : 1;
  static int bytes(int scale_bytes) {
    return kStreamWarps * kStages * (kTileBytes + (K::kGroup ? 2 * kTile * scale_bytes : 0));
  }
};

// A row of q over the four lanes that share it, bfloat16 to float16: carried with a power of two of its own, so
// that nothing overflows and next to nothing underflows. Gives that power.
template <int kN>
__device__ inline float brain_to_half(uint32_t (&raw)[kN][2]) {
  float big = 0.0f;
#pragma unroll
  for (int i = 0; i < kN * 2; ++i) {
    const uint32_t w = raw[i / 2][i % 2];
    big = fmaxf(big, fmaxf(fabsf(__uint_as_float(w << 16)), fabsf(__uint_as_float(w & 0xffff0000u))));
  }
  big = fmaxf(big, __shfl_xor_sync(0xffffffffu, big, 1));
  big = fmaxf(big, __shfl_xor_sync(0xffffffffu, big, 2));
  const uint32_t exponent = __float_as_uint(big) & 0x7f800000u;
  const float unit = exponent > 0x01000000u && exponent < 0x7e000000u ? __uint_as_float(exponent) : 1.0f;
  const float inverse = 1.0f / unit;
#pragma unroll
  for (int i = 0; i < kN * 2; ++i) {
    uint32_t& w = raw[i / 2][i % 2];
    w = Half::pack(__uint_as_float(w << 16) * inverse, __uint_as_float(w & 0xffff0000u) * inverse);
  }
  return unit;
}

// kN elements side by side, as wide as they go.
template <int kN>
struct Run {
  float x[kN];
};
template <int kN>
__device__ inline void store_run(void* base, DType type, int64_t i, const Run<kN>& v) {
  if (type == DType::f32) {
    float* p = static_cast<float*>(base) + i;
    if constexpr (kN == 2) *reinterpret_cast<float2*>(p) = {v.x[0], v.x[1]};
    if constexpr (kN == 4) *reinterpret_cast<float4*>(p) = {v.x[0], v.x[1], v.x[2], v.x[3]};
  } else if (type == DType::f8_e4m3) {
    for (int k = 0; k < kN; ++k) store_float(base, type, i + k, v.x[k]);
  } else {
    uint32_t w[kN / 2];
#pragma unroll
    for (int k = 0; k < kN / 2; ++k)
      w[k] = type == DType::f16 ? Half::pack(v.x[k * 2], v.x[k * 2 + 1]) : Brain::pack(v.x[k * 2], v.x[k * 2 + 1]);
    uint16_t* p = static_cast<uint16_t*>(base) + i;
    if constexpr (kN == 2) *reinterpret_cast<uint32_t*>(p) = w[0];
    if constexpr (kN == 4) *reinterpret_cast<uint2*>(p) = {w[0], w[1]};
  }
}

// Where a warp's loads have got to: the tile at `key` of the current segment.
struct Cursor {
  int segment, key, end, sequence, seen_begin;
};

template <class K, int kD, int kRowTiles>
__global__ void __launch_bounds__(kStreamWarps * 32, StreamSize<K, kD, kRowTiles>::kBlocks)
    stream_kernel(const __grid_constant__ Shape s, const __grid_constant__ StepView v, const __grid_constant__ Layer l,
                  const __grid_constant__ StreamList list, int scale_bytes) {
  using T = typename K::T;
  using Size = StreamSize<K, kD, kRowTiles>;
  constexpr int kTile = Size::kTile, kStages = Size::kStages, kRow = Size::kRow, kChunks = kRow / 16;
  constexpr float kShift = __is_same(T, Half) ? 10.0f : 0.0f;  // keeps small weights normal in float16
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, tid = lane & 3;
  const int stage_bytes = Size::kTileBytes + (K::kGroup ? 2 * kTile * scale_bytes : 0);
  uint8_t* ring = shared + warp * kStages * stage_bytes;

  const int index = blockIdx.x * kStreamWarps + warp, kv_head = index % s.kv_heads, part = index / s.kv_heads;
  // The plan lies in memory since before the kernel ahead of this one: it is read while that one still runs.
  const bool idle = part >= list.count;
  const int first_segment = idle ? 0 : list.parts[part], last_segment = idle ? 0 : list.parts[part + 1];
  const CacheLayer& c = l.cache;
  const uint8_t* key_base = c.key + kv_head * c.head;
  const int64_t to_value = c.value - c.key;

  // ---- loading ----
  Cursor at{first_segment, 0, 0, 0, 0};
  auto enter = [&]() {  // the first run from at.segment on that has keys
    for (; at.segment < last_segment; ++at.segment) {
      const Segment& seg = list.segments[at.segment];
      at.key = seg.kv_begin, at.end = seg.kv_end, at.sequence = seg.sequence, at.seen_begin = seg.seen_begin;
      if (at.key < at.end) return;
    }
  };
  auto place = [&]() {  // of this lane's row of the tile at the cursor
    if (at.segment >= last_segment) return int64_t(0);
    return read_place(s, v, at.sequence, min(at.key + (lane & (kTile - 1)), at.end - 1));
  };
  int fill = 0;  // stage
  uint16_t held_scales[2] = {};
  uint8_t* held_to = nullptr;
  enter();
  int64_t next_place = place();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  if (first_segment == last_segment) return;
  auto issue = [&]() {
    if (K::kGroup && scale_bytes == 2 && held_to) {  // loaded a turn ago: two bytes are too few for cp.async
      reinterpret_cast<uint16_t*>(held_to)[0] = held_scales[0];
      reinterpret_cast<uint16_t*>(held_to)[kTile] = held_scales[1];
      held_to = nullptr;
    }
    if (at.segment < last_segment) {
      const int live = min(at.end - at.key, kTile);
      // Zeros for keys that no row sees: whatever lies there might not be a number.
      const uint32_t rows_live =
          __ballot_sync(0xffffffffu, lane < live && (at.key + lane >= at.seen_begin || at.key + lane < s.sinks));
      uint8_t* stage = ring + fill * stage_bytes;
      const uint32_t stage_at = shared_address(stage);
      const int64_t offset = next_place * c.token;
#pragma unroll
      for (int i = 0; i < (kTile * kChunks + 31) / 32; ++i) {
        const int n = i * 32 + lane, row = n / kChunks, chunk = n % kChunks;
        const uint8_t* from = key_base + __shfl_sync(0xffffffffu, offset, row & (kTile - 1)) + chunk * 16;
        if (kTile * kChunks % 32 == 0 || row < kTile) {
          copy16(stage_at + row * kRow + K::template key_chunk<kD>(row, chunk) * 16, from, rows_live >> row & 1);
          copy16(stage_at + (kTile + row) * kRow + K::template value_chunk<kD>(row, chunk) * 16, from + to_value,
                 rows_live >> row & 1);
        }
      }
      if constexpr (K::kGroup) {  // a lane brings its key's scales of K and of V
        const int64_t row = next_place * c.scale_token + kv_head * c.scale_head;
        const bool here = rows_live >> lane & 1;
#pragma unroll
        for (int kv = 0; kv < 2; ++kv) {
          if (lane >= kTile) break;
          const uint8_t* from = (kv ? c.value_scale : c.key_scale) + row;
          uint8_t* to = stage + Size::kTileBytes + (kv * kTile + lane) * scale_bytes;
          if (scale_bytes == 2) {
            held_scales[kv] = here ? *reinterpret_cast<const uint16_t*>(from) : 0;
            held_to = to - kv * kTile * 2;
          } else if (scale_bytes % 16 == 0) {
            for (int i = 0; i < scale_bytes; i += 16) copy16(shared_address(to + i), from + i, here);
          } else if (scale_bytes == 8) {
            copy8(shared_address(to), from, here);
          } else {
            for (int i = 0; i < scale_bytes; i += 4) copy4(shared_address(to + i), from + i, here);
          }
        }
      }
      at.key += kTile;
      if (at.key >= at.end) {
        ++at.segment;
        enter();
      }
      next_place = place();
    }
    copies_commit();
    fill = fill + 1 == kStages ? 0 : fill + 1;
  };
  for (int i = 0; i < kStages - 1; ++i) issue();

  // ---- computing ----
  int use = 0;
  for (int segment = first_segment; segment < last_segment; ++segment) {
    const Segment seg = list.segments[segment];
    uint32_t q[kRowTiles][kD / 16][4];
    float row_scale[kRowTiles][2], row_slope[kRowTiles][2], top[kRowTiles][2], sum[kRowTiles][2];
    int row_begin[kRowTiles][2], row_end[kRowTiles][2], row_own[kRowTiles][2];
    int64_t row_mask[kRowTiles][2];
    int safe_begin = 0, safe_end = 0x7fffffff;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = m * 16 + h * 8 + g;
        const bool live = r < seg.row_count;
        const int flat = seg.row_begin + (live ? r : 0);
        const Row row = v.rows[seg.tokens + flat / s.group];
        const int head = kv_head * s.group + flat % s.group;
        row_begin[m][h] = row.begin, row_end[m][h] = row.end, row_own[m][h] = row.own;
        safe_begin = max(safe_begin, row.begin);
        safe_end = min(safe_end, row.end);
        row_slope[m][h] = s.slopes ? s.slopes[head] * kLog2e : 0.0f;
        row_mask[m][h] = head * l.mask_head + int64_t(row.token) * l.mask_row + row.column;
        top[m][h] = -INFINITY, sum[m][h] = 0.0f;

        const uint16_t* from = static_cast<const uint16_t*>(l.q) + (int64_t(row.token) * s.heads + head) * kD;
        uint32_t raw[kD / 16][2];
#pragma unroll
        for (int k = 0; k < kD / 16; ++k)
#pragma unroll
          for (int reg = 0; reg < 2; ++reg) {
            const int d0 = K::query_dim(k / 2, k % 2, reg, 0, tid), d1 = K::query_dim(k / 2, k % 2, reg, 1, tid);
            if constexpr (K::kBits >= 8)
              raw[k][reg] = live ? *reinterpret_cast<const uint32_t*>(from + d0) : 0;
            else
              raw[k][reg] = live ? from[d0] | uint32_t(from[d1]) << 16 : 0;
          }
        float unit = 1.0f;
        if (__is_same(T, Half) && s.work == DType::bf16) unit = brain_to_half(raw);
        row_scale[m][h] = s.scale * unit * (s.softcap > 0.0f ? 1.0f : kLog2e) / K::kCarry *
                          (c.quant == int(kvcache::QuantKind::per_tensor) ? c.k_scale : 1.0f);
#pragma unroll
        for (int k = 0; k < kD / 16; ++k)
#pragma unroll
          for (int reg = 0; reg < 2; ++reg) q[m][k][reg * 2 + h] = raw[k][reg];
      }
    for (int o = 4; o < 32; o <<= 1) {
      safe_begin = max(safe_begin, __shfl_xor_sync(0xffffffffu, safe_begin, o));
      safe_end = min(safe_end, __shfl_xor_sync(0xffffffffu, safe_end, o));
    }
    const bool extra = s.softcap > 0.0f || s.slopes || l.mask;
    float out[kRowTiles][kD / 8][4] = {};

    for (int key = seg.kv_begin; key < seg.kv_end; key += kTile) {
      copies_wait<kStages - 2>();
      __syncwarp();
      issue();
      const uint8_t* stage = ring + use * stage_bytes;
      use = use + 1 == kStages ? 0 : use + 1;
      const TileScales scales{stage + Size::kTileBytes, scale_bytes, c.group_shift, c.scale_dtype == DType::f16};

      constexpr int kN = kTile / 8;  // columns of 8 keys
      float score[kRowTiles][kN][4] = {};
      if constexpr (K::kGroup) {
        // Groups of 32 and more scale the sums, which is exact; smaller ones were scaled as they were widened.
        const bool sums = c.group_shift >= 5;
#pragma unroll
        for (int half = 0; half < kN / 2; ++half) {
          float part[kRowTiles][2][4] = {};
#pragma unroll
          for (int kk = 0; kk < kD / 32; ++kk) {
            uint32_t b[2][2][2];
            K::template keys<kD>(stage, half * 16, lane, kk, scales, b);
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
              for (int n = 0; n < 2; ++n) {
                T::mma(part[m][n], q[m][kk * 2], b[n][0][0], b[n][0][1]);
                T::mma(part[m][n], q[m][kk * 2 + 1], b[n][1][0], b[n][1][1]);
              }
            if (sums ? (((kk + 1) * 32) & ((1 << c.group_shift) - 1)) == 0 : kk + 1 == kD / 32) {
#pragma unroll
              for (int n = 0; n < 2; ++n) {
                const int row = half * 16 + n * 8 + tid * 2;
                const float even = sums ? scales.get(row, kk * 32) : 1.0f;
                const float odd = sums ? scales.get(row + 1, kk * 32) : 1.0f;
#pragma unroll
                for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
                  for (int e = 0; e < 4; ++e) {
                    score[m][half * 2 + n][e] += part[m][n][e] * (e % 2 ? odd : even);
                    part[m][n][e] = 0.0f;
                  }
              }
            }
          }
        }
      } else {
        float other[kRowTiles][kN][4] = {};  // two chains of additions instead of one twice as long
#pragma unroll
        for (int kk = 0; kk < kD / 32; ++kk)
#pragma unroll
          for (int half = 0; half < kN / 2; ++half) {
            uint32_t b[2][2][2];
            K::template keys<kD>(stage, half * 16, lane, kk, scales, b);
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
              for (int n = 0; n < 2; ++n) {
                T::mma(score[m][half * 2 + n], q[m][kk * 2], b[n][0][0], b[n][0][1]);
                T::mma(other[m][half * 2 + n], q[m][kk * 2 + 1], b[n][1][0], b[n][1][1]);
              }
          }
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
          for (int n = 0; n < kN; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) score[m][n][e] += other[m][n][e];
      }
      const bool whole = key >= safe_begin && key + kTile <= min(safe_end, seg.kv_end);
      bool grew = false;
      float shrink[kRowTiles][2];
      uint32_t p[kRowTiles][kN / 2][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float x[kN * 2];
#pragma unroll
          for (int e = 0; e < kN * 2; ++e) x[e] = score[m][e / 2][h * 2 + e % 2] * row_scale[m][h];
          if (extra) {
            for (int e = 0; e < kN * 2; ++e) {
              const int j = key + (e / 2) * 8 + tid * 2 + e % 2;
              float y = x[e];
              if (s.softcap > 0.0f) y = s.softcap * tanhf(y / s.softcap) * kLog2e;
              y += row_slope[m][h] * float(j - row_own[m][h]);
              if (l.mask && j < seg.kv_end) y += load_float(l.mask, s.work, row_mask[m][h] + j) * kLog2e;
              x[e] = y;
            }
          }
          if (!whole) {
#pragma unroll
            for (int e = 0; e < kN * 2; ++e) {
              const int j = key + (e / 2) * 8 + tid * 2 + e % 2;
              const bool seen = j < min(row_end[m][h], seg.kv_end) && (j >= row_begin[m][h] || j < s.sinks);
              if (!seen) x[e] = -INFINITY;
            }
          }
          float most = x[0];
#pragma unroll
          for (int e = 1; e < kN * 2; ++e) most = fmaxf(most, x[e]);
          most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
          most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
          const float next = fmaxf(top[m][h], most), base = (next == -INFINITY ? 0.0f : next) - kShift;
          grew |= next > top[m][h];
          shrink[m][h] = exp2_fast(top[m][h] - kShift - base);
          top[m][h] = next;
          float more = 0.0f;
#pragma unroll
          for (int e = 0; e < kN * 2; ++e) {
            x[e] = exp2_fast(x[e] - base);
            more += x[e];
          }
          sum[m][h] = sum[m][h] * shrink[m][h] + more;
#pragma unroll
          for (int k = 0; k < kN / 2; ++k) {
            p[m][k][h] = T::pack(x[k * 4], x[k * 4 + 1]);
            p[m][k][2 + h] = T::pack(x[k * 4 + 2], x[k * 4 + 3]);
          }
        }
      if (__any_sync(0xffffffffu, grew)) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
          for (int n = 0; n < kD / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) out[m][n][e] *= shrink[m][e / 2];
      }
      constexpr int kStep = kD == 96 ? 4 : 8;
#pragma unroll
      for (int n = 0; n < kD / 8; n += kStep)
#pragma unroll
        for (int k = 0; k < kN / 2; ++k) {
          uint32_t b[kStep][2];
          K::template values<kD, kStep>(stage + kTile * kRow, k * 16, lane, n, scales, b);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
            for (int i = 0; i < kStep; ++i) T::mma(out[m][n + i], p[m][k], b[i][0], b[i][1]);
        }
    }

    // ---- the run's result leaves, to the output or as a part to be merged ----
    const float value_scale = (c.quant == int(kvcache::QuantKind::per_tensor) ? c.v_scale : 1.0f) / K::kCarry;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float total = sum[m][h];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        const int r = m * 16 + h * 8 + g;
        if (r >= seg.row_count) continue;
        const int flat = seg.row_begin + r, query = flat / s.group, head = kv_head * s.group + flat % s.group;
        const bool masked = !(total > 0.0f);
        const float base = top[m][h] - kShift;  // log2 of what `total` is counted in
        const bool partial = seg.slot >= 0;
        const int64_t row = int64_t(partial ? seg.slot + query : v.rows[seg.tokens + query].token) * s.heads + head;
        if (!partial && l.sink_logits && !masked) total += exp2f(l.sink_logits[head] * kLog2e - base);
        const float f = masked ? 0.0f : value_scale / total * (partial ? 1.0f : s.out_inv_scale);
        void* to = partial ? static_cast<void*>(l.partial) : l.out;
        const DType type = partial ? DType::f32 : s.out;
        if constexpr (K::kBits == 16) {
#pragma unroll
          for (int n = 0; n < kD / 8; ++n)
            store_run<2>(to, type, row * kD + n * 8 + tid * 2, {out[m][n][h * 2] * f, out[m][n][h * 2 + 1] * f});
        } else {
#pragma unroll
          for (int e = 0; e < 2; ++e)
#pragma unroll
            for (int n = 0; n < kD / 8; n += 4)
              store_run<4>(to, type, row * kD + K::template value_dim<kD>(n, tid * 2 + e),
                           {out[m][n][h * 2 + e] * f, out[m][n + 1][h * 2 + e] * f, out[m][n + 2][h * 2 + e] * f,
                            out[m][n + 3][h * 2 + e] * f});
        }
        float* lse = partial ? l.partial_lse : l.lse;
        if (lse && tid == 0) lse[row] = masked ? -INFINITY : base * kLn2 + logf(total);
      }
  }
}

template <class K, int kD, int kRowTiles>
int stream_prepare(int scale_bytes) {
  const int bytes = StreamSize<K, kD, kRowTiles>::bytes(scale_bytes);
  auto* kernel = stream_kernel<K, kD, kRowTiles>;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) != cudaSuccess) {
    cudaGetLastError();  // too much for this device: the plain kernel does it
    return 0;
  }
  int blocks = 0;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kStreamWarps * 32, bytes);
  return blocks;
}

template <class K, int kD, int kRowTiles>
void stream_run(const Shape& s, const StepView& v, const Layer& l, const StreamList& list, int scale_bytes,
                cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((list.count * s.kv_heads + kStreamWarps - 1) / kStreamWarps);
  config.blockDim = dim3(kStreamWarps * 32);
  config.dynamicSmemBytes = StreamSize<K, kD, kRowTiles>::bytes(scale_bytes);
  config.stream = stream;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, stream_kernel<K, kD, kRowTiles>, s, v, l, list, scale_bytes);
}

// One of these per kind of cache, each compiled in its own file.
struct StreamEntry {
  int (*prepare)(int scale_bytes) = nullptr;
  void (*run)(const Shape&, const StepView&, const Layer&, const StreamList&, int, cudaStream_t) = nullptr;
};
template <class K, int kD, int kRowTiles>
constexpr StreamEntry stream_entry() {
  return {stream_prepare<K, kD, kRowTiles>, stream_run<K, kD, kRowTiles>};
}
template <class K>
StreamEntry stream_entries(int head_dim, int row_tiles) {
#ifdef KVASIR_CUDA_FEW  // to see that it compiles
  return head_dim == 128 && row_tiles == 1 ? stream_entry<K, 128, 1>() : StreamEntry{};
#else
  switch (head_dim * 4 + row_tiles) {
    case 64 * 4 + 1: return stream_entry<K, 64, 1>();
    case 64 * 4 + 2: return stream_entry<K, 64, 2>();
    case 96 * 4 + 1:
      if constexpr (K::kBits > 4) return stream_entry<K, 96, 1>();
      return {};
    case 96 * 4 + 2:
      if constexpr (K::kBits > 4) return stream_entry<K, 96, 2>();
      return {};
    case 128 * 4 + 1: return stream_entry<K, 128, 1>();
    case 128 * 4 + 2: return stream_entry<K, 128, 2>();
    case 256 * 4 + 1: return stream_entry<K, 256, 1>();
    default: return {};
  }
#endif
}

StreamEntry stream_bf16(int head_dim, int row_tiles);
StreamEntry stream_f16(int head_dim, int row_tiles);
StreamEntry stream_f8(int head_dim, int row_tiles);
StreamEntry stream_i8(int head_dim, int row_tiles);
StreamEntry stream_i8_group(int head_dim, int row_tiles);
StreamEntry stream_i4(int head_dim, int row_tiles);

}  // namespace kvasir::attention::cuda
