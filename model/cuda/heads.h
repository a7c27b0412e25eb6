// Products that each head has of its own, and columns that go from one row into another: what latent attention does
// around its kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "model/ops.h"

namespace kvasir::model::cuda {

// Rows of bfloat16 or float32, `cols` apart.
struct HeadRows {
  void* data = nullptr;
  int64_t cols = 0;
  Pieces pieces;
};

// Piece h of `out` = piece h of `in` * weights[h]', all bfloat16; weights: [heads][n][k]. A row's sums are in one order
// however many rows there are.
void launch_head_products(const HeadRows& in, const void* weights, const HeadRows& out, int64_t rows, int64_t heads,
                          int64_t n, int64_t k, cudaStream_t stream);
// `count` pieces of `cols` columns to bfloat16; `in` is that too (`half`) or float32.
void launch_copy_pieces(const HeadRows& in, bool half, const HeadRows& out, int64_t rows, int64_t cols, int64_t count,
                        cudaStream_t stream);

}  // namespace kvasir::model::cuda
