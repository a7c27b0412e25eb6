// ModernBERT: Llama's layers without a direction. Most see only so many tokens to each side, each kind has its own
// rope; layer norms without biases, none before the first layer's attention, gates.
#include <nlohmann/json.hpp>

#include "model/arch/decoder.h"
#include "model/arch/encoder.h"
#include "model/arch/layer_loader.h"

namespace kvasir::model {
namespace {

constexpr TensorName kNames[] = {
    {"token_embd", "model.embeddings.tok_embeddings"},
    {"token_embd_norm", "model.embeddings.norm"},
    {"output_norm", "model.final_norm"},
    {"blk.#.attn_norm", "model.layers.#.attn_norm"},
    {"blk.#.attn_qkv", "model.layers.#.attn.Wqkv"},
    {"blk.#.attn_output", "model.layers.#.attn.Wo"},
    {"blk.#.ffn_norm", "model.layers.#.mlp_norm"},
    {"blk.#.ffn_gate_up", "model.layers.#.mlp.Wi"},
    {"blk.#.ffn_down", "model.layers.#.mlp.Wo"},
    {"cls", "head.dense"},
    {"cls.norm", "head.norm"},
    {"cls.output", "classifier"},
};

// With a classification head: scores = out(norm(gelu(dense(x of the first token)))).
class ModernBert : public Decoder {
 public:
  using Decoder::Decoder;

  Status load(Weights& w, const LoadProgress& progress) {
    KVASIR_TRY(Decoder::load(w, progress));
    if (c_.labels == 0) return {};
    LayerLoader in(c_, w, ops_);
    KVASIR_ASSIGN(dense_, in.matrix("cls", c_.hidden, c_.hidden, Shard::whole, w.has("cls.bias")));
    KVASIR_ASSIGN(norm_.weight, in.vector("cls.norm.weight", c_.hidden));
    KVASIR_ASSIGN(out_, in.matrix("cls.output", c_.labels, c_.hidden, Shard::whole, true));
    KVASIR_ASSIGN(pooled_, ops_.make_buffer(c_.hidden, true));
    KVASIR_ASSIGN(scores_, ops_.make_buffer(c_.labels, true));
    return {};
  }

  Result<Buffer> logits(int64_t, int64_t) override { return unimplemented("an encoder gives no logits of tokens"); }

  Result<Buffer> hidden(int64_t first, int64_t count) override {
    KVASIR_ASSIGN(const Buffer last, Decoder::hidden(first, count));
    if (c_.labels == 0) return last;
    KVASIR_TRY(ops_.linear(last, dense_, pooled_));
    KVASIR_TRY(ops_.activate(Activation::gelu, pooled_, last));
    KVASIR_TRY(norm(last, norm_, pooled_));
    KVASIR_TRY(ops_.linear(pooled_, out_, scores_));
    return scores_;
  }

 private:
  Matrix dense_, out_;
  Norm norm_;
  Buffer pooled_, scores_;  // [R, hidden], [R, labels]
};

Result<std::unique_ptr<Network>> load(const ModelConfig& config, Weights& weights, Ops& ops,
                                      const LoadProgress& progress) {
  auto net = std::make_unique<ModernBert>(config, ops);
  KVASIR_TRY(net->load(weights, progress));
  return std::unique_ptr<Network>(std::move(net));
}

void family(ModelConfig& c) {
  c.encoder = true;
  c.norm = NormKind::layer;
  c.norm_bias = false;
  c.embedding_norm = true;
  c.first_norm = false;
  c.tied_head = true;
  c.activation = Activation::gelu;
  c.pooling.pooling = Pooling::mean;
}

Status json(const JsonKeys& in, ModelConfig& c) {
  int32_t sees = 128, every = 3;
  KVASIR_TRY(in.get({"local_attention"}, &sees));
  KVASIR_TRY(in.get({"global_attn_every_n_layers"}, &every));
  if (sees < 2 || every < 1) return in.wrong(sees < 2 ? "local_attention" : "global_attn_every_n_layers", "above 0");
  c.window_each_way = sees / 2;
  if (c.layer_kinds.empty())
    for (int32_t i = 0; i < c.layers; ++i) c.layer_kinds.push_back({.windowed = i % every != 0});
  if (!in.has("rope_parameters")) {
    KVASIR_TRY(in.get({"global_rope_theta"}, &c.rope.base));
    KVASIR_TRY(in.get({"local_rope_theta"}, &c.local_rope.base));
  }
  in.pass_over({"global_rope_theta", "local_rope_theta"});
  KVASIR_TRY(in.get("norm_bias", &c.norm_bias));
  KVASIR_TRY(in.only("classifier_pooling", "\"cls\""));
  KVASIR_TRY(in.only("classifier_activation", "\"gelu\""));
  in.pass_over({"classifier_bias", "cls_token_id", "decoder_bias", "deterministic_flash_attn", "embedding_dropout",
                "initializer_cutoff_factor", "reference_compile", "repad_logits_with_grad", "sparse_prediction",
                "sparse_pred_ignore_index"});
  return read_labels(in, c);
}

Status metadata(const GgufKeys& in, ModelConfig&) { return no_gguf_encoder(in); }

void derive(ModelConfig& c) {
  c.local_rope.rotary_dim = c.rope.rotary_dim;
  c.window = 0;  // said again by newer files
}

}  // namespace

extern const Architecture kModernBert{
    .name = "modernbert",
    .models = "ModernBERT, GTE-ModernBERT and their rerankers",
    .names = kNames,
    .json_defaults = R"({"max_position_embeddings": 8192, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0})",
    .family = family,
    .json = json,
    .metadata = metadata,
    .derive = derive,
    .load = load};

}  // namespace kvasir::model
