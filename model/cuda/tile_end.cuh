// What a block does with the sums that its warps have of a tile: adds them up and gives them their form.
#pragma once

#include <cuda_bf16.h>

#include "model/cuda/activations.cuh"
#include "model/cuda/form.h"

namespace kvasir::model::cuda {

// sums[warp][row of the input][feature]: kTall groups of sixteen features, of which with kGated eight are gates and
// eight what these let through; `thread` is one of the warps'. What is read of memory for the end of a tile is
// prefetched before its products, which take longer than that takes to come.
template <int kWarps, int kWide, int kTall, bool kGated>
class TileEnd {
 public:
  // scale(f) is what feature f's sum is multiplied by.
  template <class Scale>
  __device__ TileEnd(int thread, void* out, int rows, int64_t n, int tile, Form form, Scale scale)
      : thread_(thread), out_(out), rows_(rows), n_(n), tile_(tile), form_(form) {
    each([&](int i, int, int, int64_t feature, int64_t at) {
      before_[i] = !kGated && form == Form::added_f32 ? static_cast<const float*>(out)[at] : 0.0f;
      scale_[i] = scale(feature), up_scale_[i] = kGated ? scale(n + feature) : 0.0f;
    });
  }

  __device__ void end(const float* sums) const {
    each([&](int i, int r, int f, int64_t, int64_t at) {
      const int from = r * kRow + (kGated ? f / 8 * 16 + f % 8 : f);
      float y = 0, up = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        y += sums[w * kOne + from];
        if constexpr (kGated) up += sums[w * kOne + from + 8];
      }
      y *= scale_[i];
      if constexpr (kGated) {
        up *= up_scale_[i];
        if (form_ == Form::apart) {
          float* both = static_cast<float*>(out_) + int64_t(r) * n_ + at;
          both[0] = y, both[n_] = up;
        } else {
          static_cast<__nv_bfloat16*>(out_)[at] =
              __float2bfloat16_rn((form_ == Form::gelu ? gelu_tanh(y) : silu(y)) * up);
        }
      } else if (form_ == Form::bf16) {
        static_cast<__nv_bfloat16*>(out_)[at] = __float2bfloat16_rn(y);
      } else {
        static_cast<float*>(out_)[at] = form_ == Form::added_f32 ? before_[i] + y : y;
      }
    });
  }

 private:
  static constexpr int kRow = kTall * 16, kOne = kWide * 8 * kRow, kFeatures = kTall * (kGated ? 8 : 16);
  static constexpr int kThreads = kWarps * 32, kMine = (kWide * 8 * kFeatures + kThreads - 1) / kThreads;

  // f(which of this thread's, row, feature of the tile, feature, where it is in the output)
  template <class F>
  __device__ void each(F f) const {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int e = thread_ + i * kThreads, r = e / kFeatures, of_tile = e % kFeatures;
      if (e >= rows_ * kFeatures) continue;
      const int64_t feature = int64_t(tile_) * kFeatures + of_tile;
      f(i, r, of_tile, feature, int64_t(r) * n_ + feature);
    }
  }

  int thread_;
  void* out_;
  int rows_;
  int64_t n_;
  int tile_;
  Form form_;
  float before_[kMine], scale_[kMine], up_scale_[kMine];
};

// A warp's sums in the layout of the matrix unit, to where TileEnd reads them.
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
