// The two thin products of adapters beside a product: rows are grouped by adapter into tiles, and one launch each
// serves all adapters of a step. Where their factors lie is in device memory, so that a graph serves whatever adapters
// come.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kvasir::model::cuda {

// A factor is tiles of 16 outputs x 16 inputs, padded with zeros, in the order in which lanes read them: those of an
// output's inputs lie one behind another.
constexpr int64_t kFactorTileSide = 16, kFactorTileBytes = kFactorTileSide * kFactorTileSide * 2;
constexpr int64_t tiles_of(int64_t n) { return (n + kFactorTileSide - 1) / kFactorTileSide; }

// What an adapter changes of a weight: b of rows [first, first + rows), whose ranks are `ranks` tiles from `from` on.
struct LowRankPart {
  const void* b;
  const float* factors;  // DoRA: what the weight's own product is multiplied by; null: 1
  int32_t first, rows, ranks, from;
};
struct LowRankWeight {
  static constexpr int kMostParts = 4;
  const void* a;  // of all parts
  int32_t ranks;  // tiles of them all; 0: this weight stays as it is
  int32_t parts;
  LowRankPart part[kMostParts];
};

// Up to `tile_rows` of a step's rows that have one adapter.
struct LowRankTile {
  const LowRankWeight* weights;  // by weight
  int32_t first, rows;           // in the list of rows
};

constexpr int64_t kBlockFeatures = 512;  // of an expand block
constexpr int64_t kFewTileRows = 8, kManyTileRows = 32;

struct LowRankProduct {
  const LowRankTile* tiles;
  const int32_t* rows;
  int64_t count = 0, tile_rows = 0;  // of tiles; kFewTileRows or kManyTileRows
  int32_t weight = 0;
  const void* in = nullptr;  // [rows, k] bfloat16
  int64_t k = 0;
  int64_t ranks = 0, blocks = 0;  // the most tiles of ranks, and blocks of features, that one of the adapters has
  float* sums = nullptr;          // [low_rank_splits(k), count * tile_rows, ranks * 16]
  void* out = nullptr;            // [rows, n]
  bool half = false;              // bfloat16, else float32
  int64_t n = 0;
  float* saved = nullptr;  // as `out`: what was there before a product that is to be stretched was added; null: nothing
};

// k is summed in so many pieces: as many whatever the rows are.
int64_t low_rank_splits(int64_t k);
// What rows with factors hold goes to `saved`, and zeros take its place.
void launch_take_out(const LowRankProduct& p, cudaStream_t stream);
// sums = in * a', and out = out * factors + saved + sums * b'.
void launch_low_rank(const LowRankProduct& p, cudaStream_t stream);

// float32 [outputs, inputs] as tiles, row i times scale * factors[i] (null: 1).
void launch_pack_factor(const float* from, int64_t outputs, int64_t inputs, float scale, const float* factors, void* to,
                        cudaStream_t stream);
// DoRA: factors[i] = magnitudes[i] / the length of row i of weight + scale * b * a. weight: bfloat16 [rows, cols].
void launch_stretch(const void* weight, const float* a, const float* b, float scale, const float* magnitudes,
                    int64_t rank, int64_t rows, int64_t cols, float* factors, cudaStream_t stream);

}  // namespace kvasir::model::cuda
