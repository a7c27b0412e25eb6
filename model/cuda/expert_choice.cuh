// Which experts a row goes to: Routing::choose() by a warp.
#pragma once

#include "model/cuda/expert_tiles.h"
#include "model/cuda/warp_sums.cuh"

namespace kvasir::model::cuda {
namespace {

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

// A warp's room in shared memory.
struct ChoiceScratch {
  float *scores, *choice;
  bool *taken, *kept;
};
__host__ __device__ size_t scratch_bytes(int experts) { return size_t(experts) * (2 * sizeof(float) + 2); }
__device__ ChoiceScratch scratch_of(uint8_t* shared, int warp, int experts) {
  const int each = (experts + 3) / 4 * 4;
  auto* at = reinterpret_cast<float*>(shared + size_t(warp) * scratch_bytes(each));
  auto* flags = reinterpret_cast<bool*>(at + 2 * each);
  return {at, at + each, flags, flags + each};
}

// No expert outside the best groups may be chosen.
__device__ void take_worst_groups(const Routing& r, const ChoiceScratch& s) {
  const int size = r.experts / r.groups, lane = threadIdx.x % 32;
  for (int g = lane; g < r.groups; g += 32) s.kept[g] = false;
  __syncwarp();
  for (int n = 0; n < r.used_groups; ++n) {
    Best group{0, -1};
    for (int g = 0; g < r.groups; ++g) {
      if (s.kept[g]) continue;
      const Best first = best_of(s.choice, s.taken, g * size, size);
      if (lane == 0) s.taken[first.index] = r.group_best > 1;
      __syncwarp();
      const Best second = r.group_best > 1 ? best_of(s.choice, s.taken, g * size, size) : Best{0, -1};
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
__device__ void choose(const Routing& r, const float* logits, const float* correction, const ChoiceScratch& s,
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

}  // namespace
}  // namespace kvasir::model::cuda
