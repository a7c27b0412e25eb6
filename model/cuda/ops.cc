#include "model/cuda/ops.h"

#include <algorithm>
#include <bit>

#include "attention/cuda/cuda.h"
#include "core/cat.h"
#include "core/check.h"
#include "model/attention_dtype.h"
#include "model/attention_step.h"
#include "model/cuda/elementwise.h"
#include "model/cuda/kernels.h"
#include "model/cuda/packed.h"
#include "model/streaming.h"

namespace kvasir::model::cuda {

using attention::cuda::check;

// Four sizes between a power of two and the next, so that padding costs little.
int64_t CudaOps::padded(int64_t rows) {
  const int64_t step = std::max<int64_t>(1, int64_t(std::bit_ceil(uint64_t(rows))) / 8);
  return (rows + step - 1) / step * step;
}

Status CudaOps::prepare() {
  upload_.emplace(options_.load_threads, stream_);
  KVASIR_ASSIGN(products_, Products::open(stream_, options_.batch_invariant));
  // Choices that fork from one row draw from it each.
  const auto ids = size_t(most_rows() + 5 * options_.max_tokens) * sizeof(int32_t);
  for (int slot : {0, 1}) {
    KVASIR_TRY(ids_[slot].allocate(ids));
    KVASIR_TRY(host_ids_[slot].allocate(ids));
    KVASIR_TRY(drawn_[slot].allocate(ids));
    KVASIR_TRY(check(cudaMemsetAsync(drawn_[slot].get(), 0, ids, stream_), "drawn tokens"));
  }
  return {};
}

Result<Matrix> CudaOps::load_matrix(Weights& source, std::span<const HostTensor> parts, Shard shard) {
  auto w = std::make_shared<Loaded>();
  w->shard = shard;
  KVASIR_TRY(load_weight(parts, options_.quantize, *upload_, w.get()));
  KVASIR_TRY(products_->make_room(*w));
  for (const HostTensor& t : parts) source.release(t);
  any_bytes_ |= w->packing == Packing::fp8;
  weight_bytes_ += w->bytes;
  Matrix m{int32_t(matrices_.size()), w->rows, w->cols};
  if (options_.link && shard == Shard::cols) KVASIR_TRY(make_partials(w->rows));
  matrices_.push_back(std::move(w));
  return m;
}

Result<Vector> CudaOps::load_vector(Weights& source, std::span<const HostTensor> parts, float shift, float scale) {
  std::vector<float> v;
  for (const HostTensor& t : parts) {
    const size_t at = v.size();
    v.resize(at + size_t(t.cols));
    dequantize(t.type, t.data, t.cols, v.data() + at);
    source.release(t);
  }
  std::vector<uint16_t> half;
  for (float& f : v) f = (f + shift) * scale, half.push_back(f32_to_bf16(f));
  Values& to = *vectors_.emplace_back(std::make_shared<Values>());
  KVASIR_TRY(to.data.upload(v.data(), v.size() * 4));
  KVASIR_TRY(to.half_data.upload(half.data(), half.size() * 2));
  return Vector{int32_t(vectors_.size() - 1), int64_t(v.size())};
}

Result<Buffer> CudaOps::make_buffer(int64_t cols, bool logit_rows, Shard shard) {
  const auto size = size_t((logit_rows ? options_.max_logit_rows : options_.max_tokens) * cols);
  auto room = std::make_unique<Room>();
  room->logit_rows = logit_rows;
  KVASIR_TRY(room->data.allocate(size * 4));
  KVASIR_TRY(room->half_data.allocate(size * 2));
  if (any_bytes_ && !logit_rows) {
    KVASIR_TRY(room->elements.allocate(size));
    KVASIR_TRY(room->scales.allocate(size_t(options_.max_tokens) * sizeof(float)));
  }
  if (options_.link && logit_rows && shard == Shard::rows)
    options_.link->publish_logits(options_.part.rank, room->data.as<float>(), options_.part.vocab);
  buffers_.push_back(std::move(room));
  const Buffer made{int32_t(buffers_.size() - 1), cols};
  if (options_.link && logit_rows && shard == Shard::rows) {
    KVASIR_ASSIGN(whole_logits_, make_buffer(options_.part.vocab.all, true, Shard::whole));
  }
  return made;
}

Result<int32_t> CudaOps::add_attention(const attention::Attributes& attributes) {
  KVASIR_ASSIGN(attention::Attributes a, streamed(with_dtype(attributes, options_.runner), options_.runner));
  a.index_mode = options_.index_mode;
  a.page_size = options_.page_size;
  a.io = a.out = DType::bf16;
  a.batch_invariant = options_.batch_invariant;
  kinds_.push_back(std::move(a));
  windowed_.push_back(attributes.window > 0);
  side_of_.emplace_back();
  return int32_t(kinds_.size() - 1);
}

// A target begins anywhere in a page.
Result<int32_t> CudaOps::add_attention_of(Side side, const attention::Attributes& attributes) {
  KVASIR_ASSIGN(const int32_t kind, add_attention(attributes));
  kinds_.back().index_mode = kvcache::IndexMode::token_table;
  side_of_.back() = side;
  return kind;
}

Result<int32_t> CudaOps::add_experts(Experts experts) {
  if (!experts_) experts_.emplace(options_.max_tokens, options_.batch_invariant, stream_);
  if (router_logits_.cols < experts.routing.experts) {
    KVASIR_ASSIGN(router_logits_, make_buffer(experts.routing.experts, false, Shard::whole));
  }
  std::vector<ExpertLayers::Part> up, down;
  for (const Mlp& mlp : experts.mlps) {
    if (mlp.up.id < 0) continue;  // another rank's
    for (auto [m, parts] : {std::pair(mlp.up, &up), std::pair(mlp.down, &down)}) {
      Loaded& w = *matrices_[size_t(m.id)];
      parts->push_back({&w, w.bias ? w.bias->data.as<float>() : nullptr});
      weight_bytes_ -= w.bytes;
    }
  }
  return experts_->add(std::move(experts), int32_t(options_.part.experts.first), up, down, *upload_);
}

Status CudaOps::moe(Buffer in, int32_t id, Buffer out, Buffer routed) {
  const Experts& experts = experts_->layer(id);
  const Buffer logits{router_logits_.id, experts.routing.experts};
  KVASIR_TRY(linear(routed.id < 0 ? in : routed, experts.router, logits));
  KVASIR_ASSIGN(const void* half, read_half(in));
  KVASIR_CHECK(!room(out).half, "what is added to is float32");
  const bool apart = options_.link != nullptr;
  void* to = apart ? write_half(partial()) : data(out);
  if (!apart) written(out, false);
  KVASIR_TRY(
      experts_->run(id, half, data(logits), vector(experts.correction), vector(experts.scales), rows(in), apart, to));
  return apart ? sum_partials(true, out) : Status();
}

Status CudaOps::sigmoid_gate(Buffer in, Vector gate, Buffer in_out) {
  KVASIR_ASSIGN(const void* from, read_half(in));
  const bool half = room(in_out).half;
  if (half) KVASIR_TRY(read_half(in_out).status());
  void* to = half ? room(in_out).half_data.get() : data(in_out);
  launch_sigmoid_gate(from, vector(gate), in.cols, to, half, in_out.cols, rows(in), stream_);
  written(in_out, half);
  return launched("sigmoid_gate");
}

Status CudaOps::set_caches(std::vector<kvcache::CacheView> caches, bool apart, std::vector<int32_t> places,
                           std::vector<kvcache::TensorScales> scales) {
  caches_ = std::move(caches);
  apart_ = apart;
  places_ = std::move(places);
  scales_ = std::move(scales);
  attention::Limits limits = limits_of(options_);
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    limits.cache_tokens = caches_[cache_of(kind)].max_tokens;
    KVASIR_ASSIGN(auto attention, options_.attention->create(kinds_[kind], limits, {.stream = stream_}));
    attentions_.push_back(std::move(attention));
  }
  return {};
}

