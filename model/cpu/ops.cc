#include "model/cpu/ops.h"
#include "model/attention_dtype.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "core/cat.h"
#include "core/check.h"
#include "model/cpu/elementwise.h"
#include "model/streaming.h"

namespace kvasir::model::cpu {
namespace {
// Rows of a product done together: their activations stay in the second-level cache.
constexpr int64_t kRowBytes = 5 << 18;
// Rows that are worth unpacking weights for once more.
constexpr int64_t kRowsApart = 256;

using GateKernel = void (*)(const float* gate, const float* up, int64_t n, float* out);
// Null: a plain loop over activation_of() does it.
GateKernel gate_kernel(const Kernels& kernels, Activation activation) {
  if (activation == Activation::silu) return kernels.silu;
  return activation == Activation::gelu_tanh ? kernels.gelu : nullptr;
}
}  // namespace

void CpuOps::Unmap::operator()(float* p) const { ::munmap(p, bytes); }

Result<Matrix> CpuOps::load_matrix(Weights& source, std::span<const HostTensor> parts, Shard shard) {
  Weight m;
  m.cols = parts[0].cols;
  for (const std::span<const HostTensor> run : runs_of(parts, options_.precise)) {
    if (options_.measured) {
      int64_t bytes = 0;
      m.runs.push_back(measure(run, options_.precise, &bytes));
      measured_ += bytes;
    } else {
      m.runs.push_back(pack(run, arena_, pool_, options_.precise));
    }
    m.rows += m.runs.back().rows, m.groups += m.runs.back().groups;
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

Result<int32_t> CpuOps::add_attention(const attention::Attributes& attributes) {
  KVASIR_ASSIGN(attention::Attributes a, streamed(with_dtype(attributes, options_.runner), options_.runner));
  a.index_mode = options_.index_mode;
  a.page_size = options_.page_size;
  kinds_.push_back(std::move(a));
  side_of_.emplace_back();
  windowed_.push_back(attributes.window > 0);
  return int32_t(kinds_.size() - 1);
}

Result<int32_t> CpuOps::add_attention_of(Side side, const attention::Attributes& attributes) {
  KVASIR_ASSIGN(const int32_t kind, add_attention(attributes));
  kinds_.back().index_mode = kvcache::IndexMode::token_table;
  side_of_.back() = side;
  return kind;
}

Status CpuOps::set_caches(std::vector<kvcache::CacheView> caches, bool apart, std::vector<int32_t> places,
                          std::vector<kvcache::TensorScales> scales) {
  caches_ = std::move(caches);
  apart_ = apart;
  scales_ = std::move(scales);
  places_ = std::move(places);
  attention::Limits limits;
  limits.max_batch = options_.max_batch;
  limits.max_tokens = options_.max_tokens;
  limits.max_kvlen = options_.max_kvlen;
  limits.max_pages = (options_.max_kvlen + options_.page_size - 1) / options_.page_size;
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    limits.cache_tokens = caches_[cache_of(kind)].max_tokens;
    KVASIR_ASSIGN(auto attention, options_.attention->create(kinds_[kind], limits, {.pool = &pool_}));
    attentions_.push_back(std::move(attention));
  }
  return {};
}

Status CpuOps::begin(const Batch& batch, const std::vector<int32_t>& tokens) {
  batch_ = &batch;
  tokens_ = &tokens;
  adapter_rows_.begin(batch, options_.part.rank);
  const bool sided = !side_of_.empty() && side_of_[0];  // all kinds of an encoder-decoder are
  if (sided && std::ssize(batch.sources) != batch.size())
    return internal_error(cat("a step of ", batch.size(), " sequences says the sources of ", batch.sources.size()));
  if (sided) sides_.take(batch, tokens, options_.index_mode, options_.page_size);
  for (size_t kind = 0; kind < attentions_.size(); ++kind) {
    const Batch& of = side_of_[kind] ? sides_.of(*side_of_[kind]) : batch;
    attention::Step step;
    step.batch = of.size();
    step.seqstarts = of.seqstarts.data();
    step.kvstarts = of.kvstarts.data();
    step.start_pos = of.start_pos.data();
    step.max_pages = of.max_pages;
    step.decoding_batches = of.decoding_batches;
    step.max_seqlen = of.max_seqlen;
    step.max_kvlen = of.max_kvlen;
    const size_t group = apart_ ? cache_of(kind) : 0;
    step.cachestarts = group == 0 ? of.cachestarts.data() : of.more_cachestarts[group - 1].data();
    KVASIR_TRY(attentions_[kind]->plan(step));
  }
  return {};
}

Result<int64_t> CpuOps::turn_to(Side side) {
  batch_ = &sides_.of(side);
  tokens_ = &batch_->tokens;
  return int64_t(tokens_->size());
}

Status CpuOps::embed(Matrix table, float scale, Buffer out) {
  const Weight& m = matrices_[size_t(table.id)];
  if (options_.link && shards_[size_t(table.id)] == Shard::rows) return embed_own(m, scale, out);
  each_row(int64_t(tokens_->size()), m.cols * 8,
           [&](int64_t t) { m.unpack((*tokens_)[size_t(t)], scale, data(out) + t * out.cols); });
  return {};
}

// A token's row is one rank's, and zeros of the others.
Status CpuOps::embed_own(const Weight& m, float scale, Buffer out) {
  KVASIR_TRY(make_partials(m.cols));
  const Share& own = options_.part.vocab;
  each_row(int64_t(tokens_->size()), m.cols * 8, [&](int64_t t) {
    const int64_t row = (*tokens_)[size_t(t)] - own.first;
    float* to = data(partial()) + t * m.cols;
    if (row >= 0 && row < own.count)
      m.unpack(row, scale, to);
    else
      std::fill_n(to, m.cols, 0.0f);
  });
  return sum_partials(false, out);
}

Status CpuOps::make_partials(int64_t cols) {
  KVASIR_CHECK(partials_[0].id < 0 || partials_[0].cols == cols, "sums of ", cols, " and ", partials_[0].cols,
               " columns");
  for (Buffer& b : partials_)
    if (b.id < 0) {
      KVASIR_ASSIGN(b, make_buffer(cols, false, Shard::whole));
    }
  return {};
}

Status CpuOps::sum_partials(bool add, Buffer out) {
  Link& link = *options_.link;
  const int64_t cols = partial().cols;
  KVASIR_TRY(link.meet(options_.part.rank, data(partial())));
  each_row(rows(out), cols * link.ranks(), [&](int64_t t) {
    thread_local std::vector<float> sum;
    const float* first = link.published_by(0) + t * cols;
    float* to = data(out) + t * out.cols;
    if (add) {
      sum.assign(first, first + cols);
    } else {
      std::copy_n(first, cols, to);
    }
    for (int32_t r = 1; r < link.ranks(); ++r) add_to(add ? sum.data() : to, link.published_by(r) + t * cols, cols);
    if (add) add_to(to, sum.data(), cols);
  });
  turn_ ^= 1;
  return {};
}

Result<Buffer> CpuOps::gather(Buffer logits) {
  if (!options_.link) return logits;
  Link& link = *options_.link;
  const Share& own = options_.part.vocab;
  const bool first = options_.part.first();
  if (first && whole_logits_.id < 0) {
    KVASIR_ASSIGN(whole_logits_, make_buffer(own.all, true, Shard::whole));
  }
  // Who draws has done with those before.
  KVASIR_TRY(link.meet(options_.part.rank, first ? data(whole_logits_) : nullptr));
  float* to = const_cast<float*>(link.published_by(0)) + own.first;
  each_row(logit_rows_, logits.cols,
           [&](int64_t t) { std::copy_n(data(logits) + t * logits.cols, logits.cols, to + t * own.all); });
  KVASIR_TRY(link.meet(options_.part.rank, nullptr));
  return first ? whole_logits_ : logits;
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

namespace {

double squares_of(const float* x, int64_t count) {
  double sums[4] = {};
  for (int64_t i = 0; i < count; ++i) sums[i % 4] += double(x[i]) * double(x[i]);
  return sums[0] + sums[1] + sums[2] + sums[3];
}

}  // namespace

// Each rank has the sums of squares of its own heads, and learns those of the others. What it publishes stays as it is
// until it is here again, when all have passed the barrier of the layer's first sum.
Status CpuOps::qk_norm_over_ranks(Buffer qkv, int64_t q_cols, Vector q, int64_t kv_cols, Vector k, float eps) {
  Link& link = *options_.link;
  const RankPart& part = options_.part;
  squares_.resize(size_t(2 * rows(qkv)));
  each_row(rows(qkv), q_cols + kv_cols, [&](int64_t t) {
    const float* row = data(qkv) + t * qkv.cols;
    squares_[size_t(2 * t)] = float(squares_of(row, q_cols));
    squares_[size_t(2 * t + 1)] = part.counts_keys() ? float(squares_of(row + q_cols, kv_cols)) : 0;
  });
  KVASIR_TRY(link.meet(part.rank, squares_.data()));
  const int64_t head = q_cols / part.heads.count;
  each_row(rows(qkv), q_cols + kv_cols, [&](int64_t t) {
    float* x = data(qkv) + t * qkv.cols;
    for (int of : {0, 1}) {
      float sum = 0;
      for (int32_t r = 0; r < link.ranks(); ++r) sum += link.published_by(r)[2 * t + of];
      const int64_t all = head * (of == 0 ? part.heads.all : part.kv_heads.all), cols = of == 0 ? q_cols : kv_cols;
      const float by = 1 / std::sqrt(sum / float(all) + eps), *w = vector(of == 0 ? q : k);
      for (int64_t i = 0; i < cols; ++i) x[i] *= by * w[i];
      x += cols;
    }
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

const float* CpuOps::padded_rows(const Weight& m, const float* x, int64_t rows) {
  if (m.padded_cols() == m.cols) return x;
  padded_.assign(size_t(rows * m.padded_cols()), 0.0f);
  for (int64_t t = 0; t < rows; ++t)
    std::memcpy(padded_.data() + t * m.padded_cols(), x + t * m.cols, size_t(m.cols) * sizeof(float));
  return padded_.data();
}

CpuOps::Input CpuOps::input_of(Buffer in, Matrix weight) {
  const Weight& m = matrices_[size_t(weight.id)];
  KVASIR_CHECK(in.cols == m.cols, "rows of ", in.cols, " by a matrix ", m.cols, " wide");
  Input out{m, rows(in), padded_rows(m, data(in), rows(in)), {}, vector(biases_[size_t(weight.id)])};
  const int64_t cols = m.padded_cols();
  for (size_t i = 0; i < m.runs.size(); ++i)
    if (of_integers(m.runs[i])) out.quants[i] = quants_[i].rows(out.rows, cols);
  each_row((out.rows + 1) / 2, 2 * cols, [&](int64_t pair) {
    for (int64_t t = 2 * pair; t < std::min(out.rows, 2 * pair + 2); ++t) out.quantize(kernels_, out.x + t * cols, t);
  });
  out.adapters = adapter_rows_.reduce(weight, out.x, m.padded_cols(), kernels_, pool_);
  return out;
}

void CpuOps::Input::product(const Kernels& kernels, int64_t first, int64_t count, int64_t group, int64_t groups,
                            bool add, float* y, int64_t y_stride) const {
  auto base = [&] {
    int64_t begin = 0;  // of the run
    for (size_t i = 0; i < m.runs.size(); begin += m.runs[i++].groups) {
      const PackedMatrix& run = m.runs[i];
      const int64_t from = std::max(group, begin), some = std::min(group + groups, begin + run.groups) - from;
      if (some <= 0) continue;
      float* to = y + (from - group) * kGroup;
      if (quants[i].q)
        kernels.integer(run, from - begin, some, quants[i], first, count, to, y_stride, add);
      else
        kernels.floating(run, from - begin, some, x + first * run.padded_cols(), run.padded_cols(), count, to, y_stride,
                         add);
    }
  };
  const int64_t cols = std::min(m.rows - group * kGroup, groups * kGroup);
  if (adapters)
    adapters->around(kernels, first, count, group * kGroup, cols, add, y, y_stride, base);
  else
    base();
  if (!bias) return;
  for (int64_t t = 0; t < count; ++t) add_to(y + t * y_stride, bias + group * kGroup, cols);
}

template <class F>
void CpuOps::each_piece(const Input& in, int64_t groups, int64_t most_groups, const F& f) {
  int64_t row_bytes = in.m.padded_cols() * (in.floats() ? 4 : 3);
  const int64_t threads = pool_.threads(), most = std::max<int64_t>(32, kRowBytes / row_bytes / 32 * 32);
  // Workers have rows of their own where there are enough, each_row()'s: what one has written another reads slowly.
  int64_t spans = std::max((in.rows + most - 1) / most, std::min(threads, in.rows / kRowsApart));
  if (spans > threads) spans = (spans + threads - 1) / threads * threads;
  const int64_t span = (in.rows + 32 * spans - 1) / (32 * spans) * 32;
  spans = (in.rows + span - 1) / span;
  // As many pieces for each worker, and none larger than another by more than a group; of few rows not many, since
  // kernels begin each by waiting for its first weights, unless a group takes longer than that wait: who has a
  // neighbour on its core is then helped by the others. One or two rows take as long as reading the weights: a worker
  // reads its own at one go, but for an eighth that others may take.
  const int64_t smallest = in.rows > 8 && kernels_.slow_groups ? 2 : 8;
  const int64_t each = in.rows > 16 ? 4 : std::clamp<int64_t>(groups / (smallest * threads), 1, 32 / smallest);
  const int64_t least = std::max((groups + most_groups - 1) / most_groups, each * threads);
  const bool reading = in.rows <= 2;
  const int64_t parts = reading ? 2 * threads : std::min(groups, (least + threads - 1) / threads * threads);
  auto bound = [&](int64_t part) {
    return reading ? groups * (part / 2 * 8 + part % 2 * 7) / (8 * threads) : groups * part / parts;
  };
  pool_.for_each_near(spans * parts, [&](int64_t i, int worker) {
    const int64_t first = i / parts * span, part = i % parts;
    const int64_t group = bound(part), end = bound(part + 1);
    if (end > group) f(first, std::min(span, in.rows - first), group, end - group, worker);
  });
}

Status CpuOps::linear(Buffer in, Matrix weight, bool add, Buffer out) {
  const Weight& m = matrices_[size_t(weight.id)];
  KVASIR_CHECK(out.cols == m.rows, m.rows, " columns into ", out.cols);
  const bool sum = summed(weight);
  const Buffer to = sum ? partial() : out;
  Input input = input_of(in, weight);
  each_piece(input, m.groups, 16, [&](int64_t first, int64_t count, int64_t group, int64_t groups, int) {
    input.product(kernels_, first, count, group, groups, add && !sum, data(to) + first * to.cols + group * kGroup,
                  to.cols);
  });
  return sum ? sum_partials(add, out) : Status();
}

// A piece's gates, and what they are to open, stay in the second-level cache instead of going through the buffer.
Status CpuOps::linear_glu(Buffer in, Matrix weight, Activation activation, Buffer between, Buffer out) {
  const Weight& m = matrices_[size_t(weight.id)];
  KVASIR_CHECK(2 * out.cols == m.rows, m.rows, " columns in halves into ", out.cols);
  auto f = gate_kernel(kernels_, activation);
  if (out.cols % kGroup != 0 || !f) return Ops::linear_glu(in, weight, activation, between, out);
  constexpr int64_t kRows = 512;  // weights are unpacked for each so many
  Input input = input_of(in, weight);
  int64_t half = m.groups / 2;
  gates_.resize(size_t(pool_.threads()));
  each_piece(input, half, input.rows > 16 ? 4 : 16,
             [&](int64_t first, int64_t count, int64_t group, int64_t groups, int worker) {
               int64_t cols = groups * kGroup;
               std::vector<float>& room = gates_[size_t(worker)];
               room.resize(std::max(room.size(), size_t(std::min(count, kRows) * 2 * cols)));
               for (int64_t end = first + count; first < end; first += kRows) {
                 int64_t n = std::min(kRows, end - first);
                 input.product(kernels_, first, n, group, groups, false, room.data(), 2 * cols);
                 input.product(kernels_, first, n, half + group, groups, false, room.data() + cols, 2 * cols);
                 float* to = data(out) + first * out.cols + group * kGroup;
                 for (int64_t t = 0; t < n; ++t) {
                   const float* gate = room.data() + t * 2 * cols;
                   f(gate, gate + cols, cols, to + t * out.cols);
                 }
               }
             });
  return {};
}

void CpuOps::glu_row(Activation activation, const float* gate, const float* up, int64_t n, float* out) const {
  if (auto f = gate_kernel(kernels_, activation)) return f(gate, up, n, out);
  for (int64_t i = 0; i < n; ++i) out[i] = activation_of(activation, gate[i]) * up[i];
}

Status CpuOps::glu(Activation activation, Buffer in, Buffer out) {
  each_row(rows(in), out.cols * 4, [&](int64_t t) {
    const float* gate = data(in) + t * in.cols;
    glu_row(activation, gate, gate + out.cols, out.cols, data(out) + t * out.cols);
  });
  return {};
}

Status CpuOps::activate(Activation activation, Buffer in, Buffer out) {
  each_row(rows(in), out.cols * 8, [&](int64_t t) {
    const float* from = data(in) + t * in.cols;
    float* to = data(out) + t * out.cols;
    for (int64_t i = 0; i < out.cols; ++i) to[i] = activation_of(activation, from[i]);
  });
  return {};
}

Status CpuOps::attend(const Attend& how, Buffer qkv, Buffer out) {
  attention::Tensors t;
  t.query = data(qkv);
  t.output = data(out);
  t.sink_logits = vector(how.sinks);
  t.cache = cache_for(how);
  if (!scales_.empty()) t.q_scale = scales_[size_t(how.layer)].q;
  t.layer = places_[size_t(how.layer)];
  return attentions_[size_t(how.kind)]->run(t);
}

kvcache::CacheView CpuOps::cache_for(const Attend& how) const {
  kvcache::CacheView c = caches_[cache_of(size_t(how.kind))];
  if (!scales_.empty()) c.k_scale = scales_[size_t(how.layer)].k, c.v_scale = scales_[size_t(how.layer)].v;
  return c;
}

Status CpuOps::store(const Attend& how, Buffer keys, Buffer values) {
  attention::KvcTensors t;
  t.key = data(keys), t.value = data(values);
  t.cache = cache_for(how);
  t.layer = places_[size_t(how.layer)];
  return attentions_[size_t(how.kind)]->store_and_gather(t);
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
