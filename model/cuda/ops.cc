#include "model/cuda/ops.h"

#include <algorithm>
#include <cstring>

#include "core/cat.h"
#include "core/check.h"
#include "model/cuda/kernels.h"

namespace kvasir::model::cuda {

using attention::cuda::check;

Status CudaOps::prepare() {
  KVASIR_ASSIGN(cublas_, Cublas::open(stream_));
  size_t ids = size_t(2 * options_.max_tokens) * sizeof(int32_t);
  KVASIR_TRY(ids_.allocate(ids));
  return host_ids_.allocate(ids);
}

Result<Matrix> CudaOps::load_matrix(Weights& source, std::span<const HostTensor> parts, Shard) {
  auto w = std::make_unique<Weight>();
  w->cols = parts[0].cols;
  for (const HostTensor& t : parts) w->rows += t.rows;
  std::vector<uint16_t> half(size_t(w->rows * w->cols));
  std::vector<float> row(size_t(w->cols));
  size_t at = 0;
  for (const HostTensor& t : parts) {
    for (int64_t r = 0; r < t.rows; ++r) {
      dequantize(t.type, t.data + r * t.row_bytes(), t.cols, row.data());
      for (float f : row) half[at++] = f32_to_bf16(f);
    }
    source.release(t);
  }
  KVASIR_TRY(w->data.upload(half.data(), half.size() * 2));
  weight_bytes_ += int64_t(half.size()) * 2;
  Matrix m{int32_t(matrices_.size()), w->rows, w->cols};
  matrices_.push_back(std::move(w));
  return m;
}

Result<Vector> CudaOps::load_vector(Weights& source, const HostTensor& tensor, float shift) {
  std::vector<float> v(size_t(tensor.cols));
  dequantize(tensor.type, tensor.data, tensor.cols, v.data());
  for (float& f : v) f += shift;
  source.release(tensor);
  vectors_.push_back(std::make_unique<DeviceMemory>());
  KVASIR_TRY(vectors_.back()->upload(v.data(), v.size() * 4));
  return Vector{int32_t(vectors_.size() - 1), tensor.cols};
}

Result<Buffer> CudaOps::make_buffer(int64_t cols, bool logit_rows, Shard) {
  int64_t rows = logit_rows ? options_.max_logit_rows : options_.max_tokens;
  auto room = std::make_unique<Room>();
  room->cols = cols, room->logit_rows = logit_rows;
  KVASIR_TRY(room->data.allocate(size_t(rows * cols) * sizeof(float)));
  half_size_ = std::max(half_size_, rows * cols);
  buffers_.push_back(std::move(room));
  return Buffer{int32_t(buffers_.size() - 1), cols};
}

Result<int32_t> CudaOps::add_attention(const attention::Attributes& attributes) {
  attention::Attributes a = attributes;
  a.index_mode = options_.index_mode;
  a.page_size = options_.page_size;
  a.io = a.out = DType::bf16;
  kinds_.push_back(std::move(a));
  return int32_t(kinds_.size() - 1);
}

Status CudaOps::set_cache(const kvcache::CacheView& cache) {
  cache_ = cache;
  attention::Limits limits;
  limits.max_batch = options_.max_batch;
  limits.max_tokens = options_.max_tokens;
  limits.max_kvlen = options_.max_kvlen;
  limits.max_pages = (options_.max_kvlen + options_.page_size - 1) / options_.page_size;
  limits.cache_tokens = cache.max_tokens;
  for (const attention::Attributes& a : kinds_) {
    KVASIR_ASSIGN(auto attention, options_.attention->create(a, limits, {.stream = stream_}));
    attentions_.push_back(std::move(attention));
  }
  KVASIR_TRY(half_in_.allocate(size_t(half_size_) * 2));
  return half_out_.allocate(size_t(half_size_) * 2);
}

Status CudaOps::begin(const Batch& batch, const std::vector<int32_t>& tokens) {
  batch_ = &batch;
  tokens_ = int64_t(tokens.size());
  attention::Step step;
  step.batch = batch.size();
  step.seqstarts = batch.seqstarts.data();
  step.kvstarts = batch.kvstarts.data();
  step.start_pos = batch.start_pos.data();
  step.cachestarts = batch.cachestarts.data();
  step.max_pages = batch.max_pages;
  step.decoding_batches = batch.decoding_batches;
  step.max_seqlen = batch.max_seqlen;
  step.max_kvlen = batch.max_kvlen;
  for (auto& a : attentions_) KVASIR_TRY(a->plan(step));
  int32_t* ids = host_ids_.as<int32_t>();
  std::copy(tokens.begin(), tokens.end(), ids);
  std::copy(batch.logit_rows.begin(), batch.logit_rows.end(), ids + tokens.size());
  return check(cudaMemcpyAsync(ids_.get(), ids, (tokens.size() + batch.logit_rows.size()) * sizeof(int32_t),
                               cudaMemcpyHostToDevice, stream_),
               "token ids");
}

Status CudaOps::embed(Matrix table, float scale, Buffer out) {
  const Weight& w = *matrices_[size_t(table.id)];
  launch_embed(ids_.as<int32_t>(), w.data.get(), scale, data(out), tokens_, w.cols, stream_);
  return launched("embed");
}

Status CudaOps::norm(Buffer in, Vector weight, float eps, bool add, Buffer out) {
  launch_norm(data(in), in.cols, vectors_[size_t(weight.id)]->as<float>(), eps, add, data(out), out.cols, rows(in),
              in.cols, stream_);
  return launched("norm");
}

Status CudaOps::head_norm(Buffer in_out, int64_t first, int64_t count, Vector weight, float eps) {
  launch_head_norm(data(in_out), in_out.cols, first, count, weight.size, vectors_[size_t(weight.id)]->as<float>(), eps,
                   rows(in_out), stream_);
  return launched("head_norm");
}

Status CudaOps::linear(Buffer in, Matrix weight, bool add, Buffer out) {
  const Weight& w = *matrices_[size_t(weight.id)];
  KVASIR_CHECK(in.cols == w.cols && out.cols == w.rows, "a product of ", in.cols, " by ", w.rows, " x ", w.cols,
               " into ", out.cols);
  launch_to_bf16(data(in), half_in_.get(), rows(in) * in.cols, stream_);
  KVASIR_TRY(launched("to_bf16"));
  return cublas_->product(half_in_.get(), w.data.get(), data(out), rows(in), w.rows, w.cols, add);
}

Status CudaOps::glu(Activation activation, Buffer in, Buffer out) {
  launch_glu(activation != Activation::silu, data(in), data(out), rows(in), out.cols, stream_);
  return launched("glu");
}

Status CudaOps::attend(int32_t kind, int32_t layer, Buffer qkv, Buffer out) {
  launch_to_bf16(data(qkv), half_in_.get(), tokens_ * qkv.cols, stream_);
  attention::Tensors t;
  t.query = half_in_.get();
  t.output = half_out_.get();
  t.cache = cache_;
  t.layer = layer;
  KVASIR_TRY(attentions_[size_t(kind)]->run(t));
  launch_from_bf16(half_out_.get(), data(out), tokens_ * out.cols, stream_);
  return launched("attend");
}

Status CudaOps::take_logit_rows(Buffer in, int64_t first, int64_t count, Buffer out) {
  KVASIR_CHECK(count <= options_.max_logit_rows, count, " logit rows, room for ", options_.max_logit_rows);
  logit_rows_ = count;
  launch_take_rows(data(in), ids_.as<int32_t>() + tokens_ + first, data(out), count, in.cols, stream_);
  return launched("take_logit_rows");
}

}  // namespace kvasir::model::cuda
