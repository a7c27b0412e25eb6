// Llama 1 to 3.x and everything shaped like it (SmolLM2, TinyLlama, Mistral): the differences are numbers
// in ModelConfig.
#include "model/arch/layers.h"

namespace kvasir::model {
namespace {

class Llama final : public Network {
 public:
  static Result<std::unique_ptr<Network>> load(const ModelConfig& c, Weights& w, Ops& ops,
                                               const LoadProgress& progress) {
    auto net = std::unique_ptr<Llama>(new Llama(c, ops));
    LayerLoader in(c, w, ops);
    KVASIR_ASSIGN(auto attributes, attention_of(c, c.rope, c.rope_divisors, c.window));
    KVASIR_ASSIGN(net->attention_, ops.add_attention(attributes));
    KVASIR_ASSIGN(net->ends_, load_ends(c, w, ops));
    for (int32_t i = 0; i < c.layers; ++i) {
      Layer l;
      KVASIR_ASSIGN(l.attn_norm, in.norm(i, "attn_norm"));
      KVASIR_ASSIGN(l.qkv, in.qkv(i));
      KVASIR_ASSIGN(l.attn_out, in.attention_out(i));
      KVASIR_ASSIGN(l.ffn_norm, in.norm(i, "ffn_norm"));
      KVASIR_ASSIGN(l.gate_up, in.gate_up(i));
      KVASIR_ASSIGN(l.down, in.down(i));
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
      KVASIR_TRY(ops_.linear_attend(b_.h, l.qkv, attention_, i, b_.qkv, b_.attended));
      KVASIR_TRY(ops_.add_linear(b_.attended, l.attn_out, b_.x));
      KVASIR_TRY(ops_.norm(b_.x, l.ffn_norm, c_.norm_eps, b_.h));
      KVASIR_TRY(ops_.linear_glu(b_.h, l.gate_up, c_.activation, b_.gate_up, b_.ffn));
      KVASIR_TRY(ops_.add_linear(b_.ffn, l.down, b_.x));
    }
    return {};
  }

  Result<Buffer> logits(int64_t first, int64_t count) override { return finish(c_, ops_, ends_, b_, first, count); }

 private:
  Llama(const ModelConfig& c, Ops& ops) : c_(c), ops_(ops) {}
  struct Layer {
    Vector attn_norm, ffn_norm;
    Matrix qkv, attn_out, gate_up, down;
  };
  ModelConfig c_;
  Ops& ops_;
  int32_t attention_ = 0;
  Ends ends_;
  std::vector<Layer> layers_;
  Buffers b_;
};

}  // namespace

extern const Architecture kLlama{"llama", [](ModelConfig&) {}, Llama::load};
extern const Architecture kMistral{"mistral", [](ModelConfig&) {}, Llama::load};

}  // namespace kvasir::model
