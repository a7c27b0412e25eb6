#include "model/cpu/ops.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "core/cat.h"
#include "core/check.h"
#include "model/cpu/elementwise.h"

namespace kvasir::model::cpu {

void CpuOps::Unmap::operator()(float* p) const { ::munmap(p, bytes); }

Result<Matrix> CpuOps::load_matrix(Weights& source, std::span<const HostTensor> parts, Shard shard) {
  Weight m;
  m.cols = parts[0].cols;
  if (options_.measure) {
    measured_ += options_.measure(parts);
    for (const HostTensor& t : parts) m.rows += t.rows;
  } else {
    for (const std::span<const HostTensor> run : runs_of(parts, options_.precise)) {
      m.runs.push_back(pack(run, arena_, pool_, options_.precise));
      m.rows += m.runs.back().rows, m.groups += m.runs.back().groups;
    }
  }
  const Matrix made{int32_t(matrices_.size()), m.rows, m.cols};
  matrices_.push_back(std::move(m));
  biases_.emplace_back();
  shards_.push_back(shard);
  if (options_.link && shard == Shard::cols) KVASIR_TRY(make_partials(made.rows));
  for (const HostTensor& t : parts) source.release(t);
  return made;
}

void CpuOps::Weight::unpack(int64_t row, float scale, float* out) const {
  const PackedMatrix* run = runs.data();
  while (row >= run->rows) row -= run++->rows;
  unpack_row(*run, row, scale, out);
}

Result<Vector> CpuOps::load_vector(Weights& source, std::span<const HostTensor> parts, float shift, float scale) {
  std::vector<float> v;
  for (const HostTensor& t : parts) {
    const size_t at = v.size();
    v.resize(at + size_t(t.cols));
    dequantize(t.type, t.data, t.cols, v.data() + at);
    source.release(t);
  }
  for (float& f : v) f = (f + shift) * scale;
  vectors_.push_back(std::move(v));
  return Vector{int32_t(vectors_.size() - 1), int64_t(vectors_.back().size())};
}

int64_t CpuOps::vector_bytes() const {
  int64_t bytes = 0;
  for (const auto& v : vectors_) bytes += std::ssize(v) * int64_t(sizeof(float));
  return bytes;
}

int64_t CpuOps::buffer_bytes() const {
  int64_t bytes = 0;
  for (const Room& b : buffers_)
    bytes += (b.logit_rows ? options_.max_logit_rows : options_.max_tokens) * b.cols * int64_t(sizeof(float));
  return bytes;
}

void CpuOps::set_bias(Matrix weight, Vector bias) {
  KVASIR_CHECK(bias.size == weight.rows, "a bias of ", bias.size, " for ", weight.rows, " rows");
  biases_[size_t(weight.id)] = bias;
}

Matrix CpuOps::borrow(const CpuOps& from, Matrix weight) {
  const auto of = size_t(weight.id);
  matrices_.push_back(from.matrices_[of]);
  shards_.push_back(Shard::whole);
  biases_.emplace_back();
  if (const Vector bias = from.biases_[of]; bias.id >= 0) {
    vectors_.push_back(from.vectors_[size_t(bias.id)]);
    biases_.back() = Vector{int32_t(vectors_.size() - 1), bias.size};
  }
  return Matrix{int32_t(matrices_.size() - 1), weight.rows, weight.cols};
}

Result<AdapterPtr> CpuOps::load_adapter(std::span<const LowRank> changes, int64_t room) {
  KVASIR_ASSIGN(auto adapter,
                CpuAdapter::make(changes, options_.precise, room, [this](Matrix m, int64_t row, float* out) {
                  matrices_[size_t(m.id)].unpack(row, 1, out);
                }));
  return AdapterPtr(std::move(adapter));
}

Result<Buffer> CpuOps::make_buffer(int64_t cols, bool logit_rows, Shard) {
  int64_t rows = logit_rows ? options_.max_logit_rows : options_.max_tokens;
  size_t bytes = size_t(rows * cols) * sizeof(float);
  // Mapped, so that rows no step has used yet cost no memory.
  void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return resource_exhausted(cat("no memory for ", bytes, " bytes of activations"));
  ::madvise(p, bytes, MADV_HUGEPAGE);  // kernels write columns: each row would be another small page
  buffers_.push_back({std::unique_ptr<float, Unmap>(static_cast<float*>(p), Unmap{bytes}), cols, logit_rows});
  return Buffer{int32_t(buffers_.size() - 1), cols};
}

Status CpuOps::embed(Matrix table, float scale, Buffer out) {
  const Weight& m = matrices_[size_t(table.id)];
  if (options_.link && shards_[size_t(table.id)] == Shard::rows) return embed_own(m, scale, out);
  each_row(int64_t(tokens_->size()), m.cols * 8,
           [&](int64_t t) { m.unpack((*tokens_)[size_t(t)], scale, data(out) + t * out.cols); });
  return {};
}

Status CpuOps::add_row(Matrix table, RowOf which, int64_t shift, Buffer out) {
  const Weight& m = matrices_[size_t(table.id)];
  const bool types = which == RowOf::type;
  each_row(int64_t(tokens_->size()), m.cols * 8, [&](int64_t t) {
    thread_local std::vector<float> row;
    row.resize(size_t(m.cols));
    const int64_t of = types ? batch_->types.empty() ? 0 : batch_->types[size_t(t)] : batch_->positions[size_t(t)];
    m.unpack(std::min(of + shift, m.rows - 1), 1, row.data());
    add_to(data(out) + t * out.cols, row.data(), m.cols);
  });
  return {};
}

Status CpuOps::norm(Buffer in, Vector weight, float eps, bool add, Buffer out) {
  const float* w = vectors_[size_t(weight.id)].data();
  each_row(rows(in), in.cols,
           [&](int64_t t) { kernels_.norm(data(in) + t * in.cols, w, in.cols, eps, add, data(out) + t * out.cols); });
  return {};
}

Status CpuOps::layer_norm(Buffer in, Vector weight, Vector bias, float eps, Buffer out) {
  const float *w = vector(weight), *b = vector(bias);
  each_row(rows(in), in.cols,
           [&](int64_t t) { cpu::layer_norm(data(in) + t * in.cols, w, b, in.cols, eps, data(out) + t * out.cols); });
  return {};
}

Status CpuOps::qk_norm(Buffer qkv, int64_t q_cols, Vector q, int64_t kv_cols, Vector k, float eps) {
  each_row(rows(qkv), q_cols + kv_cols, [&](int64_t t) {
    float* row = data(qkv) + t * qkv.cols;
    for (int64_t i = 0; i < q_cols; i += q.size) kernels_.norm(row + i, vector(q), q.size, eps, false, row + i);
    for (int64_t i = q_cols; i < q_cols + kv_cols; i += k.size)
      kernels_.norm(row + i, vector(k), k.size, eps, false, row + i);
  });
  return {};
}

Status CpuOps::norm_pieces(Buffer in_out, int64_t first, int64_t cols, Vector weight, float eps) {
  KVASIR_CHECK(first + cols <= in_out.cols && cols % weight.size == 0, cols, " columns in pieces of ", weight.size);
  each_row(rows(in_out), cols, [&](int64_t t) {
    float* x = data(in_out) + t * in_out.cols + first;
    for (int64_t i = 0; i < cols; i += weight.size)
      kernels_.norm(x + i, vector(weight), weight.size, eps, false, x + i);
  });
  return {};
}

Status CpuOps::add(Buffer in, Buffer out) {
  KVASIR_CHECK(in.cols == out.cols, in.cols, " columns onto ", out.cols);
  each_row(rows(in), in.cols, [&](int64_t t) { add_to(data(out) + t * out.cols, data(in) + t * in.cols, in.cols); });
  return {};
}

Status CpuOps::scale(Buffer in_out, float factor) {
  each_row(rows(in_out), in_out.cols, [&](int64_t t) {
    float* x = data(in_out) + t * in_out.cols;
    if (factor == 0) return void(std::fill_n(x, in_out.cols, 0.0f));
    for (int64_t i = 0; i < in_out.cols; ++i) x[i] *= factor;
  });
  return {};
}

Status CpuOps::gate(Activation activation, Buffer in_out, Buffer by, int64_t first) {
  KVASIR_CHECK(first + in_out.cols <= by.cols, in_out.cols, " columns from ", first, " of ", by.cols);
  each_row(rows(in_out), in_out.cols * 8, [&](int64_t t) {
    float* x = data(in_out) + t * in_out.cols;
    glu_row(activation, x, data(by) + t * by.cols + first, in_out.cols, x);
  });
  return {};
}

Status CpuOps::keep(Buffer in, int64_t first, float factor) {
  if (batch_->kept_at.empty()) return {};
  KVASIR_CHECK(first + in.cols <= state_cols_, "columns to ", first + in.cols, " of ", state_cols_);
  if (options_.link && !options_.part.first()) return {};
  each_row(rows(in), in.cols, [&](int64_t t) {
    const float* x = data(in) + t * in.cols;
    const int64_t at = batch_->kept_at[size_t(t)];
    if (at < 0) return;
    float* to = states_.get() + at * state_cols_ + first;
    for (int64_t i = 0; i < in.cols; ++i) to[i] = x[i] * factor;
  });
  return {};
}

Status CpuOps::take_given(Buffer out) {
  KVASIR_CHECK(int64_t(batch_->given_at.size()) == rows(out) && batch_->given_cols == out.cols, batch_->given_at.size(),
               " rows of ", batch_->given_cols, " columns into ", rows(out), " of ", out.cols);
  each_row(rows(out), out.cols, [&](int64_t t) {
    std::copy_n(states_.get() + batch_->given_at[size_t(t)] * state_cols_, out.cols, data(out) + t * out.cols);
  });
  return {};
}

Status CpuOps::place(Buffer in, int64_t first, Buffer out) {
  KVASIR_CHECK(first + in.cols <= out.cols, in.cols, " columns at ", first, " of ", out.cols);
  each_row(rows(in), in.cols,
           [&](int64_t t) { std::copy_n(data(in) + t * in.cols, in.cols, data(out) + t * out.cols + first); });
  return {};
}

Status CpuOps::scale_by_position(Buffer in_out, int64_t cols, float slope, int64_t unit) {
  each_row(rows(in_out), cols, [&](int64_t t) {
    const float scale = position_scale(batch_->positions[size_t(t)], slope, unit);
    float* x = data(in_out) + t * in_out.cols;
    for (int64_t i = 0; i < cols; ++i) x[i] *= scale;
  });
  return {};
}

Status CpuOps::softcap(Buffer in_out, float cap) {
  each_row(rows(in_out), in_out.cols * 8,
           [&](int64_t t) { cpu::softcap(data(in_out) + t * in_out.cols, in_out.cols, cap); });
  return {};
}

Status CpuOps::take_logit_rows(Buffer in, int64_t first, int64_t count, Buffer out) {
  KVASIR_CHECK(count <= options_.max_logit_rows, count, " logit rows, room for ", options_.max_logit_rows);
  logit_rows_ = count;
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(data(out) + i * out.cols, data(in) + batch_->logit_rows[size_t(first + i)] * in.cols,
                size_t(in.cols) * sizeof(float));
  return {};
}

}  // namespace kvasir::model::cpu
