#include "model/arch/gemma4_network.h"

#include <algorithm>
#include <cmath>

namespace kvasir::model {
namespace {

constexpr float kHalf = 0.70710678f;  // of two that are added, so that their sum is as large as each

Result<attention::Attributes> attention_of(const ModelConfig& c, int32_t layer) {
  attention::Attributes a;
  a.num_heads = c.heads;
  a.num_kv_heads = c.kv_heads_of(layer);
  a.head_dim = c.head_dim_of(layer);
  a.packed_qkv = a.append = c.cache_layer(layer) == layer;
  a.window = c.windowed(layer) ? c.window : 0;
  a.q_scaling = 1 / std::sqrt(float(a.head_dim));  // scores are as they come
  KVASIR_ASSIGN(a.rope, attention::rope_frequencies(c.windowed(layer) ? c.local_rope : c.rope));
  if (!c.windowed(layer))
    for (size_t i = 0; i < c.rope_divisors.size(); ++i) a.rope.inv_freq[i] /= c.rope_divisors[i];
  return a;
}

// A norm without weights has these.
Result<Vector> ones(Weights& w, Ops& ops, int64_t size) {
  std::shared_ptr<uint8_t[]> zeros(new uint8_t[size_t(4 * size)]());
  const HostTensor t{
      .type = WeightType::f32, .cols = size, .data = zeros.get(), .bytes = 4 * size, .owned = std::move(zeros)};
  return ops.load_vector(w, {&t, 1}, 1, 1);
}

}  // namespace

Result<size_t> Gemma4::kind_of(int32_t layer, Weights& w) {
  const bool windowed = c_.windowed(layer), own = c_.cache_layer(layer) == layer;
  for (size_t k = 0; k < kinds_.size(); ++k)
    if (kinds_[k].windowed == windowed && kinds_[k].own_cache == own) return k;
  Kind k{windowed, own, 0, int64_t(c_.heads) * c_.head_dim_of(layer), 0, {}, {}, {}};
  if (own) k.kv = int64_t(c_.kv_heads_of(layer)) * c_.head_dim_of(layer);
  KVASIR_ASSIGN(auto attributes, attention_of(c_, layer));
  KVASIR_ASSIGN(k.attention, ops_.add_attention(attributes));
  KVASIR_ASSIGN(k.ones, ones(w, ops_, c_.head_dim_of(layer)));
  kinds_.push_back(k);
  return kinds_.size() - 1;
}

size_t Gemma4::width_of(int64_t ffn) {
  for (size_t i = 0; i < widths_.size(); ++i)
    if (widths_[i].ffn == ffn) return i;
  widths_.push_back({ffn, {}, {}});
  return widths_.size() - 1;
}

Status Gemma4::load(Weights& w, const LoadProgress& progress) {
  KVASIR_TRY(ops_.takes_uneven_layers());
  LayerLoader in(c_, w, ops_);
  KVASIR_ASSIGN(embedding_, in.matrix("token_embd", c_.vocab, c_.hidden, Shard::whole, false));
  head_ = embedding_;
  if (w.has("output.weight")) {
    KVASIR_ASSIGN(head_, in.matrix("output", c_.vocab, c_.hidden, Shard::rows, false));
  }
  KVASIR_ASSIGN(output_norm_, in.vector("output_norm.weight", c_.hidden));
  if (c_.layer_input > 0) KVASIR_TRY(load_layer_inputs(in));
  for (int32_t i = 0; i < c_.layers; ++i) {
    KVASIR_TRY(load_layer(i, w, in));
    progress("weights", double(i + 1) / c_.layers);
  }
  return make_buffers();
}

// After the weights: what these are multiplied as says what room their inputs need.
Status Gemma4::make_buffers() {
  auto make = [&](Buffer& b, int64_t cols, bool logit_rows = false, Shard shard = Shard::whole) -> Status {
    KVASIR_ASSIGN(b, ops_.make_buffer(cols, logit_rows, shard));
    return {};
  };
  for (Buffer* b : {&x_, &h_}) KVASIR_TRY(make(*b, c_.hidden));
  KVASIR_TRY(make(last_, c_.hidden, true));
  KVASIR_TRY(make(logits_, c_.vocab, true));
  if (c_.experts.routing.experts > 0)
    for (Buffer* b : {&routed_, &both_, &mixed_}) KVASIR_TRY(make(*b, c_.hidden));
  if (c_.layer_input > 0) {
    for (Buffer* b : {&inputs_, &token_inputs_}) KVASIR_TRY(make(*b, int64_t(c_.layers) * c_.layer_input));
    KVASIR_TRY(make(input_, c_.layer_input));
  }
  for (Kind& k : kinds_) {
    KVASIR_TRY(make(k.qkv, k.q + 2 * k.kv, false, Shard::rows));
    KVASIR_TRY(make(k.attended, k.q, false, Shard::rows));
  }
  for (Width& w : widths_) {
    KVASIR_TRY(make(w.up, 2 * w.ffn, false, Shard::rows));
    KVASIR_TRY(make(w.gated, w.ffn, false, Shard::rows));
  }
  return {};
}

Status Gemma4::load_layer_inputs(LayerLoader& in) {
  const int64_t all = int64_t(c_.layers) * c_.layer_input;
  KVASIR_ASSIGN(input_table_, in.matrix("per_layer_token_embd", c_.vocab, all, Shard::whole, false));
  KVASIR_ASSIGN(input_projection_, in.matrix("per_layer_model_proj", all, c_.hidden, Shard::whole, false));
  KVASIR_ASSIGN(input_norm_, in.vector("per_layer_proj_norm.weight", c_.layer_input, 0, kHalf));
  return {};
}

Status Gemma4::load_layer(int32_t i, Weights& w, LayerLoader& in) {
  Layer& l = layers_.emplace_back();
  auto norm = [&](const char* name, Vector* out, int64_t size = 0, float scale = 1) -> Status {
    KVASIR_ASSIGN(*out, in.vector(in.of(i, name), size > 0 ? size : c_.hidden, 0, scale));
    return {};
  };
  KVASIR_ASSIGN(l.kind, kind_of(i, w));
  l.width = width_of(c_.ffn_of(i));
  KVASIR_TRY(norm("attn_norm.weight", &l.attn_norm));
  KVASIR_ASSIGN(l.qkv, in.qkv(i));
  KVASIR_TRY(norm("attn_q_norm.weight", &l.q_norm, c_.head_dim_of(i)));
  if (kinds_[l.kind].own_cache) KVASIR_TRY(norm("attn_k_norm.weight", &l.k_norm, c_.head_dim_of(i)));
  KVASIR_ASSIGN(l.attn_out, in.attention_out(i));
  KVASIR_TRY(norm("post_attention_norm.weight", &l.post_attn_norm));
  KVASIR_TRY(norm("ffn_norm.weight", &l.ffn_norm));
  KVASIR_ASSIGN(l.mlp, in.mlp(i));
  if (c_.experts.in_layer(i)) {
    KVASIR_ASSIGN(Experts experts, in.experts(i));
    KVASIR_ASSIGN(l.experts, ops_.add_experts(std::move(experts)));
    KVASIR_TRY(norm("ffn_gate_inp.scale", &l.router_norm, c_.hidden, 1 / std::sqrt(float(c_.hidden))));
    KVASIR_TRY(norm("pre_ffw_norm_2.weight", &l.experts_norm));
    KVASIR_TRY(norm("post_ffw_norm_1.weight", &l.post_mlp_norm));
    KVASIR_TRY(norm("post_ffw_norm_2.weight", &l.post_experts_norm));
  }
  KVASIR_TRY(norm("post_ffw_norm.weight", &l.post_ffn_norm));
  if (c_.layer_input > 0) {
    KVASIR_ASSIGN(l.input_gate, in.matrix(in.of(i, "inp_gate"), c_.layer_input, c_.hidden, Shard::whole, false));
    KVASIR_ASSIGN(l.input_out, in.matrix(in.of(i, "proj"), c_.hidden, c_.layer_input, Shard::whole, false));
    KVASIR_TRY(norm("post_norm.weight", &l.post_input_norm));
  }
  if (const std::string name = in.of(i, "layer_output_scale.weight"); w.has(name)) {
    KVASIR_ASSIGN(const HostTensor t, w.get(name, 1, 1));
    dequantize(t.type, t.data, 1, &l.scale);
    w.release(t);
  }
  return {};
}

// What the stream says of each layer's part, and what the token itself does.
Status Gemma4::give_layer_inputs() {
  const float hidden = float(c_.hidden), n = float(c_.layer_input);
  KVASIR_TRY(ops_.linear(x_, input_projection_, inputs_));
  // The projection's scale, hidden^-.5, is that of the epsilon it is normed with.
  KVASIR_TRY(ops_.norm_pieces(inputs_, 0, inputs_.cols, input_norm_, c_.norm_eps * hidden));
  KVASIR_TRY(ops_.embed(input_table_, std::sqrt(n) * kHalf, token_inputs_));
  return ops_.add(token_inputs_, inputs_);
}

Status Gemma4::attend(const Layer& l, int32_t i) {
  const Kind& k = kinds_[l.kind];
  KVASIR_TRY(ops_.linear(h_, l.qkv, k.qkv));
  KVASIR_TRY(ops_.norm_pieces(k.qkv, 0, k.q, l.q_norm, c_.norm_eps));
  if (k.own_cache) {
    KVASIR_TRY(ops_.norm_pieces(k.qkv, k.q, k.kv, l.k_norm, c_.norm_eps));
    KVASIR_TRY(ops_.norm_pieces(k.qkv, k.q + k.kv, k.kv, k.ones, c_.norm_eps));
  }
  return ops_.attend({.kind = k.attention, .layer = c_.cache_layer(i)}, k.qkv, k.attended);
}

Status Gemma4::feed_forward(const Layer& l) {
  const Width& w = widths_[l.width];
  KVASIR_TRY(ops_.linear_glu(h_, l.mlp.up, c_.activation, w.up, w.gated));
  KVASIR_TRY(ops_.linear(w.gated, l.mlp.down, h_));
  if (l.experts < 0) return ops_.add_norm(h_, l.post_ffn_norm, c_.norm_eps, x_);
  KVASIR_TRY(ops_.scale(both_, 0));  // a device may keep what norm() leaves for products alone: sums are added to
  KVASIR_TRY(ops_.add_norm(h_, l.post_mlp_norm, c_.norm_eps, both_));
  KVASIR_TRY(ops_.norm(x_, l.experts_norm, c_.norm_eps, h_));
  KVASIR_TRY(ops_.norm(x_, l.router_norm, c_.norm_eps, routed_));
  KVASIR_TRY(ops_.scale(mixed_, 0));
  KVASIR_TRY(ops_.moe(h_, l.experts, mixed_, routed_));
  KVASIR_TRY(ops_.add_norm(mixed_, l.post_experts_norm, c_.norm_eps, both_));
  return ops_.add_norm(both_, l.post_ffn_norm, c_.norm_eps, x_);
}

Status Gemma4::add_layer_input(const Layer& l, int32_t i) {
  KVASIR_TRY(ops_.linear(x_, l.input_gate, input_));
  KVASIR_TRY(ops_.gate(c_.activation, input_, inputs_, int64_t(i) * c_.layer_input));
  KVASIR_TRY(ops_.linear(input_, l.input_out, h_));
  return ops_.add_norm(h_, l.post_input_norm, c_.norm_eps, x_);
}

Status Gemma4::forward() {
  KVASIR_TRY(ops_.embed(embedding_, c_.embedding_scale, x_));
  if (c_.layer_input > 0) KVASIR_TRY(give_layer_inputs());
  for (int32_t i = 0; i < c_.layers; ++i) {
    const Layer& l = layers_[size_t(i)];
    KVASIR_TRY(ops_.norm(x_, l.attn_norm, c_.norm_eps, h_));
    KVASIR_TRY(attend(l, i));
    KVASIR_TRY(ops_.linear(kinds_[l.kind].attended, l.attn_out, h_));
    KVASIR_TRY(ops_.add_norm(h_, l.post_attn_norm, c_.norm_eps, x_));
    KVASIR_TRY(ops_.norm(x_, l.ffn_norm, c_.norm_eps, h_));
    KVASIR_TRY(feed_forward(l));
    if (c_.layer_input > 0) KVASIR_TRY(add_layer_input(l, i));
    if (l.scale != 1) KVASIR_TRY(ops_.scale(x_, l.scale));
  }
  return {};
}

Result<Buffer> Gemma4::hidden(int64_t first, int64_t count) {
  KVASIR_TRY(ops_.take_logit_rows(x_, first, count, last_));
  KVASIR_TRY(ops_.norm(last_, output_norm_, c_.norm_eps, last_));
  return last_;
}

Result<Buffer> Gemma4::logits(int64_t first, int64_t count) {
  KVASIR_ASSIGN(const Buffer last, hidden(first, count));
  KVASIR_TRY(ops_.linear(last, head_, logits_));
  if (c_.logit_softcap > 0) KVASIR_TRY(ops_.softcap(logits_, c_.logit_softcap));
  return logits_;
}

Result<std::unique_ptr<Network>> load_gemma4(const ModelConfig& config, Weights& weights, Ops& ops,
                                             const LoadProgress& progress) {
  auto net = std::make_unique<Gemma4>(config, ops);
  KVASIR_TRY(net->load(weights, progress));
  return std::unique_ptr<Network>(std::move(net));
}

}  // namespace kvasir::model
