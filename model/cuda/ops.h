// The device operations on a GPU: bfloat16 weights and attention, float32 between operations.
#pragma once

#include <memory>
#include <vector>

#include "attention/backend.h"
#include "attention/cuda/memory.h"
#include "model/cuda/cublas.h"
#include "model/ops.h"

namespace kvasir::model::cuda {

using attention::cuda::DeviceMemory;
using attention::cuda::PinnedMemory;

struct CudaOptions {
  int64_t max_batch = 0, max_tokens = 0, max_kvlen = 0;
  int64_t max_logit_rows = 0;
  int32_t page_size = 16;
  kvcache::IndexMode index_mode = kvcache::IndexMode::page_table;
  const attention::Backend* attention = nullptr;
};

class CudaOps final : public Ops {
 public:
  CudaOps(const CudaOptions& options, cudaStream_t stream) : options_(options), stream_(stream) {}

  Status prepare();  // opens the product library
  Status set_cache(const kvcache::CacheView& cache);
  Status begin(const Batch& batch, const std::vector<int32_t>& tokens);
  float* data(Buffer b) { return buffers_[size_t(b.id)]->data.as<float>(); }
  int64_t weight_bytes() const { return weight_bytes_; }

  Result<Matrix> load_matrix(Weights& source, std::span<const HostTensor> parts, Shard shard) override;
  Result<Vector> load_vector(Weights& source, const HostTensor& tensor, float shift) override;
  Result<Buffer> make_buffer(int64_t cols, bool logit_rows, Shard shard) override;
  Result<int32_t> add_attention(const attention::Attributes& attributes) override;

  Status embed(Matrix table, float scale, Buffer out) override;
  Status norm(Buffer in, Vector weight, float eps, Buffer out) override { return norm(in, weight, eps, false, out); }
  Status add_norm(Buffer in, Vector weight, float eps, Buffer out) override { return norm(in, weight, eps, true, out); }
  Status head_norm(Buffer in_out, int64_t first, int64_t count, Vector weight, float eps) override;
  Status linear(Buffer in, Matrix weight, Buffer out) override { return linear(in, weight, false, out); }
  Status add_linear(Buffer in, Matrix weight, Buffer out) override { return linear(in, weight, true, out); }
  Status glu(Activation activation, Buffer in, Buffer out) override;
  Status attend(int32_t kind, int32_t layer, Buffer qkv, Buffer out) override;
  Status take_logit_rows(Buffer in, int64_t first, int64_t count, Buffer out) override;

 private:
  struct Room {
    DeviceMemory data;
    int64_t cols = 0;
    bool logit_rows = false;
  };
  struct Weight {
    DeviceMemory data;  // bfloat16 [rows, cols]
    int64_t rows = 0, cols = 0;
  };
  Status norm(Buffer in, Vector weight, float eps, bool add, Buffer out);
  Status linear(Buffer in, Matrix weight, bool add, Buffer out);
  int64_t rows(Buffer b) const { return buffers_[size_t(b.id)]->logit_rows ? logit_rows_ : tokens_; }
  Status launched(const char* what) const { return attention::cuda::check(cudaGetLastError(), what); }

  CudaOptions options_;
  cudaStream_t stream_;
  std::unique_ptr<Cublas> cublas_;
  std::vector<std::unique_ptr<Weight>> matrices_;
  std::vector<std::unique_ptr<DeviceMemory>> vectors_;  // float32
  std::vector<std::unique_ptr<Room>> buffers_;
  std::vector<attention::Attributes> kinds_;
  std::vector<std::unique_ptr<attention::Attention>> attentions_;
  DeviceMemory half_in_, half_out_;  // bfloat16 copies, the widest buffer's size each
  int64_t half_size_ = 0;
  DeviceMemory ids_;  // token ids, then logit rows
  PinnedMemory host_ids_;
  kvcache::CacheView cache_;
  const Batch* batch_ = nullptr;
  int64_t tokens_ = 0, logit_rows_ = 0, weight_bytes_ = 0;
};

}  // namespace kvasir::model::cuda
