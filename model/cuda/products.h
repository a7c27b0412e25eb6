// Which product goes where: by the weight's packing, the rows of the input and what was measured (gpu_product_bench).
#pragma once

#include <memory>

#include "model/cuda/cublas.h"
#include "model/cuda/fp8.h"
#include "model/cuda/weight.h"

namespace kvasir::model::cuda {

class Products {
 public:
  // Invariant: a row of a result does not depend on how many stand beside it. Then weights in bfloat16 are multiplied
  // in one way of the library's for any number of rows, others so many rows at a time by what is for few.
  static Result<std::unique_ptr<Products>> open(cudaStream_t stream, bool invariant);

  // What products by this weight need beside it.
  Status make_room(const Weight& w);

  // Whether a product by this weight reads rows of E4M3; else they are bfloat16.
  bool reads_bytes(const Weight& w, int64_t rows) const;
  // Whether such a product's scales are another kernel's work: what reads its result may do that instead.
  bool scales_apart(const Weight& w, int64_t rows) const;
  // Whether gate and up are fused into one launch.
  bool fuses(const Weight& w, int64_t rows, Form form) const;

  // out[rows, n] = in[rows, w.cols] * w', n being w.rows, or half of it where Form fuses gates. `half` or `bytes` is
  // there, as reads_bytes() says.
  Status run(const void* half, Bytes bytes, const Weight& w, void* out, int64_t rows, Form form);

  // Where scales_apart(): the product before its scales, as bfloat16 in `out`, or as float32 in memory of its own.
  struct Sums {
    const void* data = nullptr;
    Scales by;
  };
  Result<Sums> run_unscaled(Bytes bytes, const Weight& w, void* out, int64_t rows, Form form);

 private:
  Status one_order(const void* half, const Weight& w, void* out, int64_t rows, Form form);
  Status by_library(Bytes bytes, const Weight& w, void* out, int64_t rows, Form form);
  Status by_parts(const void* half, const Weight& w, void* out, int64_t rows, Form form);

  cudaStream_t stream_ = nullptr;
  bool invariant_ = false;
  std::unique_ptr<Cublas> cublas_;
  DeviceMemory unpacked_;  // some rows of a packed weight
  DeviceMemory sums_;      // of E4M3 without scales
  int64_t sum_cols_ = 0;
};

}  // namespace kvasir::model::cuda
