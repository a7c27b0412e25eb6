// Prefill in 16 bits: what its products read, and how.
#pragma once

#include "attention/cuda/bulk.cuh"
#include "attention/cuda/prefill_feed.cuh"
#include "attention/cuda/wgmma.cuh"

namespace kvasir::attention::cuda {

template <class T_, int kD_>
struct Wide {
  using T = T_;
  static constexpr int kD = kD_, kBytes = 2, kStages = 2, kChains = 1, kSums = 0, kOnes = 0;
  static constexpr bool kTurns = true, kLogs = false, kGathered = false, kStores = true;
  static constexpr bool kWarpWide = kD == 64;  // measured: heads of 128 are a little slower with it
  static constexpr float kShift = __is_same(T, Half) ? 8.0f : 0.0f;
  struct Maps {
    CUtensorMap q, k_new, v_new, k_old, v_old, out;
  };
  __device__ static float score_unit(const Shape& s, const Layer& l) { return s.scale * l.cache.k_scale; }
  __device__ static float value_unit(const Layer& l) { return l.cache.v_scale; }

  __device__ static void load(uint8_t* to, const CUtensorMap* map, int head, int row, uint64_t* full) {
    for (int h = 0; h < kD / 64; ++h) load_tile(to + h * kHalfTile, map, h * 64, head, row, full);
  }
  __device__ static void load_queries(uint8_t* to, const Maps& maps, int head, int row, uint64_t* full) {
    load(to, &maps.q, head, row, full);
  }
  __device__ static const CUtensorMap* keys(const Maps& maps, bool fresh) { return fresh ? &maps.k_new : &maps.k_old; }
  __device__ static const CUtensorMap* values(const Maps& maps, bool fresh) {
    return fresh ? &maps.v_new : &maps.v_old;
  }
  __device__ static void load_keys(uint8_t* to, const CUtensorMap* map, int head, int row, uint64_t* full) {
    load(to, map, head, row, full);
  }
  __device__ static void load_values(uint8_t* to, const CUtensorMap* map, int head, int row, uint64_t* full) {
    load(to, map, head, row, full);
  }

  __device__ static void multiply_keys(float (&score)[64], uint64_t q, uint64_t k) {
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) {
      const uint32_t step = (i / 4) * (kHalfTile >> 4) + (i % 4) * 2;
      wgmma_tiles(T{}, score, further(q, step), further(k, step), i > 0);
    }
  }
  __device__ static void multiply_values(float (&out)[kD / 2], const uint32_t* weights, uint32_t values) {
    const uint64_t columns = columns_descriptor(values, kHalfTile);
#pragma unroll
    for (int i = 0; i < kTileKeys / 16; ++i)
      wgmma_weights(T{}, out, weights + i * 4, further(columns, i * (2048 >> 4)));
  }
  __device__ static void pack(const float (&score)[64], uint32_t (&weights)[kTileKeys / 4]) {
#pragma unroll
    for (int i = 0; i < kTileKeys / 4; ++i) weights[i] = T::pack(score[i * 2], score[i * 2 + 1]);
  }
};

}  // namespace kvasir::attention::cuda
