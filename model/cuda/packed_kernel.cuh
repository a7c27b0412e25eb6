// Products by packed weights of a few rows: launch_few<PACKING>, instantiated by a file for each packing.
//
// As streamed.cu: a block stays on its multiprocessor and takes tile after tile of features, eight warps have the k
// elements of one between them, each with a ring of stages that the copy engine fills. Integers are multiplied as they
// are, a group of elements at a time: d * (sum of q * x) + m * (sum of x).
//
// Where the input fits, it stays in shared memory for all tiles, with its sums by group, and two sets of eight warps
// each have tiles of their own; else each stage brings the rows that its weights meet, and the matrix unit adds x up.
#pragma once

#include <algorithm>

#include "attention/cuda/bulk.cuh"
#include "attention/cuda/launch_early.cuh"
#include "attention/cuda/mma.cuh"
#include "attention/cuda/shared_memory.h"
#include "model/cuda/early.cuh"
#include "model/cuda/packed.h"
#include "model/cuda/packed_words.cuh"
#include "model/cuda/tile_end.cuh"

namespace kvasir::model::cuda {
namespace {

using attention::cuda::Brain;

constexpr int kWarps = 8, kShared = 227 << 10;
constexpr uint32_t kOnes = 0x3f803f80u;  // a pair of 1

template <Packing kPacking, int kWide, int kTall, bool kHeld>
struct Shape {
  static constexpr int kSets = kHeld ? 2 : 1, kThreads = kSets * kWarps * 32;
  static constexpr int kTile = 2 * block_bytes(kPacking);  // sixteen features
  // Rows are padded so that those which lanes read at once lie in different banks.
  static constexpr int kPad = kPacking == Packing::q6 ? 32 : 64, kRow = kBlockElements * 2 + kPad;
  static constexpr int kWeights = kTall * kTile, kStage = kWeights + (kHeld ? 0 : kWide * 8 * kRow);
  static constexpr int kSums = kWarps * kWide * 8 * kTall * 16;  // floats of a set; so many of these in turn:
  static constexpr int kTurns = kWide * kTall > (kHeld ? 1 : 2) ? 1 : 2;
  static constexpr int kSumBytes = kSets * kTurns * kSums * 4;
  static constexpr int kGroup = group_elements(kPacking);
  static constexpr int kMostStages = 8;