Status CudaOps::begin(const Batch& batch, const std::vector<int32_t>& tokens) {
  if (sided() && std::ssize(batch.sources) != batch.size())
    return internal_error(cat("a step of ", batch.size(), " sequences says the sources of ", batch.sources.size()));
  if (sided()) sides_.take(batch, tokens, options_.index_mode, options_.page_size);
  // The tables of other modes are of tokens, and those of windowed layers stale at their beginning.
  const bool tables = options_.index_mode == kvcache::IndexMode::page_table && !options_.batch_invariant && !sided();
  if (tables) shared_.find(batch, options_.page_size);
  for (size_t kind = 0; kind < attentions_.size(); ++kind) {
    const Batch& of = sided() ? sides_.of(*side_of_[kind]) : batch;
    const size_t group = apart_ ? cache_of(kind) : 0;
    attention::Step step = step_of(of, group);
    const bool shares = tables && shared_.any() && group == 0;
    step.shared_group = shares ? shared_.groups().data() : nullptr;
    step.shared_len = shares ? shared_.lengths().data() : nullptr;
    KVASIR_TRY(attentions_[kind]->plan(step));
  }
  slot_ ^= 1;
  turn_ = 0, sum_is_last_ = false;
  KVASIR_TRY(adapters_.begin(batch, options_.part.rank, slot_, stream_));
  sources_ = sided() ? std::ssize(sides_.of(Side::source).tokens) : 0;
  if (sources_ > 0) {
    const std::vector<int32_t>& of = sides_.of(Side::source).tokens;
    std::copy(of.begin(), of.end(), host_ids_[slot_].as<int32_t>());
  }
  return sided() ? upload(sides_.of(Side::target), sides_.of(Side::target).tokens) : upload(batch, tokens);
}

