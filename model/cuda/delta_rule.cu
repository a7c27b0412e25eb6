// The gated delta rule. A warp has 8 columns of a head's state in its registers, which nobody else needs: it reads them
// once, takes them over all rows of its sequence, and writes them once. Lanes share the sums over a column's rows.
//
// Rows are taken kGroup at a time. With S the state before them, g_i what it fades by in row i, D(j, i) the product of
// g over rows j + 1 to i, and P_i that of all up to i:
//
//   d_i = beta_i (v_i - P_i S'k_i - sum over j < i of D(j, i) (k_i.k_j) d_j)
//   o_i = P_i S'q_i + sum over j <= i of D(j, i) (q_i.k_j) d_j
//   S  <- P S + sum over j of D(j, last) k_j d_j'
//
// so that a group waits for the sums over lanes once. What does not depend on S (Factors) is made for a stage of rows
// at once, by all warps of the block.
#include <algorithm>

#include "attention/cuda/mma.cuh"
#include "model/cuda/delta_rule.h"
#include "model/cuda/early.cuh"
#include "model/cuda/warp_sums.cuh"

namespace kvasir::model::cuda {
namespace {

using attention::cuda::copies_commit;
using attention::cuda::copies_wait;
using attention::cuda::copy16;
using attention::cuda::copy8;
using attention::cuda::shared_address;

constexpr int kWarps = kStateColumns / kColumns;

__device__ float part(const float4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

template <int kGroup>
struct Factors {
  float keys[kGroup][kGroup];                             // [i][j], j < i: beta_i D(j, i) k_i.k_j
  float queries[kGroup][kGroup];                          // [i][j], j <= i: D(j, i) q_i.k_j
  float beta[kGroup], faded_beta[kGroup], faded[kGroup];  // beta_i, beta_i P_i, P_i
  float to_end[kGroup];                                   // D(i, last)
};

template <int kDim, int kRows>
struct StagedRows {
  float q[kRows][kDim], k[kRows][kDim], v[kRows][kStateColumns];
  float2 fades[kRows];  // their logarithms, and beta; where there is no row, zeros
};

// A lane has columns quad * 4 + (x ^ own), x in [0, 4), of its warp's, and of each the rows r * 64 + of_row * 4 + [0,
// 4). As the four are in another order in each of four lanes, sums over these lanes need no choice which half to send.
struct Lane {
  static constexpr int kHigh = 2, kLow = 4;  // lanes whose `own` differs in this bit
  int quad, of_row, own;
  __device__ explicit Lane(int lane)
      : quad(lane & 1), of_row(lane >> 1), own((lane & kHigh ? 2 : 0) | (lane & kLow ? 1 : 0)) {}
};

__device__ float from_lane(float x, int apart) { return __shfl_xor_sync(kAll, x, apart); }

// The sums over lanes of the lane's own column, into x[.][0]. Shuffles stay in the order they are written in: all sums
// take a step together, or each would wait for its own.
template <int kSums>
__device__ void sum_own(float (&x)[kSums][4]) {
#pragma unroll
  for (int n = 0; n < kSums; ++n) {
    x[n][0] += from_lane(x[n][2], Lane::kHigh);
    x[n][1] += from_lane(x[n][3], Lane::kHigh);
  }
#pragma unroll
  for (int n = 0; n < kSums; ++n) x[n][0] += from_lane(x[n][1], Lane::kLow);
#pragma unroll
  for (int apart = 8; apart < 32; apart *= 2)
#pragma unroll
    for (int n = 0; n < kSums; ++n) x[n][0] += from_lane(x[n][0], apart);
}

// Of kSums sums over a warp, a power of two up to 32, lane l has number l * kSums / 32.
template <int kSums>
__device__ float sums_by_lane(float (&x)[kSums], int lane) {
#pragma unroll
  for (int half = kSums / 2, apart = 16; apart > 0; half /= 2, apart /= 2) {
    const bool upper = lane & apart;
    if (half == 0) x[0] += from_lane(x[0], apart);
#pragma unroll
    for (int n = 0; n < half; ++n) {
      const float keep = upper ? x[n + half] : x[n], give = upper ? x[n] : x[n + half];
      x[n] = keep + from_lane(give, apart);
    }
  }
  return x[0];
}

template <int kDim, int kGroup, int kRows>
__global__ void __launch_bounds__(kWarps * 32) delta_rule(const __grid_constant__ DeltaStep s) {
  constexpr int kHeld = kDim / 16, kGroups = kRows / kGroup, kStages = kRows > 1 ? 2 : 1;
  __shared__ StagedRows<kDim, kRows> stages[kStages];
  __shared__ Factors<kGroup> factors[kGroups];
  let_next_kernel_start();
  const LinearShape& c = s.shape;
  const int head = int(blockIdx.x), first_column = int(blockIdx.z) * kStateColumns;
  const int columns = min(kStateColumns, c.value_dim - first_column);
  const int warp = int(threadIdx.x) / 32;
  const Lane lane(int(threadIdx.x) % 32);
  const StateRows of = s.of[blockIdx.y];
  if (of.slot < 0) return;
  const bool mine = warp * kColumns < columns;
  const int64_t column_block = (int64_t(head) * c.value_dim + first_column) / kColumns + warp;
  auto* state = reinterpret_cast<float4*>(s.slots + of.slot * s.slot_stride + (kTaps - 1) * c.channels) +
                column_block * kHeld * 32 + threadIdx.x % 32;
  float held[kHeld][4] = {};
  // Nobody writes a state in a step but this.
  if (mine && !of.fresh)
#pragma unroll
    for (int r = 0; r < kHeld; ++r) {
      const float4 x = state[r * 32];
      held[r][0] = x.x, held[r][1] = x.y, held[r][2] = x.z, held[r][3] = x.w;
    }
  wait_for_previous_kernel();

  const int with = c.value_heads / c.key_heads, key_head = c.tiled ? head % c.key_heads : head / with;
  auto load = [&](int begin, StagedRows<kDim, kRows>& to) {
    for (int i = threadIdx.x; i < kRows * kDim / 4; i += kWarps * 32) {
      const int row = i / (kDim / 4), at = i % (kDim / 4) * 4;
      const bool live = begin + row < of.count && at < c.key_dim;
      const float* q =
          s.mixed + (live ? (of.first + begin + row) * c.channels + int64_t(key_head) * c.key_dim + at : 0);
      copy16(shared_address(&to.q[row][at]), q, live);
      copy16(shared_address(&to.k[row][at]), q + (live ? c.keys : 0), live);
    }
    for (int i = threadIdx.x; i < kRows * kStateColumns / 4; i += kWarps * 32) {
      const int row = i / (kStateColumns / 4), at = i % (kStateColumns / 4) * 4;
      const bool live = begin + row < of.count && at < columns;
      const int64_t from = (of.first + begin + row) * c.channels + 2 * c.keys + int64_t(head) * c.value_dim;
      copy16(shared_address(&to.v[row][at]), s.mixed + (live ? from + first_column + at : 0), live);
    }
    for (int row = threadIdx.x; row < kRows; row += kWarps * 32) {
      const bool live = begin + row < of.count;
      copy8(shared_address(&to.fades[row]),
            s.fades + (live ? (of.first + begin + row) * int64_t(c.value_heads) + head : 0), live);
    }
    copies_commit();
  };
  // A warp has a group.
  auto make_factors = [&](const StagedRows<kDim, kRows>& from) {
    const int lane = int(threadIdx.x) % 32, at = lane * 4;
    for (int g = warp; g < kGroups; g += kWarps) {
      const int first = g * kGroup;
      constexpr int kSquare = kGroup * kGroup;
      float dots[2 * kSquare];  // q_i.k_j, then k_i.k_j
      float4 rows[2][kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const float4 none = {0, 0, 0, 0};
        rows[0][i] = at < kDim ? *reinterpret_cast<const float4*>(&from.q[first + i][at]) : none;
        rows[1][i] = at < kDim ? *reinterpret_cast<const float4*>(&from.k[first + i][at]) : none;
      }
#pragma unroll
      for (int n = 0; n < 2 * kSquare; ++n) {
        const float4 &a = rows[n / kSquare][n / kGroup % kGroup], &b = rows[1][n % kGroup];
        dots[n] = a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
      }
      const float dot = sums_by_lane(dots, lane);
      Factors<kGroup>& to = factors[g];
      auto faded = [&](int begin, int end) {
        float sum = 0;
        for (int m = begin; m < end; ++m) sum += from.fades[first + m].x;
        return expf(sum);
      };
      const int n = lane * 2 * kSquare / 32, i = n / kGroup % kGroup, j = n % kGroup;
      if (lane * 2 * kSquare % 32 == 0 && j <= i) {
        const float d = dot * faded(j + 1, i + 1);
        if (n < kSquare)
          to.queries[i][j] = d;
        else
          to.keys[i][j] = d * from.fades[first + i].y;
      }
      if (lane < kGroup) {
        const float beta = from.fades[first + lane].y, all = faded(0, lane + 1);
        to.beta[lane] = beta, to.faded_beta[lane] = beta * all, to.faded[lane] = all;
        to.to_end[lane] = faded(lane + 1, kGroup);
      }
    }
  };
  auto take_group = [&](int begin, const StagedRows<kDim, kRows>& from, int first, const Factors<kGroup>& f) {
    float sums[2 * kGroup][4] = {};  // of k_i S, then of q_i S
    float4 k[kGroup][kHeld / 4];
    auto four = [&](const float(&x)[kDim], int r) {
      return *reinterpret_cast<const float4*>(&x[r * 64 + lane.of_row * 4]);
    };
#pragma unroll
    for (int r = 0; r < kHeld / 4; ++r)
#pragma unroll
      for (int i = 0; i < kGroup; ++i) k[i][r] = four(from.k[first + i], r);
#pragma unroll
    for (int r = 0; r < kHeld / 4; ++r)
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const float4 q = four(from.q[first + i], r);
#pragma unroll
        for (int y = 0; y < 4; ++y)
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            sums[i][x] = fmaf(part(k[i][r], y), held[r * 4 + y][x], sums[i][x]);
            sums[kGroup + i][x] = fmaf(part(q, y), held[r * 4 + y][x], sums[kGroup + i][x]);
          }
      }
    sum_own(sums);
    const int column = warp * kColumns + lane.quad * 4 + lane.own;
    float change[kGroup], out = 0;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      change[i] = f.beta[i] * from.v[first + i][column] - f.faded_beta[i] * sums[i][0];
#pragma unroll
      for (int j = 0; j < i; ++j) change[i] = fmaf(-f.keys[i][j], change[j], change[i]);
      float o = f.faded[i] * sums[kGroup + i][0];
#pragma unroll
      for (int j = 0; j <= i; ++j) o = fmaf(f.queries[i][j], change[j], o);
      if (i == int(threadIdx.x) % 32 / 8) out = o;
    }
    // Four lanes have the same column: each writes a row.
    const int row = begin + first + int(threadIdx.x) % 32 / 8;
    if (int(threadIdx.x) % 32 / 8 < kGroup && row < of.count)
      s.had[(of.first + row) * c.values + int64_t(head) * c.value_dim + first_column + column] = out;
    float spread[kGroup][4];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      spread[i][0] = f.to_end[i] * change[i];
      spread[i][1] = from_lane(spread[i][0], Lane::kLow);
      spread[i][2] = from_lane(spread[i][0], Lane::kHigh);
      spread[i][3] = from_lane(spread[i][0], Lane::kHigh | Lane::kLow);
    }
    const float all = f.faded[kGroup - 1];
#pragma unroll
    for (int r = 0; r < kHeld / 4; ++r) {
#pragma unroll
      for (int y = 0; y < 4; ++y)
#pragma unroll
        for (int x = 0; x < 4; ++x) held[r * 4 + y][x] *= all;
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
#pragma unroll
        for (int y = 0; y < 4; ++y)
#pragma unroll
          for (int x = 0; x < 4; ++x) held[r * 4 + y][x] = fmaf(part(k[i][r], y), spread[i][x], held[r * 4 + y][x]);
      }
    }
  };

  load(0, stages[0]);
  for (int begin = 0, turn = 0; begin < of.count; begin += kRows, turn ^= kStages - 1) {
    const StagedRows<kDim, kRows>& now = stages[turn];
    if (kStages > 1) {
      load(begin + kRows, stages[turn ^ 1]);  // there may be none: then it is zeros
      copies_wait<1>();
    } else {
      copies_wait<0>();
    }
    __syncthreads();
    make_factors(now);
    __syncthreads();
    if (mine)
      for (int g = 0; g < kGroups && begin + g * kGroup < of.count; ++g) take_group(begin, now, g * kGroup, factors[g]);
    __syncthreads();
  }
  if (mine)
#pragma unroll
    for (int r = 0; r < kHeld; ++r) state[r * 32] = {held[r][0], held[r][1], held[r][2], held[r][3]};
}

template <int kDim>
void launch(const DeltaStep& s, cudaStream_t stream) {
  const LinearShape& c = s.shape;
  const dim3 grid(unsigned(c.value_heads), unsigned(s.sequences),
                  unsigned((c.value_dim + kStateColumns - 1) / kStateColumns));
  launch_early(s.single ? delta_rule<kDim, 1, 1> : delta_rule<kDim, 4, 16>, grid, kWarps * 32, stream, s);
}

}  // namespace

void launch_delta_rule(const DeltaStep& s, cudaStream_t stream) {
  state_rows(s.shape.key_dim) == kFewDim ? launch<kFewDim>(s, stream) : launch<kMostDim>(s, stream);
}

}  // namespace kvasir::model::cuda