  // Of an input that is held: a row of it, and the sums by group of all.
  __host__ __device__ static constexpr int row_bytes(int k) {
    return (k + kBlockElements - 1) / kBlockElements * kBlockElements * 2 + kPad;
  }
  __host__ __device__ static constexpr int total_bytes(int k) {
    return !has_offset(kPacking) ? 0
                                 : (k + kBlockElements - 1) / kBlockElements * (kBlockElements / kGroup) * kWide * 32;
  }
  __host__ __device__ static constexpr int held_bytes(int rows, int k) {
    return kHeld ? rows * row_bytes(k) + total_bytes(k) : 0;
  }
  __host__ __device__ static constexpr int stages(int rows, int k) {
    const int fit = (kShared - 2048 - kSumBytes - held_bytes(rows, k)) / (kSets * kWarps * kStage);
    return fit > kMostStages ? kMostStages : fit;
  }
};

constexpr uint32_t kMagic = 0x43004300u;  // twice 128

__device__ uint32_t pair_add(uint32_t a, uint32_t b) {
  const __nv_bfloat162 y =
      __hadd2(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(y);
}

// sum += scale * part + offset * total, of rows g (low) and g + 8 (high) of the weights.
template <int kWide>
__device__ void add_scaled(float (&sum)[kWide][4], const float (&part)[kWide][4], const float (&total)[kWide][4],
                           float2 low, float2 high) {
#pragma unroll
  for (int w = 0; w < kWide; ++w)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 s = i < 2 ? low : high;
      sum[w][i] = fmaf(s.x, part[w][i], fmaf(s.y, total[w][i], sum[w][i]));
    }
}

// What stands for 128 + q: d and m of q become those of it.
__device__ float2 shifted(uint32_t halves) {
  float2 s = pair_of(halves);
  s.y = fmaf(-128.0f, s.x, s.y);
  return s;
}

// A stage's products. `in` is where row g's elements of it lie, rows `stride` bytes apart; `totals` the sums of x by
// group, of row 2 * tid, where they are there (kTotals).
template <Packing kPacking, int kWide, int kTall, bool kTotals>
__device__ void multiply(const uint8_t* weights, const uint8_t* in, int stride, const float* totals,
                         float (&sum)[kTall][kWide][4]) {
  constexpr int kBlock = block_bytes(kPacking), kScales = kBlockRows * quant_bytes(kPacking);
  const int lane = threadIdx.x % 32, g = lane / 4, tid = lane % 4;
  [[maybe_unused]] const uint32_t m = in_register(kMagic);
  auto block = [&](int t, int half) { return weights + (t * 2 + half) * kBlock; };
  // Of a group, of two rows of the input: by the matrix unit where nobody has them.
  [[maybe_unused]] auto total_of = [&](int group, int w, uint32_t x0, uint32_t x1, float(&total)[4]) {
    if constexpr (kTotals) {
      const float2 t = *reinterpret_cast<const float2*>(totals + (group * kWide + w) * 8);
      total[0] = total[2] = t.x, total[1] = total[3] = t.y;
    } else {
      const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
      Brain::mma(total, ones, x0, x1);
    }
  };
  if constexpr (kPacking == Packing::q4_128) {
    // Where few warps are there, sums of their own by turns: a product that waits for the one before it would leave the
    // matrix unit idle.
    constexpr int kApart = kTotals ? 1 : kTall * kWide >= 4 ? 2 : 4;
    uint4 q[kTall][2];
    float part[kApart][kTall][kWide][4] = {}, total[2][kWide][4] = {};
#pragma unroll
    for (int t = 0; t < kTall; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h) q[t][h] = at16(block(t, h) + lane * 16);
    if constexpr (kTotals)
#pragma unroll
      for (int w = 0; w < kWide; ++w) total_of(0, w, 0, 0, total[0][w]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint4 x[kWide];
#pragma unroll
      for (int w = 0; w < kWide; ++w) {
        x[w] = at16(in + w * 8 * stride + j * 64 + tid * 16);
        if (!kTotals) total_of(0, w, x[w].x, x[w].y, total[0][w]), total_of(0, w, x[w].z, x[w].w, total[1][w]);
      }
#pragma unroll
      for (int t = 0; t < kTall; ++t) {
        const uint32_t low = word_of(q[t][0], j), high = word_of(q[t][1], j);
        const uint32_t first[4] = {low_nibbles(low, 0, m), low_nibbles(high, 0, m), low_nibbles(low, 4, m),
                                   low_nibbles(high, 4, m)};
        const uint32_t second[4] = {low_nibbles(low, 8, m), low_nibbles(high, 8, m), low_nibbles(low, 12, m),
                                    low_nibbles(high, 12, m)};
#pragma unroll
        for (int w = 0; w < kWide; ++w) {
          Brain::mma(part[2 * j % kApart][t][w], first, x[w].x, x[w].y);
          Brain::mma(part[(2 * j + 1) % kApart][t][w], second, x[w].z, x[w].w);
        }
      }
    }
#pragma unroll
    for (int w = 0; w < kWide; ++w)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total[0][w][i] += total[1][w][i];
#pragma unroll
        for (int t = 0; t < kTall; ++t)
#pragma unroll
          for (int a = 1; a < kApart; ++a) part[0][t][w][i] += part[a][t][w][i];
      }
#pragma unroll
    for (int t = 0; t < kTall; ++t) {
      auto scale = [&](int h) { return shifted(*reinterpret_cast<const uint32_t*>(block(t, h) + kScales + g * 4)); };
      add_scaled(sum[t], part[0][t], total[0], scale(0), scale(1));
    }
  } else if constexpr (kPacking == Packing::q4) {
    uint4 q[kTall][2], s[kTall][2];
#pragma unroll
    for (int t = 0; t < kTall; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        q[t][h] = at16(block(t, h) + lane * 16);
        s[t][h] = at16(block(t, h) + kScales + g * 16);
      }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint4 x[kWide];
      float total[kWide][4] = {};
#pragma unroll
      for (int w = 0; w < kWide; ++w) {
        x[w] = at16(in + w * 8 * stride + j * 64 + tid * 16);
        total_of(j, w, x[w].x, x[w].y, total[w]);
        if (!kTotals) total_of(j, w, x[w].z, x[w].w, total[w]);
      }
#pragma unroll
      for (int t = 0; t < kTall; ++t) {
        const uint32_t low = word_of(q[t][0], j), high = word_of(q[t][1], j);
        const uint32_t first[4] = {low_nibbles(low, 0, m), low_nibbles(high, 0, m), low_nibbles(low, 4, m),
                                   low_nibbles(high, 4, m)};
        const uint32_t second[4] = {low_nibbles(low, 8, m), low_nibbles(high, 8, m), low_nibbles(low, 12, m),
                                    low_nibbles(high, 12, m)};
        float part[kWide][4] = {};
#pragma unroll
        for (int w = 0; w < kWide; ++w) {
          Brain::mma(part[w], first, x[w].x, x[w].y);
          Brain::mma(part[w], second, x[w].z, x[w].w);
        }
        add_scaled(sum[t], part, total, shifted(word_of(s[t][0], j)), shifted(word_of(s[t][1], j)));
      }
    }
  } else if constexpr (kPacking == Packing::q6) {
#pragma unroll
    for (int jj = 0; jj < 4; ++jj) {  // two groups of 16
      uint2 x[kWide][2];
      float total[2][kWide][4] = {};
#pragma unroll
      for (int w = 0; w < kWide; ++w)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          x[w][h] = at8(in + w * 8 * stride + (jj * 2 + h) * 32 + tid * 8);
          total_of(jj * 2 + h, w, x[w][h].x, x[w][h].y, total[h][w]);
        }
#pragma unroll
      for (int t = 0; t < kTall; ++t) {
        uint32_t a[2][4];  // pairs of rows g and g + 8
        uint2 s[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint8_t* b = block(t, h);
          const uint32_t q = *reinterpret_cast<const uint32_t*>(b + lane * 16 + jj * 4);
          const uint32_t bits = *reinterpret_cast<const uint32_t*>(b + kBlockRows * 64 + lane * 8 + jj / 2 * 4);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int from = jj % 2 * 8 + i * 2;  // to bits 4 and 20
            a[h][i] = low_nibbles(q, 4 * i, m) | ((from < 4 ? bits << (4 - from) : bits >> (from - 4)) & 0x00300030u);
          }
          s[h] = at8(b + kScales + g * 32 + jj * 8);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t pairs[4] = {a[0][2 * h], a[1][2 * h], a[0][2 * h + 1], a[1][2 * h + 1]};
          float part[kWide][4] = {};
#pragma unroll
          for (int w = 0; w < kWide; ++w) Brain::mma(part[w], pairs, x[w][h].x, x[w][h].y);
          add_scaled(sum[t], part, total[h], shifted(h ? s[0].y : s[0].x), shifted(h ? s[1].y : s[1].x));
        }
      }
    }
  } else if constexpr (kPacking == Packing::e4m3) {
    float part[2][kTall][kWide][4] = {};  // of each half of the elements: a product does not wait for the one before it
#pragma unroll
    for (int plane = 0; plane < 2; ++plane)
#pragma unroll
      for (int t = 0; t < kTall; ++t) {
        uint4 q[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) q[h] = at16(block(t, h) + plane * kBlockRows * 64 + lane * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t a[4];
          widen_bytes(word_of(q[0], i), a[0], a[2]);
          widen_bytes(word_of(q[1], i), a[1], a[3]);
#pragma unroll
          for (int w = 0; w < kWide; ++w) {
            const uint2 x = at8(in + w * 8 * stride + (plane * 2 + i / 2) * 64 + tid * 16 + i % 2 * 8);
            Brain::mma(part[plane][t][w], a, x.x, x.y);
          }
        }
      }
#pragma unroll
    for (int t = 0; t < kTall; ++t) {
      const float d[2] = {*reinterpret_cast<const float*>(block(t, 0) + kScales + g * 4),
                          *reinterpret_cast<const float*>(block(t, 1) + kScales + g * 4)};
#pragma unroll
      for (int w = 0; w < kWide; ++w)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[t][w][i] = fmaf(d[i / 2], part[0][t][w][i] + part[1][t][w][i], sum[t][w][i]);
    }
  } else {
#pragma unroll
    for (int plane = 0; plane < 2; ++plane) {
#pragma unroll
      for (int t = 0; t < kTall; ++t) {
        uint4 q[2];
        float2 s[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          q[h] = at16(block(t, h) + plane * kBlockRows * 64 + lane * 16);
          s[h] = pair_of(*reinterpret_cast<const uint32_t*>(block(t, h) + kScales + g * 8 + plane * 4));
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          // Signed: the low bits with 128, less 128 or twice that.
          auto widened = [&](uint32_t four, bool upper) {
            const uint32_t two = __byte_perm(four, 0, upper ? 0x4342 : 0x4140);
            uint32_t low_bits, less;
            asm("lop3.b32 %0, %1, 0x007f007f, %2, 0xea;" : "=r"(low_bits) : "r"(two), "r"(m));
            asm("lop3.b32 %0, %1, 0x00800080, %2, 0x6a;" : "=r"(less) : "r"(two), "r"(m ^ 0x80808080u));
            return pair_add(low_bits, less);
          };
          const uint32_t low[2] = {j ? q[0].z : q[0].x, j ? q[0].w : q[0].y},
                         high[2] = {j ? q[1].z : q[1].x, j ? q[1].w : q[1].y};
          float part[kWide][4] = {};
          uint4 x[kWide];
#pragma unroll
          for (int w = 0; w < kWide; ++w) x[w] = at16(in + w * 8 * stride + (plane * 2 + j) * 64 + tid * 16);
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const uint32_t a[4] = {widened(low[e], false), widened(high[e], false), widened(low[e], true),
                                   widened(high[e], true)};
#pragma unroll
            for (int w = 0; w < kWide; ++w) Brain::mma(part[w], a, e ? x[w].z : x[w].x, e ? x[w].w : x[w].y);
          }
          const float d[2] = {j ? s[0].y : s[0].x, j ? s[1].y : s[1].x};
#pragma unroll
          for (int w = 0; w < kWide; ++w)
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[t][w][i] = fmaf(d[i / 2], part[w][i], sum[t][w][i]);
        }
      }
    }
  }
}

