// The gated delta rule of many rows a sequence, 16 at a time, by matrix products. With S the state before them, [keys,
// values], rows of K, Q and V, L_i the logarithm of what S fades by up to row i, and all of D(i, j) = exp(L_i - L_j):
//
//   X = V - exp(L) o K S               what is new of each row, but for what the rows before it change
//   C = (1 + A)^-1 diag(beta) X        A(i, j) = beta_i D(i, j) k_i.k_j below the diagonal
//   O = exp(L) o Q S + N C             N(i, j) = D(i, j) q_i.k_j up to it
//   S <- exp(L_last) S + K' (D(last, .) o C)
//
// Two warps of a block have 16 columns each of a head's state, transposed, in the registers of their sums, where it is
// the next products' first operand as it lies; the other two make the inverse and N of the 16 rows ahead. Rows are
// bfloat16; what is not (the state, X, C, the factors) goes into products as two bfloat16 that add up to it.
#include "attention/cuda/mma.cuh"
#include "model/cuda/delta_rule.h"
#include "model/cuda/delta_state.cuh"
#include "model/cuda/early.cuh"
#include "model/cuda/warp_sums.cuh"

namespace kvasir::model::cuda {
namespace {

using attention::cuda::copies_commit;
using attention::cuda::copies_wait;
using attention::cuda::copy16;
using attention::cuda::copy8;
using attention::cuda::load_matrices;
using attention::cuda::load_matrices_transposed;
using attention::cuda::shared_address;
using Pairs = attention::cuda::Brain;

constexpr int kThreads = 128, kChunk = 16, kStages = 3, kWarpColumns = 16;

// Rows in shared memory end in 16 bytes that nobody reads, so that eight of them begin in different banks.
template <int kDim>
struct alignas(16) ChunkRows {
  uint16_t q[kChunk][kDim + 8], k[kChunk][kDim + 8], v[kChunk][kStateColumns + 8];
  float2 fades[kChunk];  // the logarithm, and beta; where there is no row, zeros
};
struct alignas(16) ChunkFactors {
  uint16_t solved[2][kChunk][kChunk + 8], queries[2][kChunk][kChunk + 8];  // (1 + A)^-1 diag(beta), N: two parts
  float faded[kChunk], to_end[kChunk];                                     // exp(L_i), D(last, i)
};

struct Parts {  // of a first operand, 16 x 16
  uint32_t high[4], low[4];
};

__device__ uint32_t rest_of(float x, float y, uint32_t high) {
  return Pairs::pack(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xffff0000u));
}
// Sums of two neighbouring blocks of 8 columns, as they lie.
__device__ Parts parts_of(const float (&a)[4], const float (&b)[4]) {
  Parts p;
  p.high[0] = Pairs::pack(a[0], a[1]), p.low[0] = rest_of(a[0], a[1], p.high[0]);
  p.high[1] = Pairs::pack(a[2], a[3]), p.low[1] = rest_of(a[2], a[3], p.high[1]);
  p.high[2] = Pairs::pack(b[0], b[1]), p.low[2] = rest_of(b[0], b[1], p.high[2]);
  p.high[3] = Pairs::pack(b[2], b[3]), p.low[3] = rest_of(b[2], b[3], p.high[3]);
  return p;
}

// A lane's part of where four 8 x 8 matrices begin: the first two rows apart, or columns.
__device__ int rows_first(int lane, int stride) { return (lane % 8 + (lane / 8 & 1) * 8) * stride + lane / 16 * 8; }
__device__ int columns_first(int lane, int stride) { return (lane % 8 + lane / 16 * 8) * stride + (lane / 8 & 1) * 8; }

// c += a b' by the parts of both, of two blocks of 8 columns of b'.
__device__ void add_product(float (&c)[2][4], const Parts& a, const uint16_t (&b)[2][kChunk][kChunk + 8], int lane) {
  uint32_t high[4], low[4];
  load_matrices(high, shared_address(&b[0][0][0] + columns_first(lane, kChunk + 8)));
  load_matrices(low, shared_address(&b[1][0][0] + columns_first(lane, kChunk + 8)));
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    Pairs::mma(c[n], a.high, high[2 * n], high[2 * n + 1]);
    Pairs::mma(c[n], a.low, high[2 * n], high[2 * n + 1]);
    Pairs::mma(c[n], a.high, low[2 * n], low[2 * n + 1]);
  }
}

__device__ void put_pair(uint16_t (&to)[2][kChunk][kChunk + 8], int i, int j, float x, float y) {
  const uint32_t high = Pairs::pack(x, y);
  *reinterpret_cast<uint32_t*>(&to[0][i][j]) = high;
  *reinterpret_cast<uint32_t*>(&to[1][i][j]) = rest_of(x, y, high);
}

