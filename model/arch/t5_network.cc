#include "model/arch/t5_network.h"

#include <algorithm>
#include <cmath>

namespace kvasir::model {
namespace {

// Parts of one weight, stacked by rows.
Result<Matrix> stacked(Weights& w, Ops& ops, std::initializer_list<std::string> names, int64_t rows, int64_t cols) {
  std::vector<HostTensor> parts;
  for (const std::string& name : names) {
    KVASIR_ASSIGN(parts.emplace_back(), w.get(name + ".weight", rows, cols));
  }
  return ops.load_matrix(w, parts, Shard::rows);
}

}  // namespace

// In float32, as everybody computes it: a distance at a bucket's edge falls on the side that the model was trained
// with.
int32_t bias_bucket(int64_t distance, bool both_ways, int32_t buckets, int32_t reach) {
  int32_t first = 0;
  if (both_ways) {
    buckets /= 2;
    if (distance > 0) first = buckets;
    distance = std::abs(distance);
  } else {
    distance = std::max<int64_t>(-distance, 0);
  }
  const int32_t exact = buckets / 2;
  if (distance < exact) return first + int32_t(distance);
  const float part = std::log(float(distance) / float(exact)) / float(std::log(double(reach) / exact));
  return first + std::min(exact + int32_t(part * float(buckets - exact)), buckets - 1);
}

Result<int32_t> T5::add_attention(Side side, Weights& w, const std::string& biases) {
  attention::Attributes a;
  a.num_heads = a.num_kv_heads = c_.heads;
  a.head_dim = c_.head_dim;
  a.q_scaling = 1 / std::sqrt(float(c_.head_dim));  // scores are not scaled
  a.is_causal = side == Side::target;
  a.append = a.packed_qkv = side != Side::cross;
  if (!biases.empty()) {
    KVASIR_ASSIGN(const HostTensor t, w.get(biases, c_.bias_buckets, c_.heads));
    std::vector<float> values(size_t(c_.bias_buckets) * size_t(c_.heads));
    dequantize(t.type, t.data, int64_t(values.size()), values.data());
    w.release(t);
    for (int32_t h = 0; h < c_.heads; ++h)
      for (int64_t d = -c_.bias_reach; d <= c_.bias_reach; ++d) {
        const int32_t bucket = bias_bucket(d, side == Side::source, c_.bias_buckets, c_.bias_reach);
        a.relative_bias.push_back(values[size_t(bucket) * size_t(c_.heads) + size_t(h)]);
      }
  }
  return ops_.add_attention_of(side, a);
}

Status T5::load(Weights& w, const LoadProgress& progress) {
  LayerLoader in(c_, w, ops_);
  KVASIR_ASSIGN(source_, add_attention(Side::source, w, in.of(0, "enc_attn_rel_b.weight")));
  KVASIR_ASSIGN(target_, add_attention(Side::target, w, in.of(0, "attn_rel_b.weight")));
  KVASIR_ASSIGN(cross_, add_attention(Side::cross, w, ""));
  KVASIR_ASSIGN(embedding_, in.matrix("token_embd", c_.vocab, c_.hidden, Shard::rows, false));
  head_ = embedding_;
  if (w.has("output.weight")) {
    KVASIR_ASSIGN(head_, in.matrix("output", c_.vocab, c_.hidden, Shard::rows, false));
  }
  KVASIR_ASSIGN(source_norm_, in.vector("enc_output_norm.weight", c_.hidden));
  KVASIR_ASSIGN(output_norm_, in.vector("output_norm.weight", c_.hidden, 0, c_.logit_scale));
  encoder_.resize(size_t(c_.encoder_layers));
  decoder_.resize(size_t(c_.decoder_layers));
  for (int32_t i = 0; i < c_.layers; ++i) {
    if (i < c_.encoder_layers) KVASIR_TRY(load_layer(i, w, in, &encoder_[size_t(i)]));
    if (i < c_.decoder_layers) KVASIR_TRY(load_layer(i, w, in, &decoder_[size_t(i)]));
    progress("weights", double(i + 1) / c_.layers);
  }
  return make_buffers();
}

Status T5::load_layer(int32_t i, Weights& w, LayerLoader& in, EncoderLayer* l) {
  auto of = [&](const char* name) { return LayerLoader::of(i, name); };
  const int64_t heads = int64_t(c_.heads) * c_.head_dim;
  KVASIR_ASSIGN(l->attn_norm, in.vector(of("enc_attn_norm.weight"), c_.hidden));
  KVASIR_ASSIGN(l->ffn_norm, in.vector(of("enc_ffn_norm.weight"), c_.hidden));
  KVASIR_ASSIGN(l->qkv, stacked(w, ops_, {of("enc_attn_q"), of("enc_attn_k"), of("enc_attn_v")}, heads, c_.hidden));
  KVASIR_ASSIGN(l->attn_out, in.matrix(of("enc_attn_output"), c_.hidden, heads, Shard::cols, false));
  KVASIR_ASSIGN(l->mlp.up, c_.gated ? stacked(w, ops_, {of("enc_ffn_gate"), of("enc_ffn_up")}, c_.ffn, c_.hidden)
                                    : stacked(w, ops_, {of("enc_ffn_up")}, c_.ffn, c_.hidden));
  KVASIR_ASSIGN(l->mlp.down, in.matrix(of("enc_ffn_down"), c_.hidden, c_.ffn, Shard::cols, false));
  return {};
}

Status T5::load_layer(int32_t i, Weights& w, LayerLoader& in, DecoderLayer* l) {
  auto of = [&](const char* name) { return LayerLoader::of(i, name); };
  const int64_t heads = int64_t(c_.heads) * c_.head_dim;
  KVASIR_ASSIGN(l->attn_norm, in.vector(of("attn_norm.weight"), c_.hidden));
  KVASIR_ASSIGN(l->cross_norm, in.vector(of("cross_attn_norm.weight"), c_.hidden));
  KVASIR_ASSIGN(l->ffn_norm, in.vector(of("ffn_norm.weight"), c_.hidden));
  KVASIR_ASSIGN(l->qkv, stacked(w, ops_, {of("attn_q"), of("attn_k"), of("attn_v")}, heads, c_.hidden));
  KVASIR_ASSIGN(l->attn_out, in.matrix(of("attn_output"), c_.hidden, heads, Shard::cols, false));
  KVASIR_ASSIGN(l->cross_q, in.matrix(of("cross_attn_q"), heads, c_.hidden, Shard::rows, false));
  KVASIR_ASSIGN(l->cross_k, in.matrix(of("cross_attn_k"), heads, c_.hidden, Shard::rows, false));
  KVASIR_ASSIGN(l->cross_v, in.matrix(of("cross_attn_v"), heads, c_.hidden, Shard::rows, false));
  KVASIR_ASSIGN(l->cross_out, in.matrix(of("cross_attn_output"), c_.hidden, heads, Shard::cols, false));
  KVASIR_ASSIGN(l->mlp, in.mlp(i));
  return {};
}

Status T5::make_buffers() {
  const int64_t heads = int64_t(c_.heads) * c_.head_dim;
  KVASIR_ASSIGN(x_, ops_.make_buffer(c_.hidden, false));
  KVASIR_ASSIGN(h_, ops_.make_buffer(c_.hidden, false));
  KVASIR_ASSIGN(qkv_, ops_.make_buffer(3 * heads, false, Shard::rows));
  for (Buffer* b : {&q_, &k_, &v_, &attended_}) {
    KVASIR_ASSIGN(*b, ops_.make_buffer(heads, false, Shard::rows));
  }
  KVASIR_ASSIGN(up_, ops_.make_buffer((c_.gated ? 2 : 1) * int64_t(c_.ffn), false, Shard::rows));
  KVASIR_ASSIGN(ffn_, ops_.make_buffer(c_.ffn, false, Shard::rows));
  KVASIR_ASSIGN(last_, ops_.make_buffer(c_.hidden, true));
  KVASIR_ASSIGN(logits_, ops_.make_buffer(c_.vocab, true, Shard::rows));
  return {};
}

// x += mlp(h)
Status T5::feed_forward(const Mlp& mlp) {
  if (c_.gated) {
    KVASIR_TRY(ops_.linear_glu(h_, mlp.up, c_.activation, up_, ffn_));
  } else {
    KVASIR_TRY(ops_.linear(h_, mlp.up, up_));
    KVASIR_TRY(ops_.activate(c_.activation, up_, ffn_));
  }
  return ops_.add_linear(ffn_, mlp.down, x_);
}

Status T5::encode() {
  KVASIR_TRY(ops_.embed(embedding_, 1, x_));
  for (int32_t i = 0; i < c_.encoder_layers; ++i) {
    const EncoderLayer& l = encoder_[size_t(i)];
    KVASIR_TRY(ops_.norm(x_, l.attn_norm, c_.norm_eps, h_));
    KVASIR_TRY(ops_.linear_attend(h_, l.qkv, {.kind = source_, .layer = i}, qkv_, attended_));
    KVASIR_TRY(ops_.add_linear_norm(attended_, l.attn_out, x_, l.ffn_norm, c_.norm_eps, h_));
    KVASIR_TRY(feed_forward(l.mlp));
  }
  KVASIR_TRY(ops_.norm(x_, source_norm_, c_.norm_eps, h_));
  for (int32_t i = 0; i < c_.decoder_layers; ++i) {
    const DecoderLayer& l = decoder_[size_t(i)];
    KVASIR_TRY(ops_.linear(h_, l.cross_k, k_));
    KVASIR_TRY(ops_.linear(h_, l.cross_v, v_));
    KVASIR_TRY(ops_.store({.kind = source_, .layer = i}, k_, v_));
  }
  return {};
}

Status T5::forward() {
  KVASIR_ASSIGN(const int64_t sources, ops_.turn_to(Side::source));
  if (sources > 0) KVASIR_TRY(encode());
  KVASIR_ASSIGN(const int64_t targets, ops_.turn_to(Side::target));
  if (targets == 0) return {};
  KVASIR_TRY(ops_.embed(embedding_, 1, x_));
  for (int32_t i = 0; i < c_.decoder_layers; ++i) {
    const DecoderLayer& l = decoder_[size_t(i)];
    KVASIR_TRY(ops_.norm(x_, l.attn_norm, c_.norm_eps, h_));
    KVASIR_TRY(ops_.linear_attend(h_, l.qkv, {.kind = target_, .layer = i}, qkv_, attended_));
    KVASIR_TRY(ops_.add_linear_norm(attended_, l.attn_out, x_, l.cross_norm, c_.norm_eps, h_));
    KVASIR_TRY(ops_.linear_attend(h_, l.cross_q, {.kind = cross_, .layer = i}, q_, attended_));
    KVASIR_TRY(ops_.add_linear_norm(attended_, l.cross_out, x_, l.ffn_norm, c_.norm_eps, h_));
    KVASIR_TRY(feed_forward(l.mlp));
  }
  return {};
}

Result<Buffer> T5::hidden(int64_t first, int64_t count) {
  KVASIR_TRY(ops_.take_logit_rows(x_, first, count, last_));
  KVASIR_TRY(ops_.norm(last_, output_norm_, c_.norm_eps, last_));
  return last_;
}

Result<Buffer> T5::logits(int64_t first, int64_t count) {
  KVASIR_ASSIGN(const Buffer last, hidden(first, count));
  KVASIR_TRY(ops_.linear(last, head_, logits_));
  return logits_;
}

Result<std::unique_ptr<Network>> load_t5(const ModelConfig& config, Weights& weights, Ops& ops,
                                         const LoadProgress& progress) {
  auto net = std::make_unique<T5>(config, ops);
  KVASIR_TRY(net->load(weights, progress));
  return std::unique_ptr<Network>(std::move(net));
}

}  // namespace kvasir::model
