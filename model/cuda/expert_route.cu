// Which rows go to which experts: chosen, brought together by expert, and added up again.
#include <cuda_bf16.h>

#include <algorithm>

#include "attention/cuda/launch_early.cuh"
#include "model/cuda/early.cuh"
#include "model/cuda/expert_tiles.h"
#include "model/cuda/mxfp4.cuh"

namespace kvasir::model::cuda {
namespace {

constexpr int kThreads = 1024, kMostExperts = 1024;
constexpr unsigned kAll = 0xffffffffu;

// Of equal ones the first; NaN is chosen last.
struct Best {
  float value;
  int index;  // below 0: none
  __device__ bool worse_than(const Best& o) const {
    if (o.index < 0 || index < 0) return index < 0 && o.index >= 0;
    const bool nan = isnan(value), other_nan = isnan(o.value);
    if (nan != other_nan) return nan;
    if (!nan && value != o.value) return value < o.value;
    return o.index < index;
  }
};

// The warp's best of [first, first + count) that is not taken.
__device__ Best best_of(const float* values, const bool* taken, int first, int count) {
  Best best{0, -1};
  for (int i = first + int(threadIdx.x % 32); i < first + count; i += 32)
    if (!taken[i])
      if (const Best b{values[i], i}; best.worse_than(b)) best = b;
  for (int s = 16; s > 0; s /= 2) {
    const Best other{__shfl_xor_sync(kAll, best.value, s), __shfl_xor_sync(kAll, best.index, s)};
    if (best.worse_than(other)) best = other;
  }
  return best;
}

__device__ float warp_sum(float v) {
  for (int s = 16; s > 0; s /= 2) v += __shfl_xor_sync(kAll, v, s);
  return v;
}
__device__ float warp_max(float v) {
  for (int s = 16; s > 0; s /= 2) v = fmaxf(v, __shfl_xor_sync(kAll, v, s));
  return v;
}

// A warp's room in shared memory.
struct Scratch {
  float *scores, *choice;
  bool *taken, *kept;
};
__host__ __device__ size_t scratch_bytes(int experts) { return size_t(experts) * (2 * sizeof(float) + 2); }
__device__ Scratch scratch_of(uint8_t* shared, int warp, int experts) {
  const int each = (experts + 3) / 4 * 4;
  auto* at = reinterpret_cast<float*>(shared + size_t(warp) * scratch_bytes(each));
  auto* flags = reinterpret_cast<bool*>(at + 2 * each);
  return {at, at + each, flags, flags + each};
}

// No expert outside the best groups may be chosen.
__device__ void take_worst_groups(const Routing& r, const Scratch& s) {
  const int size = r.experts / r.groups, lane = threadIdx.x % 32;
  for (int g = lane; g < r.groups; g += 32) s.kept[g] = false;
  __syncwarp();
  for (int n = 0; n < r.used_groups; ++n) {
    Best group{0, -1};
    for (int g = 0; g < r.groups; ++g) {
      if (s.kept[g]) continue;
      const Best first = best_of(s.choice, s.taken, g * size, size);
      if (lane == 0) s.taken[first.index] = true;
      __syncwarp();
      const Best second = best_of(s.choice, s.taken, g * size, size);
      __syncwarp();
      if (lane == 0) s.taken[first.index] = false;
      __syncwarp();
      const Best b{first.value + (second.index < 0 ? 0.0f : second.value), g};
      if (group.worse_than(b)) group = b;
    }
    if (lane == 0) s.kept[group.index] = true;
    __syncwarp();
  }
  for (int i = lane; i < r.experts; i += 32) s.taken[i] = !s.kept[i / size];
  __syncwarp();
}

// As Routing::choose(), by a warp.
__device__ void choose(const Routing& r, const float* logits, const float* correction, const Scratch& s,
                       int32_t* chosen, float* weights) {
  const int lane = threadIdx.x % 32;
  float greatest = -INFINITY, sum = 0;
  for (int i = lane; i < r.experts; i += 32) greatest = fmaxf(greatest, logits[i]);
  greatest = warp_max(greatest);
  for (int i = lane; i < r.experts; i += 32) {
    const float l = logits[i];
    s.scores[i] = r.scores_of == ExpertScores::sigmoid ? 1 / (1 + expf(-l)) : expf(l - greatest);
    sum += s.scores[i];
    s.taken[i] = false;
  }
  sum = warp_sum(sum);
  for (int i = lane; i < r.experts; i += 32) {
    if (r.scores_of == ExpertScores::softmax) s.scores[i] /= sum;
    // Logits are in the order of their scores, and do not become equal where those are too small.
    s.choice[i] = correction ? s.scores[i] + correction[i] : logits[i];
  }
  __syncwarp();
  if (r.groups > 1) take_worst_groups(r, s);
  sum = 0;
  for (int k = 0; k < r.used; ++k) {
    const Best b = best_of(s.choice, s.taken, 0, r.experts);
    sum += s.scores[b.index];
    if (lane == 0) s.taken[b.index] = true, chosen[k] = b.index, weights[k] = s.scores[b.index];
    __syncwarp();
  }
  const float factor = r.normalized || r.scores_of == ExpertScores::of_chosen ? r.scale / sum : r.scale;
  for (int k = lane; k < r.used; k += 32) weights[k] *= factor;
}

__device__ void choose_row(const Routing& r, const float* logits, const float* correction, const Routed& out, int row,
                           int rows) {
  extern __shared__ __align__(16) uint8_t shared[];
  if (row >= rows) return;
  choose(r, logits + int64_t(row) * r.experts, correction, scratch_of(shared, int(threadIdx.x / 32), r.experts),
         out.chosen + int64_t(row) * r.used, out.weights + int64_t(row) * r.used);
}

// Of few slots, by one block: those of an expert fill an item of kItemRows, whose slots are its own, whether it has as
// many or not.
__device__ void group_few(const Routed& out, int used, int slots) {
  __shared__ int32_t experts[kThreads], item_of[kThreads];
  const int i = int(threadIdx.x);
  if (i < slots) experts[i] = out.own_expert(out.chosen[i]);
  __syncthreads();
  const bool here = i < slots && experts[i] >= 0;
  int rank = 0, leader = i, count = 0;
  if (here)
    for (int j = 0; j < slots; ++j)
      if (experts[j] == experts[i]) {
        ++count;
        if (j < i) ++rank, leader = min(leader, j);
      }
  // Items are numbered as their leaders come.
  const bool leads = here && leader == i;
  const unsigned leaders = __ballot_sync(kAll, leads);
  __shared__ int32_t before[kThreads / 32];
  if (i % 32 == 0) before[i / 32] = __popc(leaders);
  __syncthreads();
  int item = __popc(leaders & ((1u << i % 32) - 1));
  for (int w = 0; w < i / 32; ++w) item += before[w];
  if (leads) item_of[i] = item;
  if (i == int(blockDim.x) - 1) *out.count = item + leads;
  __syncthreads();
  if (i < slots && !here) out.slot_of[i] = -1;
  if (!here) return;
  item = item_of[leader];
  Item& to = out.items[item];
  if (leads) to.expert = experts[i], to.first = item * kItemRows, to.count = count;
  to.rows[rank] = i / used;
  out.slot_of[i] = item * kItemRows + rank;
}

__global__ void __launch_bounds__(kThreads)
    route_few(Routing r, const float* logits, const float* correction, Routed out, int rows) {
  let_next_kernel_start();
  wait_for_kernel_ahead();
  choose_row(r, logits, correction, out, int(threadIdx.x / 32), rows);
  __syncthreads();
  group_few(out, r.used, rows * r.used);
}

constexpr int kRowsABlock = 4;
__global__ void __launch_bounds__(kRowsABlock * 32)
    choose_rows(Routing r, const float* logits, const float* correction, Routed out, int rows) {
  let_next_kernel_start();
  wait_for_kernel_ahead();
  const int row = int(blockIdx.x) * kRowsABlock + int(threadIdx.x / 32);
  choose_row(r, logits, correction, out, row, rows);
  __syncwarp();
  for (int k = int(threadIdx.x % 32); row < rows && k < r.used; k += 32) {
    const int expert = out.own_expert(out.chosen[int64_t(row) * r.used + k]);
    if (expert >= 0) atomicAdd(&out.counts[expert], 1);
  }
}

// The experts' first slots and items, of their counts, by one block; the counts are 0 again for the next layer.
__global__ void __launch_bounds__(kThreads) cut_items(Routed out, int experts, int item_rows) {
  __shared__ int32_t firsts[kMostExperts], items[kMostExperts];
  let_next_kernel_start();
  wait_for_kernel_ahead();
  const int e = int(threadIdx.x);
  const int own = e < experts ? out.counts[e] : 0, own_items = (own + item_rows - 1) / item_rows;
  firsts[e] = own, items[e] = own_items;
  __syncthreads();
  for (int s = 1; s < experts; s *= 2) {  // sums of all up to e
    const int first = e >= s ? firsts[e - s] : 0, item = e >= s ? items[e - s] : 0;
    __syncthreads();
    firsts[e] += first, items[e] += item;
    __syncthreads();
  }
  if (e >= experts) return;
  const int first = firsts[e] - own, item = items[e] - own_items;
  if (e == experts - 1) *out.count = items[e];
  out.counts[e] = 0, out.next[e] = out.first_slots[e] = first, out.first_items[e] = item;
  for (int j = 0; j < own_items; ++j) {
    Item& to = out.items[item + j];
    to.expert = e, to.first = first + j * item_rows, to.count = min(item_rows, own - j * item_rows);
    to.unused = 0;
  }
}

// In which order an expert's rows lie does not change what they become.
__global__ void place_slots(Routed out, int used, int64_t slots, int item_rows) {
  let_next_kernel_start();
  wait_for_kernel_ahead();
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= slots) return;
  const int expert = out.own_expert(out.chosen[i]), row = int(i / used);
  if (expert < 0) {
    out.slot_of[i] = -1;
    return;
  }
  const int slot = atomicAdd(&out.next[expert], 1);
  out.slot_of[i] = slot, out.slot_rows[slot] = row;
  if (item_rows > kItemRows) return;
  const int at = slot - out.first_slots[expert];
  out.items[out.first_items[expert] + at / item_rows].rows[at % item_rows] = row;
}

template <bool kApart>
__global__ void combine(const float* in, Routed routed, int used, void* out, int64_t cols) {
  let_next_kernel_start();
  wait_for_kernel_ahead();
  const int64_t row = blockIdx.y, col = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
  if (col >= cols) return;
  float4 sum = kApart ? float4{0, 0, 0, 0} : *reinterpret_cast<float4*>(static_cast<float*>(out) + row * cols + col);
#pragma unroll 4
  for (int k = 0; k < used; ++k) {
    const int64_t at = row * used + k;
    const int32_t slot = routed.slot_of[at];
    if (slot < 0) continue;
    const float w = routed.weights[at] * (routed.scales ? routed.scales[routed.chosen[at]] : 1.0f);
    const auto x = *reinterpret_cast<const float4*>(in + int64_t(slot) * cols + col);
    sum.x += w * x.x, sum.y += w * x.y, sum.z += w * x.z, sum.w += w * x.w;
  }
  if (!kApart) {
    *reinterpret_cast<float4*>(static_cast<float*>(out) + row * cols + col) = sum;
    return;
  }
  auto* to = reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(out) + row * cols + col);
  to[0] = __floats2bfloat162_rn(sum.x, sum.y), to[1] = __floats2bfloat162_rn(sum.z, sum.w);
}

