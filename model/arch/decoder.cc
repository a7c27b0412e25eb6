#include "model/arch/decoder.h"

#include <cmath>

#include "core/check.h"

#include "model/arch/layer_loader.h"

namespace kvasir::model {
namespace {

// Keys further away on either side get nothing of a softmax.
std::vector<float> window_each_way(const ModelConfig& c) {
  constexpr float kUnseen = -1e9f;
  std::vector<float> bias;
  for (int32_t head = 0; head < c.heads; ++head) {
    bias.push_back(kUnseen);
    bias.insert(bias.end(), 2 * size_t(c.window_each_way) + 1, 0.0f);
    bias.push_back(kUnseen);
  }
  return bias;
}

Result<attention::Attributes> attention_of(const ModelConfig& c, LayerKind kind) {
  attention::Attributes a;
  a.num_heads = c.heads;
  a.num_kv_heads = c.kv_heads;
  a.head_dim = c.head_dim;
  a.unread_columns = c.latent.rope;
  a.packed_qkv = true;
  a.is_causal = !c.encoder;
  a.window = kind.windowed ? c.window : 0;
  if (kind.windowed && c.window_each_way > 0) a.relative_bias = window_each_way(c);
  // Scores are divided by q_scaling * sqrt(head_dim).
  if (c.query_scale > 0) a.q_scaling = 1.0f / (c.query_scale * std::sqrt(float(c.head_dim)));
  a.softcap = c.attention_softcap;
  a.is_alibi = c.alibi;
  a.alibi_slopes = c.alibi_slopes;
  if (!kind.rotated) return a;
  const bool local = kind.windowed && c.local_rope.rotary_dim > 0;
  KVASIR_ASSIGN(a.rope, attention::rope_frequencies(local ? c.local_rope : c.rope));
  if (!local)
    for (size_t i = 0; i < c.rope_divisors.size(); ++i) a.rope.inv_freq[i] /= c.rope_divisors[i];
  return a;
}

}  // namespace

// A stream of x / r that sublayers add to as they are is the stream x that they add to times r: norms make the same of
// both once their epsilon is divided by r squared.
Decoder::Decoder(const ModelConfig& config, Ops& ops) : c_(config), ops_(ops) {
  if (const float r = c_.residual_scale; r != 1) c_.embedding_scale /= r, c_.norm_eps /= r * r;
  if (c_.latent.on()) latent_ = std::make_unique<LatentAttention>(c_, ops_);
}

Status Decoder::load(Weights& w, const LoadProgress& progress) {
  LayerLoader in(c_, w, ops_);
  auto norm = [&](const char* name, float scale, Norm* out) -> Status {
    KVASIR_ASSIGN(out->weight, in.vector(cat(name, ".weight"), c_.hidden, c_.norm_shift, scale));
    if (c_.norm == NormKind::layer && c_.norm_bias) {
      KVASIR_ASSIGN(out->bias, in.vector(cat(name, ".bias"), c_.hidden, 0, scale));
    }
    return {};
  };
  KVASIR_ASSIGN(embedding_, in.matrix("token_embd", c_.vocab, c_.hidden, Shard::rows, false, c_.part.vocab));
  head_ = embedding_;
  if (w.has("output.weight")) {
    KVASIR_ASSIGN(head_, in.matrix("output", c_.vocab, c_.hidden, Shard::rows, c_.head_bias, c_.part.vocab));
  }
  if (c_.embedding_norm) KVASIR_TRY(norm("token_embd_norm", 1, &embedding_norm_));
  KVASIR_TRY(norm("output_norm", c_.logit_scale, &output_norm_));
  for (int32_t i = 0; i < c_.layers; ++i) {
    KVASIR_TRY(load_layer(i, in));
    progress("weights", double(i + 1) / c_.layers);
  }
  return make_buffers();
}

Status Decoder::load_layer(int32_t i, LayerLoader& in) {
  DecoderLayer& l = layers_.emplace_back();
  auto norm = [&](const char* name, Norm* out) -> Status {
    KVASIR_ASSIGN(out->weight, in.vector(in.of(i, cat(name, ".weight")), c_.hidden, c_.norm_shift));
    if (c_.norm == NormKind::layer && c_.norm_bias) {
      KVASIR_ASSIGN(out->bias, in.vector(in.of(i, cat(name, ".bias")), c_.hidden));
    }
    return {};
  };
  if (c_.input_norms && (i > 0 || c_.first_norm)) KVASIR_TRY(norm("attn_norm", &l.attn_norm));
  KVASIR_TRY(load_attention(i, in, l));
  if (c_.output_norms) KVASIR_TRY(norm("post_attention_norm", &l.attn_output_norm));
  if (c_.input_norms && !c_.shared_norm) KVASIR_TRY(norm("ffn_norm", &l.ffn_norm));
  if (c_.experts.in_layer(i)) {
    KVASIR_ASSIGN(Experts experts, in.experts(i));
    KVASIR_ASSIGN(l.experts, ops_.add_experts(std::move(experts)));
    if (c_.experts.shared_ffn > 0) {
      KVASIR_ASSIGN(l.mlp, in.shared_expert(i));
    }
    if (c_.experts.shared_ffn > 0 && c_.experts.shared_gate) {
      KVASIR_ASSIGN(l.shared_gate, in.vector(in.of(i, "ffn_gate_inp_shexp.weight"), c_.hidden));
    }
  } else {
    KVASIR_ASSIGN(l.mlp, in.mlp(i));
  }
  if (c_.output_norms) KVASIR_TRY(norm("post_ffw_norm", &l.ffn_output_norm));
  return {};
}

Result<int32_t> Decoder::attention_kind(LayerKind kind) {
  auto known = std::find_if(kinds_.begin(), kinds_.end(), [&](const auto& k) { return k.first == kind; });
  if (known == kinds_.end()) {
    KVASIR_ASSIGN(auto attributes, attention_of(c_, kind));
    KVASIR_ASSIGN(int32_t id, ops_.add_attention(attributes));
    known = kinds_.insert(kinds_.end(), {kind, id});
  }
  return known->second;
}

Status Decoder::load_attention(int32_t i, LayerLoader& in, DecoderLayer& l) {
  KVASIR_ASSIGN(l.attention, attention_kind(c_.kind(i)));
  if (latent_)
    KVASIR_TRY(latent_->load_layer(i, in));
  else {
    KVASIR_ASSIGN(l.qkv, in.qkv(i));
  }
  KVASIR_TRY(load_head_norms(i, in, l));
  if (c_.head_sinks) {
    KVASIR_ASSIGN(l.sinks, in.vector(in.of(i, "attn_sinks.weight"), c_.heads, 0, 1, c_.part.heads));
  }
  KVASIR_ASSIGN(l.attn_out, in.attention_out(i));
  return {};
}

Status Decoder::load_head_norms(int32_t i, LayerLoader& in, DecoderLayer& l) {
  if (c_.qk_norm == QkNorm::none) return {};
  const bool full = c_.qk_norm == QkNorm::full;
  auto of_heads = [&](const char* name, int64_t heads, const Share& share) {
    return in.vector(in.of(i, name), c_.head_dim * (full ? heads : 1), c_.norm_shift, 1,
                     full ? share.times(c_.head_dim) : Share());
  };
  KVASIR_ASSIGN(l.q_norm, of_heads("attn_q_norm.weight", c_.heads, c_.part.heads));
  KVASIR_ASSIGN(l.k_norm, of_heads("attn_k_norm.weight", c_.kv_heads, c_.part.kv_heads));
  return {};
}

std::vector<Projection> Decoder::projections() const {
  using Order = Projection::Order;
  const int64_t q = int64_t(c_.heads) * c_.head_dim, kv = int64_t(c_.kv_heads) * c_.head_dim;
  const Share of_q = c_.part.heads.times(c_.head_dim), of_kv = c_.part.kv_heads.times(c_.head_dim);
  std::vector<Projection> out;
  for (int32_t i = 0; i < c_.layers; ++i) {
    const DecoderLayer& l = layers_[size_t(i)];
    // Each rank has some rows of a weight, or some columns.
    auto rows = [&](std::string_view name, Matrix weight, int64_t first, int64_t count, std::vector<Share> outputs,
                    Order order = Order::plain) {
      if (!outputs[0].split()) outputs.clear();
      out.push_back({LayerLoader::of(i, name), weight, first, count, order, std::move(outputs), {}});
    };
    auto columns = [&](std::string_view name, Matrix weight, const Share& inputs) {
      out.push_back({LayerLoader::of(i, name), weight, 0, c_.hidden, Order::plain, {}, inputs});
    };
    if (latent_) {
      for (const auto& [name, weight] : latent_->weights(i)) rows(name, weight, 0, weight.rows, {Share()});
    } else {
      rows("attn_q", l.qkv, 0, q, {of_q}, Order::heads);
      rows("attn_k", l.qkv, q, kv, {of_kv}, Order::heads);
      rows("attn_v", l.qkv, q + kv, kv, {of_kv});
      rows("attn_qkv", l.qkv, 0, q + 2 * kv, {of_q, of_kv, of_kv}, Order::groups);
    }
    columns("attn_output", l.attn_out, of_q);
    if (l.mlp.down.id < 0) continue;
    const bool shared = l.experts >= 0;
    const std::string ending = shared ? "_shexp" : "";
    const Share& of_ffn = shared ? c_.part.shared_ffn : c_.part.ffn;
    const int64_t ffn = l.mlp.down.cols;
    if (c_.gated) rows(cat("ffn_gate", ending), l.mlp.up, 0, ffn, {of_ffn});
    if (c_.gated) rows(cat("ffn_gate_up", ending), l.mlp.up, 0, 2 * ffn, {of_ffn, of_ffn});
    rows(cat("ffn_up", ending), l.mlp.up, c_.gated ? ffn : 0, ffn, {of_ffn});
    columns(cat("ffn_down", ending), l.mlp.down, of_ffn);
  }
  return out;
}

Status Decoder::make_buffers() {
  const int64_t q = int64_t(c_.heads) * c_.head_dim, kv = int64_t(c_.kv_heads) * c_.head_dim;
  KVASIR_ASSIGN(x_, ops_.make_buffer(c_.hidden, false));
  KVASIR_ASSIGN(h_, ops_.make_buffer(c_.hidden, false));
  KVASIR_ASSIGN(qkv_, ops_.make_buffer(q + 2 * kv, false, Shard::rows));
  if (latent_) KVASIR_TRY(latent_->make_buffers());
  KVASIR_ASSIGN(attended_, ops_.make_buffer(latent_ ? int64_t(c_.heads) * c_.latent.value : q, false, Shard::rows));
  KVASIR_ASSIGN(up_, ops_.make_buffer((c_.gated ? 2 : 1) * int64_t(c_.ffn), false, Shard::rows));
  KVASIR_ASSIGN(ffn_, ops_.make_buffer(c_.ffn, false, Shard::rows));
  if (c_.experts.shared_ffn > 0) {
    KVASIR_ASSIGN(shared_up_, ops_.make_buffer(2 * int64_t(c_.experts.shared_ffn), false, Shard::rows));
    KVASIR_ASSIGN(shared_ffn_, ops_.make_buffer(c_.experts.shared_ffn, false, Shard::rows));
  }
  KVASIR_ASSIGN(last_, ops_.make_buffer(c_.hidden, true));
  KVASIR_ASSIGN(logits_, ops_.make_buffer(c_.vocab, true, Shard::rows));
  return {};
}

Status Decoder::norm(Buffer in, const Norm& norm, Buffer out) {
  return c_.norm == NormKind::rms ? ops_.norm(in, norm.weight, c_.norm_eps, out)
                                  : ops_.layer_norm(in, norm.weight, norm.bias, c_.norm_eps, out);
}

Result<Buffer> Decoder::attend(const DecoderLayer& l, int32_t i, Buffer in) {
  const Attend how{.kind = l.attention, .layer = i, .sinks = l.sinks};
  if (latent_) {
    KVASIR_TRY(latent_->attend(how, in, qkv_, attended_));
    return attended_;
  }
  if (c_.qk_norm == QkNorm::none && c_.query_position_slope == 0) {
    KVASIR_TRY(ops_.linear_attend(in, l.qkv, how, qkv_, attended_));
    return attended_;
  }
  KVASIR_TRY(ops_.linear(in, l.qkv, qkv_));
  KVASIR_TRY(attend_normed(l, i));
  return attended_;
}

Status Decoder::attend_normed(const DecoderLayer& l, int32_t i) {
  const int64_t q = int64_t(c_.heads) * c_.head_dim, kv = int64_t(c_.kv_heads) * c_.head_dim;
  if (c_.qk_norm == QkNorm::full && c_.part.ranks > 1)
    KVASIR_TRY(ops_.qk_norm_over_ranks(qkv_, q, l.q_norm, kv, l.k_norm, c_.norm_eps));
  else if (c_.qk_norm != QkNorm::none)
    KVASIR_TRY(ops_.qk_norm(qkv_, q, l.q_norm, kv, l.k_norm, c_.norm_eps));
  if (c_.query_position_slope != 0)
    KVASIR_TRY(ops_.scale_by_position(qkv_, q, c_.query_position_slope, c_.query_position_unit));
  return ops_.attend({.kind = l.attention, .layer = i, .sinks = l.sinks}, qkv_, attended_);
}

// All but the way back of an MLP.
Status Decoder::feed_forward(const DecoderLayer& l, Buffer in, Buffer up, Buffer ffn) {
  if (!c_.gated) {
    KVASIR_TRY(ops_.linear(in, l.mlp.up, up));
    return ops_.activate(c_.activation, up, ffn);
  }
  KVASIR_TRY(ops_.linear_glu(in, l.mlp.up, c_.activation, up, ffn));
  return l.shared_gate.id < 0 ? Status() : ops_.sigmoid_gate(in, l.shared_gate, ffn);
}

// A sublayer's result onto the stream; then the norm that the next one reads, where it follows at once.
Status Decoder::add(Buffer in, Matrix weight, const Norm& output_norm, const Norm* next) {
  if (next && !c_.output_norms && c_.norm == NormKind::rms)
    return ops_.add_linear_norm(in, weight, x_, next->weight, c_.norm_eps, h_);
  if (!c_.output_norms) {
    KVASIR_TRY(ops_.add_linear(in, weight, x_));
  } else {
    KVASIR_TRY(ops_.linear(in, weight, h_));
    KVASIR_TRY(ops_.add_norm(h_, output_norm.weight, c_.norm_eps, x_));
  }
  return next ? norm(x_, *next, h_) : Status();
}

Status Decoder::keep(std::vector<int32_t> layers) {
  for (int32_t i : layers) KVASIR_CHECK(i >= kLastState && i <= c_.layers, "layer ", i, " of ", c_.layers);
  kept_ = std::move(layers);
  return {};
}

// Nothing where nothing is kept of this layer.
Status Decoder::keep_stream(int32_t layer) {
  for (size_t k = 0; k < kept_.size(); ++k) {
    if (kept_[k] != layer) continue;
    Buffer from = x_;
    if (layer == kLastState) {
      KVASIR_TRY(norm(x_, output_norm_, h_));
      from = h_;
    }
    KVASIR_TRY(ops_.keep(from, int64_t(k) * c_.hidden, layer == kLastState ? 1 / c_.logit_scale : c_.residual_scale));
  }
  return {};
}

Status Decoder::forward() {
  KVASIR_TRY(ops_.embed(embedding_, c_.embedding_scale, x_));
  if (c_.embedding_norm) KVASIR_TRY(norm(x_, embedding_norm_, x_));
  if (!c_.input_norms || !c_.first_norm) return run_layers(x_);
  KVASIR_TRY(norm(x_, layers_[0].attn_norm, h_));
  return run_layers(h_);
}

Status Decoder::run_layers(Buffer first) {
  const Buffer read = c_.input_norms ? h_ : x_;
  for (int32_t i = 0; i < c_.layers; ++i) {
    KVASIR_TRY(keep_stream(i));
    const DecoderLayer& l = layers_[size_t(i)];
    const Norm* ffn_norm = c_.input_norms && !c_.shared_norm ? &l.ffn_norm : nullptr;
    const Norm* next = c_.input_norms && i + 1 < c_.layers ? &layers_[size_t(i) + 1].attn_norm : nullptr;
    KVASIR_ASSIGN(const Buffer attended, attend(l, i, i == 0 ? first : read));
    if (!c_.parallel)
      KVASIR_TRY(add(attended, l.attn_out, l.attn_output_norm, ffn_norm));
    else if (ffn_norm)
      KVASIR_TRY(norm(x_, *ffn_norm, h_));
    const bool experts = l.experts >= 0, mlp = l.mlp.down.id >= 0;
    const Buffer ffn = experts ? shared_ffn_ : ffn_;
    if (mlp) KVASIR_TRY(feed_forward(l, read, experts ? shared_up_ : up_, ffn));
    if (experts) KVASIR_TRY(ops_.moe(read, l.experts, x_));
    if (c_.parallel) KVASIR_TRY(add(attended, l.attn_out, l.attn_output_norm, nullptr));
    if (mlp)
      KVASIR_TRY(add(ffn, l.mlp.down, l.ffn_output_norm, next));
    else if (next)
      KVASIR_TRY(norm(x_, *next, h_));
  }
  KVASIR_TRY(keep_stream(c_.layers));
  return keep_stream(kLastState);
}

Result<Buffer> Decoder::hidden(int64_t first, int64_t count) {
  KVASIR_TRY(ops_.take_logit_rows(x_, first, count, last_));
  KVASIR_TRY(norm(last_, output_norm_, last_));
  return last_;
}

Result<Buffer> Decoder::logits(int64_t first, int64_t count) {
  KVASIR_ASSIGN(const Buffer last, hidden(first, count));
  KVASIR_TRY(ops_.linear(last, head_, logits_));
  if (c_.logit_softcap > 0) KVASIR_TRY(ops_.softcap(logits_, c_.logit_softcap));
  return ops_.gather(logits_);
}

Result<std::unique_ptr<Network>> load_decoder(const ModelConfig& config, Weights& weights, Ops& ops,
                                              const LoadProgress& progress) {
  auto net = std::make_unique<Decoder>(config, ops);
  KVASIR_TRY(net->load(weights, progress));
  return std::unique_ptr<Network>(std::move(net));
}

}  // namespace kvasir::model
