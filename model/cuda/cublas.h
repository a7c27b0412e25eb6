// Matrix products by cuBLASLt, which is opened at run time: a machine without it, or without a GPU, still
// starts. Searched in this order: $KVASIR_CUBLASLT (a file), the loader's own path (libcublasLt.so.13, then
// .12), /usr/local/cuda/lib64, and the toolkit that tools/cuda-toolkit.sh unpacks.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>

#include "attention/cuda/memory.h"
#include "core/status.h"
#include "model/cuda/form.h"
#include "model/cuda/fp8.h"

namespace kvasir::model::cuda {

enum class Elements : uint8_t { bf16, fp8, fp8_scaled };

class Cublas {
 public:
  struct Functions;
  static constexpr int64_t kTimedRows = 512;

  static Result<std::unique_ptr<Cublas>> open(cudaStream_t stream);
  ~Cublas();

  // out[rows, n] = in[rows, k] (bfloat16) * weight[n, k]' (bfloat16), summed in float32; f32, added_f32 or bf16.
  // The first of a shape with large weights and up to kTimedRows rows times what the library proposes, unless it is
  // captured; which way is taken holds for the process.
  // E4M3 in and weight: row r and feature f of the result are multiplied by in[r] * weight[f], or as they are without
  // scales, which the library knows faster ways for where rows are few. Rows of the result are `stride` elements apart
  // (0: n).
  Status product(const void* in, const void* weight, void* out, int64_t rows, int64_t n, int64_t k, Form form,
                 Elements elements = Elements::bf16, Scales scales = {}, int64_t stride = 0);

  // By one way for any number of rows of such weights, that sums all of k in one order: a row's bits do not depend on
  // how many stand beside it. Where the library knows such a way.
  Result<bool> has_one_order(int64_t n, int64_t k, Form form);
  Status product_in_one_order(const void* in, const void* weight, void* out, int64_t rows, int64_t n, int64_t k,
                              Form form);

 private:
  struct Shape {
    int64_t rows, n, k, stride;
    Form form;
    Elements elements;
    auto operator<=>(const Shape&) const = default;
  };
  class Choices;
  static Choices& choices();
  struct Plan;
  Cublas();
  Result<Plan*> plan(const Shape& shape, Scales scales);
  Status ask(const Plan& plan, Plan& to, uint32_t schemes);
  Result<Plan*> one_order(const Shape& shape);
  Status set_scales(Plan& plan, Scales scales);
  Status choose(Plan& plan, const void* in, const void* weight, int64_t out_bytes);
  Status multiply(const Plan& plan, int way, const void* in, const void* weight, void* out);

  std::unique_ptr<Functions> f_;
  void* handle_ = nullptr;
  cudaStream_t stream_ = nullptr;
  attention::cuda::DeviceMemory workspace_, scratch_;
  size_t scratch_bytes_ = 0;
  cudaEvent_t began_ = nullptr, ended_ = nullptr;
  std::map<Shape, std::unique_ptr<Plan>> plans_;
  std::map<Shape, std::unique_ptr<Plan>> ordered_;  // of product_in_one_order()
};

}  // namespace kvasir::model::cuda
