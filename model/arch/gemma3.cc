// Gemma 3: windowed layers with a full one every so often (each kind with its own rope), norms on the heads
// of q and k, norms after the sublayers too, a scaled embedding, tanh-GELU.
#include <cmath>

#include "model/arch/layers.h"

namespace kvasir::model {
namespace {

class Gemma3 final : public Network {
 public:
  static void adjust(ModelConfig& c) {
    c.activation = Activation::gelu_tanh;
    c.embedding_scale = std::sqrt(float(c.hidden));
    if (c.window_pattern == 0) c.window_pattern = 6;
    if (c.local_rope.rotary_dim == 0) c.local_rope = {.rotary_dim = c.head_dim, .base = 10000};
    c.rope.style = c.local_rope.style = attention::RopeStyle::neox;
  }

  static Result<std::unique_ptr<Network>> load(const ModelConfig& c, Weights& w, Ops& ops,
                                               const LoadProgress& progress) {
    auto net = std::unique_ptr<Gemma3>(new Gemma3(c, ops));
    LayerLoader in(c, w, ops);
    KVASIR_ASSIGN(auto full, attention_of(c, c.rope, c.rope_divisors, 0));
    KVASIR_ASSIGN(auto local, attention_of(c, c.local_rope, {}, c.window));
    KVASIR_ASSIGN(net->full_, ops.add_attention(full));
    KVASIR_ASSIGN(net->local_, ops.add_attention(local));
    KVASIR_ASSIGN(net->ends_, load_ends(c, w, ops));
    for (int32_t i = 0; i < c.layers; ++i) {
      Layer l;
      KVASIR_ASSIGN(l.attn_norm, in.norm(i, "attn_norm"));
      KVASIR_ASSIGN(l.qkv, in.qkv(i));
      KVASIR_ASSIGN(l.q_norm, in.head_norm(i, "attn_q_norm"));
      KVASIR_ASSIGN(l.k_norm, in.head_norm(i, "attn_k_norm"));
      KVASIR_ASSIGN(l.attn_out, in.attention_out(i));
      KVASIR_ASSIGN(l.post_attn_norm, in.norm(i, "post_attention_norm"));
      KVASIR_ASSIGN(l.ffn_norm, in.norm(i, "ffn_norm"));
      KVASIR_ASSIGN(l.gate_up, in.gate_up(i));
      KVASIR_ASSIGN(l.down, in.down(i));
      KVASIR_ASSIGN(l.post_ffn_norm, in.norm(i, "post_ffw_norm"));
      net->layers_.push_back(l);
      progress("weights", double(i + 1) / c.layers);
    }
    KVASIR_ASSIGN(net->b_, make_buffers(c, ops));
    return std::unique_ptr<Network>(std::move(net));
  }

  Status forward() override {
    KVASIR_TRY(ops_.embed(ends_.embedding, c_.embedding_scale, b_.x));
    for (int32_t i = 0; i < c_.layers; ++i) {
      const Layer& l = layers_[size_t(i)];
      KVASIR_TRY(ops_.norm(b_.x, l.attn_norm, c_.norm_eps, b_.h));
      KVASIR_TRY(ops_.linear(b_.h, l.qkv, b_.qkv));
      KVASIR_TRY(ops_.head_norm(b_.qkv, 0, c_.heads, l.q_norm, c_.norm_eps));
      KVASIR_TRY(ops_.head_norm(b_.qkv, c_.heads, c_.kv_heads, l.k_norm, c_.norm_eps));
      KVASIR_TRY(ops_.attend(c_.windowed(i) ? local_ : full_, i, b_.qkv, b_.attended));
      KVASIR_TRY(ops_.linear(b_.attended, l.attn_out, b_.h));
      KVASIR_TRY(ops_.add_norm(b_.h, l.post_attn_norm, c_.norm_eps, b_.x));
      KVASIR_TRY(ops_.norm(b_.x, l.ffn_norm, c_.norm_eps, b_.h));
      KVASIR_TRY(ops_.linear_glu(b_.h, l.gate_up, c_.activation, b_.gate_up, b_.ffn));
      KVASIR_TRY(ops_.linear(b_.ffn, l.down, b_.h));
      KVASIR_TRY(ops_.add_norm(b_.h, l.post_ffn_norm, c_.norm_eps, b_.x));
    }
    return {};
  }

  Result<Buffer> logits(int64_t first, int64_t count) override { return finish(c_, ops_, ends_, b_, first, count); }

 private:
  Gemma3(const ModelConfig& c, Ops& ops) : c_(c), ops_(ops) {}
  struct Layer {
    Vector attn_norm, q_norm, k_norm, post_attn_norm, ffn_norm, post_ffn_norm;
    Matrix qkv, attn_out, gate_up, down;
  };
  ModelConfig c_;
  Ops& ops_;
  int32_t full_ = 0, local_ = 0;
  Ends ends_;
  std::vector<Layer> layers_;
  Buffers b_;
};

}  // namespace

extern const Architecture kGemma3{"gemma3", Gemma3::adjust, Gemma3::load};

}  // namespace kvasir::model