// The sources' token ids are there already.
Status CudaOps::upload(const Batch& batch, const std::vector<int32_t>& tokens) {
  tokens_ = std::ssize(tokens);
  int64_t logit_rows = std::ssize(batch.logit_rows);
  decodes_ = sources_ == 0 && tokens_ == batch.size() && tokens_ == logit_rows && batch.pools.empty() &&
             tokens_ <= options_.max_logit_rows;
  if (decodes_) tokens_ = logit_rows = std::min(padded(tokens_), options_.max_logit_rows);
  step_logit_rows_ = logit_rows, first_id_ = sources_, targets_ = tokens_;
  int32_t* ids = host_ids_[slot_].as<int32_t>() + sources_;
  const int64_t count = (states_ ? 5 : 3) * tokens_ + logit_rows;
  std::fill_n(ids, count, 0);
  std::copy(tokens.begin(), tokens.end(), ids);
  std::copy(batch.logit_rows.begin(), batch.logit_rows.end(), ids + tokens_);
  std::copy(batch.positions.begin(), batch.positions.end(), ids + tokens_ + logit_rows);
  std::copy(batch.types.begin(), batch.types.end(), ids + 2 * tokens_ + logit_rows);
  keeps_ = !batch.kept_at.empty(), given_cols_ = batch.given_cols;
  if (states_) {
    int32_t* at = ids + 3 * tokens_ + logit_rows;
    std::fill_n(at, tokens_, -1);
    std::copy(batch.kept_at.begin(), batch.kept_at.end(), at);
    std::copy(batch.given_at.begin(), batch.given_at.end(), at + tokens_);
  }
  if (linear_layers_) KVASIR_TRY(linear_layers_->begin(batch, tokens_, slot_));
  return check(cudaMemcpyAsync(ids_[slot_].get(), host_ids_[slot_].get(), size_t(sources_ + count) * sizeof(int32_t),
                               cudaMemcpyHostToDevice, stream_),
               "token ids");
}

Result<int64_t> CudaOps::turn_to(Side side) {
  tokens_ = side == Side::source ? sources_ : targets_;
  first_id_ = side == Side::source ? 0 : sources_;
  return tokens_;
}

uint64_t CudaOps::key() const {
  uint64_t key = (uint64_t(tokens_) * 2 + uint64_t(slot_)) ^ adapters_.key() ^ (uint64_t(given_cols_) << 32);
  for (const auto& a : attentions_) {
    const uint64_t launches = dynamic_cast<const attention::cuda::GraphKeyed&>(*a).launch_key();
    if (launches == 0) return 0;  // its first run() prepares what later ones need
    key = key * 1099511628211ull ^ launches;
  }
  return key;
}

Status CudaOps::embed(Matrix table, float scale, Buffer out) {
  const Loaded& w = *matrices_[size_t(table.id)];
  if (options_.link && w.shard == Shard::rows) return embed_own(w, scale, out);
  return embed_rows(w, ids(), drawn_[slot_ ^ 1].as<int32_t>(), scale, out);
}

Status CudaOps::embed_rows(const Loaded& w, const int32_t* ids, const int32_t* before, float scale, Buffer out) {
  if (is_blocks(w.packing))
    launch_embed_packed(w.packing, ids, before, w.data.get(), w.unit, scale, write(out), tokens_, w.cols, stream_);
  else
    launch_embed(ids, before, w.data.get(), scale, write(out), tokens_, w.cols, stream_);
  return launched("embed");
}