__device__ float read(const float* x) { return *x; }
__device__ float read(const __nv_bfloat16* x) { return __bfloat162float(*x); }
__device__ void write(float* x, float v) { *x = v; }
__device__ void write(__nv_bfloat16* x, float v) { *x = __float2bfloat16_rn(v); }

template <class T>
__global__ void __launch_bounds__(256)
    sigmoid_gate(const __nv_bfloat16* in, const float* gate, int64_t cols, T* in_out, int64_t out_cols) {
  __shared__ float parts[8];
  let_next_kernel_start();
  wait_for_kernel_ahead();
  const int64_t row = blockIdx.x;
  float sum = 0;
  for (int64_t i = threadIdx.x; i < cols; i += 256) sum += read(in + row * cols + i) * gate[i];
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (float p : parts) sum += p;
  const float scale = 1 / (1 + expf(-sum));
  for (int64_t i = threadIdx.x; i < out_cols; i += 256) {
    T* x = in_out + row * out_cols + i;
    write(x, read(x) * scale);
  }
}

// An atom a block of 64 threads: sixteen bytes each.
__global__ void to_tiles(const __nv_bfloat16* in, uint8_t* out, int64_t rows, int64_t cols, bool gated, int64_t steps) {
  const int64_t atom = blockIdx.x % (kTileRows / kAtomRows), step = blockIdx.x / (kTileRows / kAtomRows) % steps;
  const int64_t tile = blockIdx.x / (kTileRows / kAtomRows) / steps;
  const int r = int(threadIdx.x) / 8, chunk = int(threadIdx.x) % 8;
  const int64_t group = tile * (kTileRows / kAtomRows) + atom;  // of eight rows
  const int64_t row = gated ? (group % 2) * (rows / 2) + group / 2 * kAtomRows + r : group * kAtomRows + r;
  const bool there = gated ? group / 2 * kAtomRows + r < rows / 2 : row < rows;
  __nv_bfloat16 values[8];
  for (int i = 0; i < 8; ++i) {
    const int64_t col = step * kTileCols + chunk * 8 + i;
    values[i] = there && col < cols ? in[row * cols + col] : __float2bfloat16_rn(0.0f);
  }
  uint8_t* to = out + int64_t(blockIdx.x) * kAtomBytes + r * 128 + (chunk ^ r) * 16;
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(values);
}