// The input into shared memory, and its sums by group: [group][row of kWide * 8].
template <class S, int kWide>
__device__ void hold(const __nv_bfloat16* in, int rows, int k, uint8_t* held, float* totals, uint64_t* ready) {
  using namespace attention::cuda;
  const int stride = S::row_bytes(k), ends = k % kBlockElements;
  if (threadIdx.x == 0) {
    barrier_expect(ready, rows * k * 2);
    for (int r = 0; r < rows; ++r) load_bulk(held + r * stride, in + int64_t(r) * k, k * 2, ready);
  }
  if (ends != 0)  // zeros past the end, sixteen bytes at a time
    for (int i = threadIdx.x; i < rows * (kBlockElements - ends) / 8; i += S::kThreads) {
      const int each = (kBlockElements - ends) / 8;
      *reinterpret_cast<uint4*>(held + i / each * stride + k * 2 + i % each * 16) = uint4{};
    }
  barrier_wait(ready, 0);
  if (totals) {
    __syncthreads();
    const int groups = (k + kBlockElements - 1) / kBlockElements * (kBlockElements / S::kGroup);
    for (int i = threadIdx.x; i < groups * rows; i += S::kThreads) {
      const int group = i % groups, row = i / groups;
      const uint8_t* at = held + row * stride + group * S::kGroup * 2;
      float sum = 0;
#pragma unroll
      for (int e = 0; e < S::kGroup / 8; ++e) {
        const uint4 v = at16(at + e * 16);
        for (uint32_t two : {v.x, v.y, v.z, v.w}) {
          const float2 f = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(two));
          sum += f.x + f.y;
        }
      }
      totals[group * kWide * 8 + row] = sum;
    }
  }
  __syncthreads();
}