Status CudaOps::unpack(Loaded* w) {
  DeviceMemory half;
  KVASIR_TRY(as_half(*w, &half, stream_).status());
  KVASIR_TRY(check(cudaStreamSynchronize(stream_), "unpacking a table"));
  weight_bytes_ += w->rows * w->cols * 2 - w->bytes;
  w->data = std::move(half), w->packing = Packing::bf16;
  return {};
}

// Small tables that are read by row: packed ones become bfloat16 when they are first read.
Status CudaOps::add_row(Matrix table, RowOf which, int64_t shift, Buffer out) {
  Loaded& w = *matrices_[size_t(table.id)];
  if (w.packing != Packing::bf16) KVASIR_TRY(unpack(&w));
  (void)read(out);
  launch_add_row(w.data.get(), ids(which == RowOf::type ? 2 : 1), shift, w.rows - 1, data(out), tokens_, w.cols,
                 stream_);
  return launched("add_row");
}

const float* CudaOps::read(Buffer b) {
  KVASIR_CHECK(!room(b).half, "buffer ", b.id, " holds bfloat16, which only products and attention read");
  return data(b);
}

Result<const void*> CudaOps::read_half(Buffer b) {
  Room& r = room(b);
  if (!r.half) launch_to_bf16(data(b), r.half_data.get(), rows(b) * b.cols, stream_);
  if (r.half_lacks) launch_from_bytes(r.as_bytes(), r.half_data.get(), rows(b), b.cols, stream_);
  r.half_lacks = false;
  KVASIR_TRY(launched("to_bf16"));
  return r.half_data.get();
}

Result<Bytes> CudaOps::read_bytes(Buffer b) {
  Room& r = room(b);
  KVASIR_CHECK(r.elements.get(), "buffer ", b.id, " has no room for E4M3");
  if (!r.bytes) {
    KVASIR_ASSIGN(const void* half, read_half(b));
    launch_to_bytes(half, r.as_bytes(), rows(b), b.cols, stream_);
    KVASIR_TRY(launched("to E4M3"));
    r.bytes = r.half;  // float32 may be added to, unseen
  }
  return r.as_bytes();
}

Status CudaOps::norm(Buffer in, Vector weight, float eps, Buffer out) {
  const float* from = read(in);
  if (norms_to_bytes(in.cols, out)) {
    void* half = write_half(out);
    launch_norm_bytes(from, vector(weight), eps, half, room(out).as_bytes(), rows(in), in.cols, stream_);
    room(out).bytes = true;
    return launched("norm");
  }
  launch_norm(from, vector(weight), eps, write_half(out), rows(in), in.cols, stream_, options_.batch_invariant,
              out.cols);
  return launched("norm");
}

Status CudaOps::add_norm(Buffer in, Vector weight, float eps, Buffer out) {
  KVASIR_CHECK(!room(out).half, "what is added to is float32");
  launch_add_norm(read(in), vector(weight), eps, data(out), rows(in), in.cols, stream_, options_.batch_invariant);
  return launched("add_norm");
}

Status CudaOps::qk_norm(Buffer qkv, int64_t q_cols, Vector q, int64_t kv_cols, Vector k, float eps) {
  const float* from = read(qkv);
  if (q.size == k.size && q.size <= kMostHead && q.size % 4 == 0) {
    launch_qk_norm(from, q_cols / q.size, vector(q), kv_cols / k.size, vector(k), q.size, eps, write_half(qkv),
                   rows(qkv), stream_);
    return launched("qk_norm");
  }
  for (auto [first, cols, weight] : {std::tuple(int64_t(0), q_cols, q), std::tuple(q_cols, kv_cols, k)})
    launch_head_norm(data(qkv) + first, qkv.cols, cols / weight.size, weight.size, vector(weight), eps, rows(qkv),
                     stream_, options_.batch_invariant);
  return launched("qk_norm");
}

Status CudaOps::norm_pieces(Buffer in_out, int64_t first, int64_t cols, Vector weight, float eps) {
  KVASIR_CHECK(first + cols <= in_out.cols && cols % weight.size == 0 && first % weight.size == 0, cols,
               " columns from ", first, " in pieces of ", weight.size);
  (void)read(in_out);
  launch_head_norm(data(in_out) + first, in_out.cols, cols / weight.size, weight.size, vector(weight), eps,
                   rows(in_out), stream_, options_.batch_invariant);
  return launched("norm_pieces");
}