// A tile a block: thread 32 * strip + lane writes its lane's sixteen bytes.
__global__ void __launch_bounds__(256) to_tiles4(const uint8_t* in, uint8_t* out, int64_t rows, int64_t cols,
                                                 bool gated, int64_t steps, int32_t* too_large) {
  constexpr int kBlock = 17, kElements = 32;  // a scale, then elements j and j + 16 in a byte
  const int64_t step = blockIdx.x % steps, tile = blockIdx.x / steps;
  const int strip = int(threadIdx.x) / 32, g = int(threadIdx.x) % 32 / 4, tid = int(threadIdx.x) % 4;
  const int64_t strips = tile * (kTileRows / kStripRows) + strip;
  auto block_of = [&](bool second, int64_t col) -> const uint8_t* {  // of row g, or g + 8
    const int64_t half = gated ? rows / 2 : rows, row = gated ? strips * 8 + g : strips * 16 + g + second * 8;
    if (row >= half || col >= cols) return nullptr;
    return in + ((gated && second ? half + row : row) * (cols / kElements) + col / kElements) * kBlock;
  };
  uint32_t words[4] = {};
  for (int i = 0; i < 4; ++i)
    for (int r = 0; r < 4; ++r)
      for (int e = 0; e < 2; ++e) {
        const int64_t col = step * kTileCols + i * 16 + tid * 2 + r / 2 * 8 + e;
        const uint8_t* block = block_of(r % 2 != 0, col);
        const int j = int(col % kElements);
        const uint32_t nibble = block ? block[1 + j % 16] >> (j / 16 * 4) & 15 : 0;
        words[i] |= mxfp4_bits(r, nibble) << (16 * e);
      }
  uint8_t* to = out + int64_t(blockIdx.x) * kTileBytes4;
  *reinterpret_cast<uint4*>(to + strip * kStripBytes + int(threadIdx.x) % 32 * 16) =
      make_uint4(words[0], words[1], words[2], words[3]);
  // Thread tid of a pair of rows writes one of its four scales. A block's byte is a float32's exponent.
  const uint8_t* block = block_of(tid / 2 != 0, step * kTileCols + tid % 2 * kElements);
  const int exponent = (block ? block[0] : 0) + 126;
  if (exponent > 254) *too_large = 1;
  auto* scales = reinterpret_cast<uint16_t*>(to + kTileScales + strip * kStripScales);
  scales[g * 4 + tid] = uint16_t(exponent << 7);
}

}  // namespace