// By one warp N, and by another the inverse, column by column: what is below the diagonal is solved forwards.
template <int kDim>
__device__ void make_factors(const ChunkRows<kDim>& from, bool inverse, float (&below)[kChunk][kChunk + 4],
                             ChunkFactors& to) {
  const int lane = int(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  float dots[2][4] = {};
  const uint16_t* rows = inverse ? &from.k[0][0] : &from.q[0][0];
#pragma unroll
  for (int k = 0; k < kDim; k += 16) {
    uint32_t a[4], b[4];
    load_matrices(a, shared_address(rows + rows_first(lane, kDim + 8) + k));
    load_matrices(b, shared_address(&from.k[0][0] + columns_first(lane, kDim + 8) + k));
    Pairs::mma(dots[0], a, b[0], b[1]);
    Pairs::mma(dots[1], a, b[2], b[3]);
  }
  float log = lane < kChunk ? from.fades[lane].x : 0.0f;
  const float beta = lane < kChunk ? from.fades[lane].y : 0.0f;
#pragma unroll
  for (int d = 1; d < kChunk; d *= 2) {
    const float before = __shfl_up_sync(kAll, log, d);
    if (lane >= d) log += before;
  }
  const float last = __shfl_sync(kAll, log, kChunk - 1);
  float factor[2][4];
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = g + e / 2 * 8, j = n * 8 + t * 2 + e % 2;
      const float of_i = __shfl_sync(kAll, log, i), of_j = __shfl_sync(kAll, log, j);
      const float by = __shfl_sync(kAll, beta, i);
      const bool there = inverse ? j < i : j <= i;
      factor[n][e] = there ? dots[n][e] * expf(of_i - of_j) * (inverse ? by : 1.0f) : 0.0f;
    }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = g + half * 8, j = n * 8 + t * 2;
      const float x = factor[n][half * 2], y = factor[n][half * 2 + 1];
      if (inverse)
        below[i][j] = x, below[i][j + 1] = y;
      else
        put_pair(to.queries, i, j, x, y);
    }
  if (!inverse) {
    if (lane < kChunk) to.faded[lane] = expf(log), to.to_end[lane] = expf(last - log);
    return;
  }
  __syncwarp();
  float x[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    float a[kChunk];
#pragma unroll
    for (int j = 0; j < i; j += 4) *reinterpret_cast<float4*>(&a[j]) = *reinterpret_cast<const float4*>(&below[i][j]);
    x[i] = i == lane ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < i; ++j) x[i] = fmaf(-a[j], x[j], x[i]);
  }
  __syncwarp();  // before it is written again
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const float of = x[i] * beta, next = __shfl_down_sync(kAll, of, 1);
    if (lane < kChunk && lane % 2 == 0) put_pair(to.solved, i, lane, of, next);
  }
}