Status CudaOps::add(Buffer in, Buffer out) {
  KVASIR_CHECK(in.cols == out.cols, in.cols, " columns onto ", out.cols);
  (void)read(out);
  launch_add(read(in), data(out), rows(in) * in.cols, stream_);
  return launched("add");
}

Status CudaOps::scale(Buffer in_out, float factor) {
  const int64_t count = rows(in_out) * in_out.cols;
  if (factor == 0) return check(cudaMemsetAsync(write(in_out), 0, size_t(count) * sizeof(float), stream_), "scale");
  (void)read(in_out);
  launch_scale(data(in_out), factor, count, stream_);
  return launched("scale");
}

// Only a product reads what comes of it, as bfloat16.
Status CudaOps::gate(Activation activation, Buffer in_out, Buffer by, int64_t first) {
  KVASIR_CHECK(first + in_out.cols <= by.cols, in_out.cols, " columns from ", first, " of ", by.cols);
  const float* from = read(in_out);
  launch_gate(activation, from, read(by) + first, by.cols, write_half(in_out), rows(in_out), in_out.cols, stream_);
  return launched("gate");
}

Status CudaOps::layer_norm(Buffer in, Vector weight, Vector bias, float eps, Buffer out) {
  const bool from_half = room(in).half, half = in.id != out.id;
  const void* from = from_half ? room(in).half_data.get() : data(in);
  void* to = half ? write_half(out) : write(out);
  launch_layer_norm(from, from_half, vector(weight), vector(bias), eps, to, half, rows(in), in.cols, stream_);
  return launched("layer_norm");
}

Status CudaOps::scale_by_position(Buffer in_out, int64_t cols, float slope, int64_t unit) {
  if (room(in_out).half) return unimplemented("queries that are normed and scaled by position are the CPU's alone");
  launch_scale_by_position(data(in_out), ids(1), slope, unit, rows(in_out), cols, in_out.cols, stream_);
  return launched("scale_by_position");
}

Status CudaOps::softcap(Buffer in_out, float cap) {
  (void)read(in_out);
  launch_softcap(data(in_out), cap, rows(in_out) * in_out.cols, stream_);
  return launched("softcap");
}

Status CudaOps::activate(Activation activation, Buffer in, Buffer out) {
  const bool half = room(in).half;
  const void* from = half ? room(in).half_data.get() : data(in);
  launch_activate(activation, false, from, half, write_half(out), rows(in), out.cols, stream_);
  return launched("activate");
}

Status CudaOps::attend(const Attend& how, const Values* bias, Buffer qkv, Buffer out) {
  attention::Tensors t;
  KVASIR_ASSIGN(t.query, read_half(qkv));
  if (bias) t.qkv_bias = bias->half_data.get();
  t.sink_logits = vector(how.sinks);
  t.output = write_half(out);
  t.cache = cache_for(how);
  t.layer = places_[size_t(how.layer)];
  if (!scales_.empty()) t.q_scale = scales_[size_t(how.layer)].q;
  return attentions_[size_t(how.kind)]->run(t);
}

kvcache::CacheView CudaOps::cache_for(const Attend& how) const {
  kvcache::CacheView c = caches_[cache_of(size_t(how.kind))];
  if (!scales_.empty()) c.k_scale = scales_[size_t(how.layer)].k, c.v_scale = scales_[size_t(how.layer)].v;
  if (kvcache::keys_alone(c)) c.v_scale = c.k_scale;
  return c;
}

Status CudaOps::store(const Attend& how, Buffer keys, Buffer values) {
  attention::KvcTensors t;
  KVASIR_ASSIGN(t.key, read_half(keys));
  KVASIR_ASSIGN(t.value, read_half(values));
  t.cache = cache_for(how);
  t.layer = places_[size_t(how.layer)];
  return attentions_[size_t(how.kind)]->store_and_gather(t);
}

Status CudaOps::take_logit_rows(Buffer in, int64_t first, int64_t count, Buffer out) {
  KVASIR_CHECK(count <= options_.max_logit_rows, count, " logit rows, room for ", options_.max_logit_rows);
  logit_rows_ = count;
  launch_take_rows(read(in), ids() + tokens_ + first, write(out), count, in.cols, stream_);
  return launched("take_logit_rows");
}

}  // namespace kvasir::model::cuda
