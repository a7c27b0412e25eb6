// How a layer's experts lie on the device, and the kernels that route rows to them and multiply.
//
// An expert's matrix is stored as tiles of 128 rows by 64 elements of k, in the order in which a block reads them: the
// tiles of the first 128 rows along k, then those of the next 128. A tile is 16 atoms of 8 rows, 1,024 bytes each, in
// the 128-byte swizzle of wgmma; what is past a matrix's end is zero. Gate and up rows are interleaved, an atom of one
// and an atom of the other, so that one thread holds both sums of an output.
//
// MXFP4 stays packed: of a tile's sixteen rows, 512 bytes as the tensor cores want them in registers (mxfp4.cuh), and
// of each of their eight pairs of rows (g and g + 8) four scales in bfloat16, those of a row's two blocks side by side.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "model/experts.h"

namespace kvasir::model::cuda {

constexpr int kTileRows = 128, kTileCols = 64, kAtomRows = 8, kAtomBytes = 1024;
constexpr int kTileBytes = kTileRows * kTileCols * 2;
constexpr int kStripRows = 16, kStripBytes = 512, kStripScales = 64;  // of MXFP4
constexpr int kTileScales = kTileRows / kStripRows * kStripBytes;     // where a tile's begin
constexpr int kTileBytes4 = kTileScales + kTileRows / kStripRows * kStripScales;

// The activation: (up + shift) * gate * sigmoid(slope * gate + cubic * gate^3), gate clamped to at most `limit` and up
// to
// +-limit. That is SiLU, GELU (tanh) and gpt-oss' clamped SwiGLU.
struct Gate {
  float slope = 1, cubic = 0, limit = 3.4e38f, shift = 0;
};

struct ExpertMatrix {
  const void* tiles = nullptr;
  const float* bias = nullptr;  // [experts, rows], gates first; null: none
  int64_t rows = 0, cols = 0;   // of the matrix; with gates rows are twice the results
  bool gated = false, mxfp4 = false;
  Gate gate;

  int64_t tiles_down() const { return (rows + kTileRows - 1) / kTileRows; }
  int64_t steps() const { return (cols + kTileCols - 1) / kTileCols; }
  int64_t bytes() const { return tiles_down() * steps() * (mxfp4 ? kTileBytes4 : kTileBytes); }  // of one expert
  int64_t results() const { return gated ? rows / 2 : rows; }
};

// A slot is one (row, expert) pair; the slots of an expert are contiguous. An item is a run of them that a block
// multiplies together.
constexpr int kItemRows = 8;  // whose indices stand in the item itself
struct ExpertItem {
  int32_t expert, first, count, unused;  // slots
  int32_t rows[kItemRows];               // of the input; where items have no more
};

// What a step's rows chose.
struct Routed {
  const float* scales = nullptr;  // of each expert's part of the sum; null: none
  int32_t* chosen = nullptr;      // [rows, used]
  float* weights = nullptr;       // likewise
  int32_t* slot_of = nullptr;     // likewise
  int32_t* slot_rows = nullptr;   // of each slot
  ExpertItem* items = nullptr;
  int32_t* count = nullptr;  // of items
  // The experts that are here: others' slots are -1, and items name experts from the first of these on.
  int32_t first = 0, own = 0;
  __host__ __device__ int32_t own_expert(int32_t chosen) const {
    const int32_t e = chosen - first;
    return e >= 0 && e < own ? e : -1;
  }
  // By expert, for launch_route() alone: rows, which are 0 before and after, its next slot, first slot and first item.
  int32_t *counts = nullptr, *next = nullptr, *first_slots = nullptr, *first_items = nullptr;
};
// Slots of so many rows and experts a row: an item of few rows has kItemRows whether they are used or not.
inline int64_t slots_of(int64_t rows, int64_t used) {
  return used * (rows > kItemRows ? std::max<int64_t>(rows, kItemRows * kItemRows) : rows * kItemRows);
}

// Expert `expert` of `to` from row-major bfloat16, or from the blocks of 17 bytes that files have MXFP4 in.
// too_large becomes 1 where a scale is above 2, which tiles have no room for.
void launch_expert_tiles(const void* from, const ExpertMatrix& to, int64_t expert, int32_t* too_large,
                         cudaStream_t stream);
// Routing::choose() of each row, and the slots by expert, cut into items of at most `item_rows`.
void launch_route(const Routing& routing, const float* logits, const float* correction, const Routed& out, int64_t rows,
                  int item_rows, cudaStream_t stream);
// out[slot] = the slot's row of `in` (bfloat16, [.., cols]) times its expert's matrix: the activation in bfloat16 where
// it is gated, else the sums in float32.
// by_slot: row i of `in` is slot i's, else slot_rows says whose it is. few: items of at most kItemRows; many (sm_90a):
// of at most `item_rows`, 64 or 128.
cudaError_t launch_experts_few(const ExpertMatrix& m, const Routed& routed, const void* in, bool by_slot, void* out,
                               int64_t most_items, cudaStream_t stream);
cudaError_t launch_experts_many(const ExpertMatrix& m, const Routed& routed, const void* in, bool by_slot, void* out,
                                int64_t most_items, int item_rows, cudaStream_t stream);
// out[row] += the sum over its experts that are here of weight * in[slot]; apart: out, in bfloat16, is that sum.
void launch_combine(const float* in, const Routed& routed, int32_t used, bool apart, void* out, int64_t rows,
                    int64_t cols, cudaStream_t stream);
// in_out *= sigmoid(in . gate), all rows; `in` is bfloat16, in_out bfloat16 or float32.
void launch_sigmoid_gate(const void* in, const float* gate, int64_t cols, void* in_out, bool half, int64_t out_cols,
                         int64_t rows, cudaStream_t stream);

}  // namespace kvasir::model::cuda