void launch_expert_tiles(const void* from, const ExpertMatrix& to, int64_t expert, int32_t* too_large,
                         cudaStream_t stream) {
  auto* out = static_cast<uint8_t*>(const_cast<void*>(to.tiles)) + expert * to.bytes();
  if (to.mxfp4) {
    to_tiles4<<<unsigned(to.bytes() / kTileBytes4), 256, 0, stream>>>(static_cast<const uint8_t*>(from), out, to.rows,
                                                                      to.cols, to.gated, to.steps(), too_large);
    return;
  }
  to_tiles<<<unsigned(to.bytes() / kAtomBytes), 64, 0, stream>>>(static_cast<const __nv_bfloat16*>(from), out, to.rows,
                                                                 to.cols, to.gated, to.steps());
}

void launch_route(const Routing& r, const float* logits, const float* correction, const Routed& out, int64_t rows,
                  int item_rows, cudaStream_t stream) {
  const size_t each = scratch_bytes((r.experts + 3) / 4 * 4);
  const int64_t slots = rows * r.used;
  if (rows <= kItemRows && item_rows == kItemRows && each * size_t(rows) <= 32 << 10) {
    const int64_t threads = std::max(rows * 32, (slots + 31) / 32 * 32);
    attention::cuda::launch_early(route_few, dim3(1), int(threads), each * size_t(rows), stream, r, logits, correction,
                                  out, int(rows));
    return;
  }
  attention::cuda::launch_early(choose_rows, dim3(unsigned((rows + kRowsABlock - 1) / kRowsABlock)), kRowsABlock * 32,
                                each * kRowsABlock, stream, r, logits, correction, out, int(rows));
  launch_early(cut_items, dim3(1), kThreads, stream, out, out.own, item_rows);
  launch_early(place_slots, dim3(unsigned((slots + 255) / 256)), 256, stream, out, r.used, slots, item_rows);
}

void launch_combine(const float* in, const Routed& routed, int32_t used, bool apart, void* out, int64_t rows,
                    int64_t cols, cudaStream_t stream) {
  const int threads = int(std::min<int64_t>(256, (cols / 4 + 31) / 32 * 32));
  const dim3 grid(unsigned((cols / 4 + threads - 1) / threads), unsigned(rows));
  launch_early(apart ? combine<true> : combine<false>, grid, threads, stream, in, routed, used, out, cols);
}

void launch_sigmoid_gate(const void* in, const float* gate, int64_t cols, void* in_out, bool half, int64_t out_cols,
                         int64_t rows, cudaStream_t stream) {
  const auto* from = static_cast<const __nv_bfloat16*>(in);
  if (half)
    launch_early(sigmoid_gate<__nv_bfloat16>, unsigned(rows), 256, stream, from, gate, cols,
                 static_cast<__nv_bfloat16*>(in_out), out_cols);
  else
    launch_early(sigmoid_gate<float>, unsigned(rows), 256, stream, from, gate, cols, static_cast<float*>(in_out),
                 out_cols);
}

}  // namespace kvasir::model::cuda