// What a warp does to a barrier, by its address in shared memory.
__device__ void expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ void load_once(uint32_t to, const void* from, int bytes, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;\n" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
// When this lane's copies so far are there.
__device__ void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(barrier) : "memory");
}
__device__ void await(uint32_t barrier, int phase) {
  asm volatile(
      "{\n.reg .pred p;\nagain: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra "
      "again;\ndone:\n}\n" ::"r"(barrier),
      "r"(phase)
      : "memory");
}

template <Packing kPacking, int kWide, int kTall, bool kHeld>
__global__ void __launch_bounds__(Shape<kPacking, kWide, kTall, kHeld>::kThreads, 1)
    packed(const __nv_bfloat16* in, const uint8_t* weight, float unit, void* out, int rows, int64_t n, int k, int tiles,
           int stages, bool gated, Form form) {
#if __CUDA_ARCH__ >= 900
  using S = Shape<kPacking, kWide, kTall, kHeld>;
  using namespace attention::cuda;
  constexpr bool kTotals = kHeld && has_offset(kPacking);
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t arrived[S::kSets * kWarps][S::kMostStages], ready;
  let_next_kernel_start();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, set = warp / kWarps, part = warp % kWarps;
  float* sums = reinterpret_cast<float*>(shared) + set * S::kTurns * S::kSums;
  float* totals = kTotals ? reinterpret_cast<float*>(shared + S::kSumBytes) : nullptr;
  // Rows that are not there are read as well, for sums that nobody wants: what lies behind must be shared memory.
  uint8_t* held = shared + S::kSumBytes + (kHeld ? S::total_bytes(k) : 0);
  uint8_t* ring = shared + S::kSumBytes + S::held_bytes(rows, k) + warp * stages * S::kStage;
  if (lane < stages) barrier_init(&arrived[warp][lane], kHeld ? 1 : 33);  // the weights, and 32 lanes with their copies
  if (threadIdx.x == 0) barrier_init(&ready, 1);
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
  if (kHeld)
    __syncthreads();
  else
    __syncwarp();

  const int steps = (k + kBlockElements - 1) / kBlockElements, mine = (steps - part + kWarps - 1) / kWarps;
  const int first = int(blockIdx.x) * S::kSets + set, every = int(gridDim.x) * S::kSets;
  const uint32_t barriers = shared_address(arrived[warp]), stages_at = shared_address(ring);
  const uint64_t policy = read_once();
  // What is asked for next. Sixteen features' blocks lie one behind another, those of the next features after them.
  int left = first < tiles ? (tiles - first + every - 1) / every * mine : 0, fill = 0, ask_step = part;
  const int64_t apart = int64_t(steps) * S::kTile,
                jump = (int64_t(every) * kTall * steps - int64_t(mine) * kWarps) * S::kTile;
  const uint8_t* next = weight + (int64_t(first) * kTall * steps + part) * S::kTile;
  auto ask_weights = [&] {
    if (lane == 0) {
      expect(barriers + fill * 8, S::kWeights);
#pragma unroll
      for (int t = 0; t < kTall; ++t)
        load_once(stages_at + fill * S::kStage + t * S::kTile, next + t * apart, S::kTile, barriers + fill * 8, policy);
    }
    next += kWarps * S::kTile;
  };
  const int copy_row = lane / 16, copy_chunk = lane % 16;
  auto ask_rows = [&](int stage, int step) {
    if constexpr (!kHeld) {
      const int element = step * kBlockElements + copy_chunk * 8;
      const uint32_t to = stages_at + stage * S::kStage + S::kWeights + copy_row * S::kRow + copy_chunk * 16;
      const __nv_bfloat16* from = in + int64_t(copy_row) * k + element;
#pragma unroll
      for (int r = 0; r < kWide * 8; r += 2)
        if (r + copy_row < rows) copy16(to + r * S::kRow, from + int64_t(r) * k, element < k);
      arrive_after_copies(barriers + stage * 8);
    }
  };
  auto advance = [&] {
    --left;
    fill = fill + 1 == stages ? 0 : fill + 1;
    if ((ask_step += kWarps) < steps) return;
    ask_step = part, next += jump;
  };
  const int begun = min(left, stages - 1);
  for (int i = 0; i < begun; ++i) {
    ask_weights();
    advance();
  }
  wait_for_kernel_ahead();
  if constexpr (kHeld)
    hold<S, kWide>(in, rows, k, held, totals, &ready);
  else
    for (int i = 0; i < begun; ++i) ask_rows(i, part + i % mine * kWarps);

  const int stride = kHeld ? S::row_bytes(k) : S::kRow, row = lane / 4;
  int use = 0, turn = 0, phase = 0;
  for (int tile = first; tile < tiles; tile += every, turn = S::kTurns - 1 - turn) {
    float sum[kTall][kWide][4] = {};
    for (int at = part; at < steps; at += kWarps) {
      __syncwarp();
      if (left > 0) {
        ask_weights();
        ask_rows(fill, ask_step);
        advance();
      }
      await(barriers + use * 8, phase);
      const uint8_t* stage = ring + use * S::kStage;
      const uint8_t* lines = kHeld ? held + at * kBlockElements * 2 : stage + S::kWeights;
      multiply<kPacking, kWide, kTall, kTotals>(
          stage, lines + row * stride, stride,
          totals + (kTotals ? at * (kBlockElements / S::kGroup) * kWide * 8 + lane % 4 * 2 : 0), sum);
      if (++use == stages) use = 0, phase ^= 1;
    }
    float* here = sums + turn * S::kSums;
    put_sums<kWide, kTall>(here, part, sum);
    named_sync(1 + set, kWarps * 32);  // with two turns, the other sums are free once everybody is here again
    const int thread = threadIdx.x % (kWarps * 32);
    auto scale = [&](int64_t) { return unit; };
    if (gated)
      end_tile<kWarps, kWide, kTall, true>(thread, here, out, rows, n, tile, form, scale);
    else
      end_tile<kWarps, kWide, kTall, false>(thread, here, out, rows, n, tile, form, scale);
    if (S::kTurns == 1) named_sync(1 + set, kWarps * 32);
  }
#endif
}

