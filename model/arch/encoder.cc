#include "model/arch/encoder.h"

#include <nlohmann/json.hpp>

#include "model/arch/layer_loader.h"
#include "model/formats/gguf.h"

namespace kvasir::model {

Status Encoder::load(Weights& w, const LoadProgress& progress) {
  LayerLoader in(c_, w, ops_);
  auto norm = [&](const std::string& name, Norm* out) -> Status {
    KVASIR_ASSIGN(out->weight, in.vector(cat(name, ".weight"), c_.hidden));
    KVASIR_ASSIGN(out->bias, in.vector(cat(name, ".bias"), c_.hidden));
    return {};
  };
  KVASIR_ASSIGN(tokens_, in.matrix("token_embd", c_.vocab, c_.hidden, Shard::whole, false));
  const int64_t positions = int64_t(c_.context) + c_.first_position;
  KVASIR_ASSIGN(positions_, in.matrix("position_embd", positions, c_.hidden, Shard::whole, false));
  if (c_.token_types > 0) {
    KVASIR_ASSIGN(types_, in.matrix("token_types", c_.token_types, c_.hidden, Shard::whole, false));
  }
  KVASIR_TRY(norm("token_embd_norm", &embedding_norm_));
  attention::Attributes a;
  a.num_heads = c_.heads;
  a.num_kv_heads = c_.kv_heads;
  a.head_dim = c_.head_dim;
  a.packed_qkv = true;
  a.is_causal = false;
  KVASIR_ASSIGN(attention_, ops_.add_attention(a));
  for (int32_t i = 0; i < c_.layers; ++i) {
    Layer& l = layers_.emplace_back();
    KVASIR_ASSIGN(l.qkv, in.qkv(i));
    KVASIR_ASSIGN(l.attn_out, in.attention_out(i));
    KVASIR_TRY(norm(in.of(i, "attn_output_norm"), &l.attn_norm));
    KVASIR_ASSIGN(l.mlp, in.mlp(i));
    KVASIR_TRY(norm(in.of(i, "layer_output_norm"), &l.norm));
    progress("weights", double(i + 1) / c_.layers);
  }
  if (c_.labels > 0) {
    KVASIR_ASSIGN(dense_, in.matrix("cls", c_.hidden, c_.hidden, Shard::whole, true));
    KVASIR_ASSIGN(out_, in.matrix("cls.output", c_.labels, c_.hidden, Shard::whole, true));
    KVASIR_ASSIGN(pooled_, ops_.make_buffer(c_.hidden, true));
    KVASIR_ASSIGN(scores_, ops_.make_buffer(c_.labels, true));
  }
  KVASIR_ASSIGN(x_, ops_.make_buffer(c_.hidden, false));
  KVASIR_ASSIGN(qkv_, ops_.make_buffer(3 * int64_t(c_.hidden), false, Shard::rows));
  KVASIR_ASSIGN(attended_, ops_.make_buffer(c_.hidden, false, Shard::rows));
  KVASIR_ASSIGN(up_, ops_.make_buffer(c_.ffn, false, Shard::rows));
  KVASIR_ASSIGN(ffn_, ops_.make_buffer(c_.ffn, false, Shard::rows));
  KVASIR_ASSIGN(last_, ops_.make_buffer(c_.hidden, true));
  return {};
}

Status Encoder::forward() {
  KVASIR_TRY(ops_.embed(tokens_, 1, x_));
  KVASIR_TRY(ops_.add_row(positions_, RowOf::position, c_.first_position, x_));
  if (c_.token_types > 0) KVASIR_TRY(ops_.add_row(types_, RowOf::type, 0, x_));
  KVASIR_TRY(norm(embedding_norm_, x_));
  for (int32_t i = 0; i < c_.layers; ++i) {
    const Layer& l = layers_[size_t(i)];
    KVASIR_TRY(ops_.linear_attend(x_, l.qkv, {.kind = attention_, .layer = i}, qkv_, attended_));
    KVASIR_TRY(ops_.add_linear(attended_, l.attn_out, x_));
    KVASIR_TRY(norm(l.attn_norm, x_));
    KVASIR_TRY(ops_.linear(x_, l.mlp.up, up_));
    KVASIR_TRY(ops_.activate(c_.activation, up_, ffn_));
    KVASIR_TRY(ops_.add_linear(ffn_, l.mlp.down, x_));
    KVASIR_TRY(norm(l.norm, x_));
  }
  return {};
}

Result<Buffer> Encoder::hidden(int64_t first, int64_t count) {
  KVASIR_TRY(ops_.take_logit_rows(x_, first, count, last_));
  if (c_.labels == 0) return last_;
  KVASIR_TRY(ops_.linear(last_, dense_, pooled_));
  KVASIR_TRY(ops_.activate(Activation::tanh, pooled_, last_));
  KVASIR_TRY(ops_.linear(last_, out_, scores_));
  return scores_;
}

Status read_labels(const JsonKeys& in, ModelConfig& c) {
  const auto* architectures = in.find("architectures");
  const bool classifies = architectures && architectures->is_array() && !architectures->empty() &&
                          (*architectures)[0].is_string() &&
                          (*architectures)[0].get<std::string>().ends_with("ForSequenceClassification");
  if (!classifies) return {};
  const auto* labels = in.find("id2label");
  c.labels = labels && labels->is_object() ? int32_t(labels->size()) : 2;
  c.pooling.refusal = "it is a classifier, of pairs of texts: ask /v1/rerank or /v1/score";
  return {};
}

Status no_gguf_encoder(const GgufKeys& in) {
  return unimplemented(cat(in.file().name(),
                           ": encoders are read from a folder of config.json with safetensors, not from GGUF files, "
                           "whose WordPiece tokenizers are not known here"));
}

Result<std::unique_ptr<Network>> load_encoder(const ModelConfig& config, Weights& weights, Ops& ops,
                                              const LoadProgress& progress) {
  auto net = std::make_unique<Encoder>(config, ops);
  KVASIR_TRY(net->load(weights, progress));
  return std::unique_ptr<Network>(std::move(net));
}

}  // namespace kvasir::model