template <int kDim>
__global__ void __launch_bounds__(kThreads) delta_chunks(const __grid_constant__ DeltaStep s) {
  __shared__ ChunkRows<kDim> stages[kStages];
  __shared__ ChunkFactors factors[2];
  __shared__ __align__(16) float below[kChunk][kChunk + 4];
  let_next_kernel_start();
  const LinearShape& c = s.shape;
  const int head = int(blockIdx.x), first_column = int(blockIdx.z) * kStateColumns;
  const int columns = min(kStateColumns, c.value_dim - first_column);
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const StateRows of = s.of[s.singles + blockIdx.y];
  const bool takes = warp < 2, mine = takes && warp * kWarpColumns < columns;
  float* state = state_columns<kDim>(s, of.slot, head, first_column + warp * kWarpColumns);
  float held[kDim / 8][4] = {};  // columns g and g + 8, of each the rows 8 b + 2 t and the one after it
  auto each_held = [&](auto f) {
#pragma unroll
    for (int b = 0; b < kDim / 8; ++b)
#pragma unroll
      for (int e = 0; e < 4; ++e) f(held[b][e], state_place<kDim>(g + e / 2 * 8, b * 8 + t * 2 + e % 2));
  };
  // Nobody writes a state in a step but this.
  if (mine && !of.fresh) each_held([&](float& x, int place) { x = state[place]; });
  wait_for_previous_kernel();

  const auto* mixed = static_cast<const uint16_t*>(s.mixed);
  const int64_t keys = key_head_of(c, head) * int64_t(c.key_dim);
  const int64_t values = 2 * c.keys + int64_t(head) * c.value_dim + first_column;
  auto load = [&](int begin, ChunkRows<kDim>& to) {
    constexpr int kPieces = kDim / 8, kValuePieces = kStateColumns / 8;  // of 16 bytes, of a row
    auto copy = [&](int row, int64_t at, bool there, uint16_t* to) {
      const bool live = there && begin + row < of.count;
      copy16(shared_address(to), mixed + (live ? int64_t(of.first + begin + row) * c.channels + at : 0), live);
    };
#pragma unroll
    for (int i = int(threadIdx.x); i < kChunk * kPieces; i += kThreads) {
      const int row = i / kPieces, at = i % kPieces * 8;
      copy(row, keys + at, at < c.key_dim, &to.q[row][at]);
      copy(row, c.keys + keys + at, at < c.key_dim, &to.k[row][at]);
    }
    if (const int row = int(threadIdx.x) / kValuePieces, at = int(threadIdx.x) % kValuePieces * 8; row < kChunk)
      copy(row, values + at, at < columns, &to.v[row][at]);
    if (const int row = int(threadIdx.x) - kThreads + kChunk; row >= 0) {
      const bool live = begin + row < of.count;
      copy8(shared_address(&to.fades[row]),
            s.fades + (live ? int64_t(of.first + begin + row) * c.value_heads + head : 0), live);
    }
    copies_commit();
  };
  auto take = [&](int begin, const ChunkRows<kDim>& rows, const ChunkFactors& f) {
    float by_key[2][2][4] = {}, by_query[2][2][4] = {};  // by part of the state, and 8 rows
#pragma unroll
    for (int b = 0; b < kDim / 8; b += 2) {
      const Parts a = parts_of(held[b], held[b + 1]);
      uint32_t k[4], q[4];
      load_matrices(k, shared_address(&rows.k[0][0] + columns_first(lane, kDim + 8) + b * 8));
      load_matrices(q, shared_address(&rows.q[0][0] + columns_first(lane, kDim + 8) + b * 8));
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        Pairs::mma(by_key[0][n], a.high, k[2 * n], k[2 * n + 1]);
        Pairs::mma(by_query[0][n], a.high, q[2 * n], q[2 * n + 1]);
        Pairs::mma(by_key[1][n], a.low, k[2 * n], k[2 * n + 1]);
        Pairs::mma(by_query[1][n], a.low, q[2 * n], q[2 * n + 1]);
      }
    }
    uint32_t v[4];  // transposed, as sums lie
    load_matrices_transposed(v,
                             shared_address(&rows.v[0][warp * kWarpColumns] + columns_first(lane, kStateColumns + 8)));
    float fresh[2][4], out[2][4], change[2][4] = {};
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t pair = v[2 * n + e / 2];
        const float value = __uint_as_float(e % 2 ? pair & 0xffff0000u : pair << 16);
        const float faded = f.faded[n * 8 + t * 2 + e % 2];
        fresh[n][e] = value - faded * (by_key[0][n][e] + by_key[1][n][e]);
        out[n][e] = faded * (by_query[0][n][e] + by_query[1][n][e]);
      }
    add_product(change, parts_of(fresh[0], fresh[1]), f.solved, lane);
    add_product(out, parts_of(change[0], change[1]), f.queries, lane);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int at = n * 8 + t * 2 + e % 2, row = begin + at;
        if (row < of.count)
          s.had[int64_t(of.first + row) * c.values + int64_t(head) * c.value_dim + first_column + warp * kWarpColumns +
                g + e / 2 * 8] = out[n][e];
        change[n][e] *= f.to_end[at];
      }
    const Parts changes = parts_of(change[0], change[1]);
    const float all = f.faded[kChunk - 1];
#pragma unroll
    for (int b = 0; b < kDim / 8; b += 2) {
      uint32_t k[4];
      load_matrices_transposed(k, shared_address(&rows.k[0][0] + rows_first(lane, kDim + 8) + b * 8));
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (float& x : held[b + n]) x *= all;
        Pairs::mma(held[b + n], changes.high, k[2 * n], k[2 * n + 1]);
        Pairs::mma(held[b + n], changes.low, k[2 * n], k[2 * n + 1]);
      }
    }
  };

  load(0, stages[0]);
  load(kChunk, stages[1]);  // there may be none: then it is zeros, here and below
  copies_wait<1>();
  __syncthreads();
  if (!takes) make_factors<kDim>(stages[0], warp == 2, below, factors[0]);
  for (int begin = 0, stage = 0, turn = 0; begin < of.count; begin += kChunk, turn ^= 1) {
    const int next = stage == kStages - 1 ? 0 : stage + 1, after = next == kStages - 1 ? 0 : next + 1;
    copies_wait<0>();
    __syncthreads();
    load(begin + 2 * kChunk, stages[after]);
    if (mine) take(begin, stages[stage], factors[turn]);
    if (!takes) make_factors<kDim>(stages[next], warp == 2, below, factors[turn ^ 1]);
    stage = next;
  }
  if (mine) each_held([&](float x, int place) { state[place] = x; });
}

}  // namespace

void launch_delta_chunks(const DeltaStep& s, cudaStream_t stream) {
  const LinearShape& c = s.shape;
  const dim3 grid(unsigned(c.value_heads), unsigned(s.sequences - s.singles),
                  unsigned((c.value_dim + kStateColumns - 1) / kStateColumns));
  launch_early(state_rows(c.key_dim) == kFewDim ? delta_chunks<kFewDim> : delta_chunks<kMostDim>, grid, kThreads,
               stream, s);
}

}  // namespace kvasir::model::cuda