template <Packing kPacking, int kWide, int kTall, bool kHeld>
void run(const void* in, const void* weight, float unit, void* out, int64_t rows, int64_t n, int64_t k, Form form,
         cudaStream_t stream) {
  using S = Shape<kPacking, kWide, kTall, kHeld>;
  auto* kernel = packed<kPacking, kWide, kTall, kHeld>;
  constexpr int kBytes = kShared - 2048;
  static std::atomic<uint64_t> given;
  if (attention::cuda::allow_shared(kernel, kBytes, given) != cudaSuccess) return;
  const bool gated = joins_gates(form);
  const int tiles = int(n / (kTall * (gated ? 8 : 16)));
  const int blocks = std::min((tiles + S::kSets - 1) / S::kSets, device().multiprocessors);
  attention::cuda::launch_early(kernel, dim3(unsigned(blocks)), S::kThreads, kBytes, stream,
                                static_cast<const __nv_bfloat16*>(in), static_cast<const uint8_t*>(weight), unit, out,
                                int(rows), n, int(k), tiles, S::stages(int(rows), int(k)), gated, form);
}

// Whether the input is held: where sixteen rows of it fit, however many there are, so that sums have one order, and
// each set has enough tiles to make up for the wait.
template <Packing kPacking>
bool holds(int64_t tiles, int64_t k) {
  return tiles > 4 * device().multiprocessors && k <= (1 << 15) && Shape<kPacking, 2, 1, true>::stages(16, int(k)) >= 2;
}
template <Packing kPacking>
auto by_shape(int64_t rows, int64_t n, int64_t k, bool gated) {
  const int64_t tiles = n / (gated ? 8 : 16);
  if (holds<kPacking>(tiles, k)) return rows > 8 ? run<kPacking, 2, 1, true> : run<kPacking, 1, 1, true>;
  if (!worth_tall(tiles)) return rows > 8 ? run<kPacking, 2, 1, false> : run<kPacking, 1, 1, false>;
  constexpr int kMost = Shape<kPacking, 2, 2, false>::stages(16, 0) >= 3 ? 2 : 1;
  return rows > 8 ? run<kPacking, 2, kMost, false> : run<kPacking, 1, 2, false>;
}

}  // namespace

template <Packing kPacking>
void launch_few(const void* in, const void* weight, float unit, void* out, int64_t rows, int64_t n, int64_t k,
                Form form, cudaStream_t stream) {
  by_shape<kPacking>(rows, n, k, joins_gates(form))(in, weight, unit, out, rows, n, k, form, stream);
}

}  // namespace kvasir::model::cuda
