// Which rows go to which experts: chosen, and brought together by expert as items that a block multiplies.
#include <algorithm>

#include "attention/cuda/launch_early.cuh"
#include "model/cuda/early.cuh"
#include "model/cuda/expert_choice.cuh"

namespace kvasir::model::cuda {
namespace {

constexpr int kThreads = 1024, kMostExperts = 1024;

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
  ExpertItem& to = out.items[item];
  if (leads) to.expert = experts[i], to.first = item * kItemRows, to.count = count;
  to.rows[rank] = i / used;
  out.slot_of[i] = item * kItemRows + rank;
}

__global__ void __launch_bounds__(kThreads)
    route_few(Routing r, const float* logits, const float* correction, Routed out, int rows) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  choose_row(r, logits, correction, out, int(threadIdx.x / 32), rows);
  __syncthreads();
  group_few(out, r.used, rows * r.used);
}

constexpr int kRowsABlock = 4;
__global__ void __launch_bounds__(kRowsABlock * 32)
    choose_rows(Routing r, const float* logits, const float* correction, Routed out, int rows) {
  let_next_kernel_start();
  wait_for_previous_kernel();
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
  wait_for_previous_kernel();
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
    ExpertItem& to = out.items[item + j];
    to.expert = e, to.first = first + j * item_rows, to.count = min(item_rows, own - j * item_rows);
    to.unused = 0;
  }
}

// In which order an expert's rows lie does not change what they become.
__global__ void place_slots(Routed out, int used, int64_t slots, int item_rows) {
  let_next_kernel_start();
  wait_for_previous_kernel();
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

}  // namespace

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

}  // namespace kvasir::model::cuda
