#include "model/arch/latent_attention.h"

#include <cstring>

#include "model/formats/slices.h"

namespace kvasir::model {
namespace {

// Of the two latents' norms, whatever the others' is: their makers' code gives them no other.
constexpr float kEps = 1e-6f;

// Transposed: single elements keep their type, blocks become float32.
HostTensor transposed(const HostTensor& t) {
  const TypeInfo& type = *type_info(t.type);
  const bool as_it_is = type.block == 1 && t.row_scales.empty();
  HostTensor out{.type = as_it_is ? t.type : WeightType::f32, .rows = t.cols, .cols = t.rows};
  const int64_t each = as_it_is ? type.bytes : 4, wide = t.scales_a_row();
  out.bytes = each * t.rows * t.cols;
  std::shared_ptr<uint8_t[]> to(new uint8_t[size_t(out.bytes)]);
  std::vector<float> numbers(as_it_is ? 0 : size_t(t.cols));
  for (int64_t r = 0; r < t.rows; ++r) {
    const uint8_t* row = t.data + r * t.row_bytes();
    if (!as_it_is) {
      dequantize(t.type, row, t.cols, numbers.data());
      for (int64_t c = 0; c < t.cols && wide > 0; ++c)
        numbers[size_t(c)] *= t.row_scales[size_t(r * wide + (wide > 1 ? c / 128 : 0))];
      row = reinterpret_cast<const uint8_t*>(numbers.data());
    }
    for (int64_t c = 0; c < t.cols; ++c) std::memcpy(to.get() + (c * t.rows + r) * each, row + c * each, size_t(each));
  }
  out.data = to.get();
  out.owned = std::move(to);
  return out;
}

}  // namespace

LatentAttention::LatentAttention(const ModelConfig& config, Ops& ops)
    : c_(config.latent), heads_(config.heads), hidden_(config.hidden), bias_(config.qkv_bias), ops_(ops) {}

Status LatentAttention::load_layer(int32_t layer, LayerLoader& in) {
  Layer& l = layers_.emplace_back();
  auto of = [&](const char* name) { return LayerLoader::of(layer, name); };
  const int64_t q = heads_ * (c_.nope + c_.rope);
  if (c_.query_rank > 0) {
    KVASIR_ASSIGN(l.q_a, in.matrix(of("attn_q_a"), c_.query_rank, hidden_, Shard::whole, bias_));
    KVASIR_ASSIGN(l.q_norm, in.vector(of("attn_q_a_norm.weight"), c_.query_rank));
    KVASIR_ASSIGN(l.q, in.matrix(of("attn_q_b"), q, c_.query_rank, Shard::whole, false));
  } else {
    KVASIR_ASSIGN(l.q, in.matrix(of("attn_q"), q, hidden_, Shard::whole, false));
  }
  KVASIR_ASSIGN(l.row, in.matrix(of("attn_kv_a_mqa"), c_.rank + c_.rope, hidden_, Shard::whole, bias_));
  KVASIR_ASSIGN(l.row_norm, in.vector(of("attn_kv_a_norm.weight"), c_.rank));
  return in.weights().has(of("attn_kv_b.weight")) ? load_heads_of_one(layer, in, &l) : load_heads(layer, in, &l);
}

// As newer GGUF files have them.
Status LatentAttention::load_heads(int32_t layer, LayerLoader& in, Layer* l) {
  Weights& w = in.weights();
  auto load = [&](const char* name, int64_t rows, int64_t cols, HeadMatrices* to) -> Status {
    KVASIR_ASSIGN(const HostTensor all, w.get(LayerLoader::of(layer, name), heads_ * rows, cols));
    std::vector<HostTensor> own;
    for (int64_t h = 0; h < heads_; ++h) own.push_back(rows_of(all, h * rows, rows)), own.back().name.clear();
    KVASIR_ASSIGN(*to, ops_.load_heads(w, own));
    w.release(all);
    return {};
  };
  KVASIR_TRY(load("attn_k_b.weight", c_.rank, c_.nope, &l->keys));
  return load("attn_v_b.weight", c_.value, c_.rank, &l->values);
}

// As one weight, of each head what makes its keys and then what makes its values.
Status LatentAttention::load_heads_of_one(int32_t layer, LayerLoader& in, Layer* l) {
  Weights& w = in.weights();
  const int64_t each = c_.nope + c_.value;
  KVASIR_ASSIGN(const HostTensor all, w.get(LayerLoader::of(layer, "attn_kv_b.weight"), heads_ * each, c_.rank));
  std::vector<HostTensor> keys, values;
  for (int64_t h = 0; h < heads_; ++h) {
    keys.push_back(transposed(rows_of(all, h * each, c_.nope)));
    values.push_back(rows_of(all, h * each + c_.nope, c_.value)), values.back().name.clear();
  }
  KVASIR_ASSIGN(l->keys, ops_.load_heads(w, keys));
  KVASIR_ASSIGN(l->values, ops_.load_heads(w, values));
  w.release(all);
  return {};
}

Status LatentAttention::make_buffers() {
  if (c_.query_rank > 0) {
    KVASIR_ASSIGN(q_latent_, ops_.make_buffer(c_.query_rank, false));
  }
  KVASIR_ASSIGN(q_, ops_.make_buffer(heads_ * (c_.nope + c_.rope), false));
  KVASIR_ASSIGN(row_, ops_.make_buffer(c_.rank + c_.rope, false));
  KVASIR_ASSIGN(attended_, ops_.make_buffer(heads_ * (c_.rope + c_.rank), false));
  return {};
}

Status LatentAttention::attend(const Attend& how, Buffer in, Buffer between, Buffer out) {
  const Layer& l = layers_[size_t(how.layer)];
  const int64_t head = c_.rope + c_.rank, q = c_.nope + c_.rope, key = heads_ * head;
  if (c_.query_rank > 0) {
    KVASIR_TRY(ops_.linear(in, l.q_a, q_latent_));
    KVASIR_TRY(ops_.norm(q_latent_, l.q_norm, kEps, q_latent_));
  }
  KVASIR_TRY(ops_.linear_pieces(c_.query_rank > 0 ? q_latent_ : in, l.q, q_));
  KVASIR_TRY(ops_.copy_pieces(q_, {c_.nope, q}, between, {0, head}, c_.rope, heads_));
  KVASIR_TRY(ops_.linear_heads(q_, {0, q}, l.keys, between, {c_.rope, head}));
  KVASIR_TRY(ops_.linear(in, l.row, row_));
  KVASIR_TRY(ops_.norm_pieces(row_, 0, c_.rank, l.row_norm, kEps));
  KVASIR_TRY(ops_.copy_pieces(row_, {c_.rank, 0}, between, {key, 0}, c_.rope, 1));
  KVASIR_TRY(ops_.copy_pieces(row_, {0, 0}, between, {key + c_.rope, 0}, c_.rank, 1));
  KVASIR_TRY(ops_.attend(how, between, attended_));
  return ops_.linear_heads(attended_, {c_.rope, head}, l.values, out, {0, c_.value});
}

std::vector<std::pair<std::string_view, Matrix>> LatentAttention::weights(int32_t layer) const {
  const Layer& l = layers_[size_t(layer)];
  if (c_.query_rank == 0) return {{"attn_q", l.q}, {"attn_kv_a_mqa", l.row}};
  return {{"attn_q_a", l.q_a}, {"attn_q_b", l.q}, {"attn_kv_a_mqa", l.row}};
}

}  // namespace kvasir::model
