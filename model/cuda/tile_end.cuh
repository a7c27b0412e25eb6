// What a block does with the sums that its warps have of a tile: adds them up and gives them their form.
#pragma once

#include <cuda_bf16.h>

#include "model/cuda/activations.cuh"
#include "model/cuda/form.h"

namespace kvasir::model::cuda {

// sums[warp][row of the input][feature]: kTall groups of sixteen features, of which with kGated eight are gates and
// eight what these let through; `thread` is one of the warps'. scale(f) is what feature f's sum is multiplied by.
template <int kWarps, int kWide, int kTall, bool kGated, class Scale>
__device__ void end_tile(int thread, const float* sums, void* out, int rows, int64_t n, int tile, Form form,
                         Scale scale) {
  constexpr int kRow = kTall * 16, kOne = kWide * 8 * kRow, kFeatures = kTall * (kGated ? 8 : 16);
  for (int e = thread; e < rows * kFeatures; e += kWarps * 32) {
    const int r = e / kFeatures, f = e % kFeatures, from = r * kRow + (kGated ? f / 8 * 16 + f % 8 : f);
    float y = 0, up = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      y += sums[w * kOne + from];
      if constexpr (kGated) up += sums[w * kOne + from + 8];
    }
    const int64_t feature = int64_t(tile) * kFeatures + f, at = int64_t(r) * n + feature;
    y *= scale(feature);
    if constexpr (kGated) {
      up *= scale(n + feature);
      if (form == Form::apart) {
        float* both = static_cast<float*>(out) + int64_t(r) * n + at;
        both[0] = y, both[n] = up;
      } else {
        static_cast<__nv_bfloat16*>(out)[at] = __float2bfloat16_rn((form == Form::gelu ? gelu_tanh(y) : silu(y)) * up);
      }
    } else if (form == Form::bf16) {
      static_cast<__nv_bfloat16*>(out)[at] = __float2bfloat16_rn(y);
    } else {
      static_cast<float*>(out)[at] = form == Form::added_f32 ? static_cast<float*>(out)[at] + y : y;
    }
  }
}

// A warp's sums in the layout of the matrix unit, to where end_tile() reads them.
template <int kWide, int kTall>
__device__ void put_sums(float* sums, int warp, const float (&sum)[kTall][kWide][4]) {
  constexpr int kRow = kTall * 16, kOne = kWide * 8 * kRow;
  const int lane = threadIdx.x % 32, g = lane / 4, tid = lane % 4;
#pragma unroll
  for (int t = 0; t < kTall; ++t)
#pragma unroll
    for (int w = 0; w < kWide; ++w)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[warp * kOne + (w * 8 + tid * 2 + i % 2) * kRow + t * 16 + g + i / 2 * 8] = sum[t][w][i];
}

struct Device {
  int multiprocessors = 0, shared = 0, major = 0;
};
inline const Device& device() {
  static const Device found = [] {
    Device d;
    int current = 0;
    if (cudaGetDevice(&current) != cudaSuccess) return d;
    cudaDeviceGetAttribute(&d.multiprocessors, cudaDevAttrMultiProcessorCount, current);
    cudaDeviceGetAttribute(&d.shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, current);
    cudaDeviceGetAttribute(&d.major, cudaDevAttrComputeCapabilityMajor, current);
    return d;
  }();
  return found;
}

// Tiles twice as tall read the input half as often, where they do not leave more multiprocessors without one.
inline bool worth_tall(int64_t tiles) {
  const int64_t every = device().multiprocessors;
  return tiles % 2 == 0 && (tiles / 2 + every - 1) / every * 2 <= (tiles + every - 1) / every;
}

}  // namespace kvasir::model::cuda
