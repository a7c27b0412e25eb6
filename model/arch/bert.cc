// BERT and XLM-RoBERTa (and RoBERTa): encoders that most embedding models and cross-encoders are.
#include <nlohmann/json.hpp>

#include "model/arch/encoder.h"
#include "model/formats/gguf.h"

namespace kvasir::model {
namespace {

constexpr TensorName kBertNames[] = {
    {"token_embd", "bert.embeddings.word_embeddings"},
    {"position_embd", "bert.embeddings.position_embeddings"},
    {"token_types", "bert.embeddings.token_type_embeddings"},
    {"token_embd_norm", "bert.embeddings.LayerNorm"},
    {"blk.#.attn_q", "bert.encoder.layer.#.attention.self.query"},
    {"blk.#.attn_k", "bert.encoder.layer.#.attention.self.key"},
    {"blk.#.attn_v", "bert.encoder.layer.#.attention.self.value"},
    {"blk.#.attn_output", "bert.encoder.layer.#.attention.output.dense"},
    {"blk.#.attn_output_norm", "bert.encoder.layer.#.attention.output.LayerNorm"},
    {"blk.#.ffn_up", "bert.encoder.layer.#.intermediate.dense"},
    {"blk.#.ffn_down", "bert.encoder.layer.#.output.dense"},
    {"blk.#.layer_output_norm", "bert.encoder.layer.#.output.LayerNorm"},
    {"cls", "bert.pooler.dense"},
    {"cls.output", "classifier"},
};

constexpr TensorName kRobertaNames[] = {
    {"token_embd", "roberta.embeddings.word_embeddings"},
    {"position_embd", "roberta.embeddings.position_embeddings"},
    {"token_types", "roberta.embeddings.token_type_embeddings"},
    {"token_embd_norm", "roberta.embeddings.LayerNorm"},
    {"blk.#.attn_q", "roberta.encoder.layer.#.attention.self.query"},
    {"blk.#.attn_k", "roberta.encoder.layer.#.attention.self.key"},
    {"blk.#.attn_v", "roberta.encoder.layer.#.attention.self.value"},
    {"blk.#.attn_output", "roberta.encoder.layer.#.attention.output.dense"},
    {"blk.#.attn_output_norm", "roberta.encoder.layer.#.attention.output.LayerNorm"},
    {"blk.#.ffn_up", "roberta.encoder.layer.#.intermediate.dense"},
    {"blk.#.ffn_down", "roberta.encoder.layer.#.output.dense"},
    {"blk.#.layer_output_norm", "roberta.encoder.layer.#.output.LayerNorm"},
    {"cls", "classifier.dense"},
    {"cls.output", "classifier.out_proj"},
};

void family(ModelConfig& c) {
  c.encoder = true;
  c.norm = NormKind::layer;
  c.norm_eps = 1e-12f;
  c.gated = false;
  c.activation = Activation::gelu;
  c.qkv_bias = c.out_bias = c.mlp_bias = true;
  c.token_types = 2;
  c.pooling.pooling = Pooling::mean;  // sentence-transformers' where nothing is said
}

void roberta_family(ModelConfig& c) {
  family(c);
  c.token_types = 1;
  c.two_separators = true;
  c.first_position = 2;  // behind that of padding
}

Status json(const JsonKeys& in, ModelConfig& c) {
  KVASIR_TRY(in.get({"type_vocab_size"}, &c.token_types));
  KVASIR_TRY(in.only("position_embedding_type", "\"absolute\""));
  return read_labels(in, c);
}

Status roberta_json(const JsonKeys& in, ModelConfig& c) {
  int32_t padding = 1;
  KVASIR_TRY(in.get({"pad_token_id"}, &padding));
  c.first_position = padding + 1;
  c.context -= c.first_position;  // of the positions' rows these are never used
  return json(in, c);
}

Status metadata(const GgufKeys& in, ModelConfig&) { return no_gguf_encoder(in); }

void derive(ModelConfig& c) { c.rope.rotary_dim = c.local_rope.rotary_dim = 0; }

constexpr Architecture of_roberta(std::string_view name, std::string_view models) {
  return {.name = name,
          .models = models,
          .names = kRobertaNames,
          .json_defaults = R"({"max_position_embeddings": 514})",
          .family = roberta_family,
          .json = roberta_json,
          .metadata = metadata,
          .derive = derive,
          .load = load_encoder};
}

}  // namespace

extern const Architecture kBert{.name = "bert",
                                .models = "BERT, MiniLM, BGE, E5, GTE: embeddings and cross-encoders",
                                .names = kBertNames,
                                .json_defaults = R"({"max_position_embeddings": 512})",
                                .family = family,
                                .json = json,
                                .metadata = metadata,
                                .derive = derive,
                                .load = load_encoder};
extern const Architecture kXlmRoberta =
    of_roberta("xlm-roberta", "XLM-RoBERTa, multilingual E5, BGE-M3 and its rerankers");
extern const Architecture kRoberta = of_roberta("roberta", "RoBERTa and its cross-encoders");

}  // namespace kvasir::model
