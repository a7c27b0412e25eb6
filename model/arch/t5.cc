// T5, Flan-T5 and mT5: encoder-decoders. The prompt is what the encoder reads; the decoder writes the answer.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "model/arch/t5_network.h"

namespace kvasir::model {
namespace {

constexpr TensorName kNames[] = {
    {"token_embd", "shared"},
    {"token_embd", "encoder.embed_tokens"},
    {"token_embd", "decoder.embed_tokens"},
    {"output", "lm_head"},
    {"enc_output_norm", "encoder.final_layer_norm", "enc.output_norm"},
    {"output_norm", "decoder.final_layer_norm", "dec.output_norm"},
    {"blk.#.enc_attn_norm", "encoder.block.#.layer.0.layer_norm", "enc.blk.#.attn_norm"},
    {"blk.#.enc_attn_q", "encoder.block.#.layer.0.SelfAttention.q", "enc.blk.#.attn_q"},
    {"blk.#.enc_attn_k", "encoder.block.#.layer.0.SelfAttention.k", "enc.blk.#.attn_k"},
    {"blk.#.enc_attn_v", "encoder.block.#.layer.0.SelfAttention.v", "enc.blk.#.attn_v"},
    {"blk.#.enc_attn_output", "encoder.block.#.layer.0.SelfAttention.o", "enc.blk.#.attn_o"},
    {"blk.#.enc_attn_rel_b", "encoder.block.#.layer.0.SelfAttention.relative_attention_bias", "enc.blk.#.attn_rel_b"},
    {"blk.#.enc_ffn_norm", "encoder.block.#.layer.1.layer_norm", "enc.blk.#.ffn_norm"},
    {"blk.#.enc_ffn_gate", "encoder.block.#.layer.1.DenseReluDense.wi_0", "enc.blk.#.ffn_gate"},
    {"blk.#.enc_ffn_up", "encoder.block.#.layer.1.DenseReluDense.wi_1", "enc.blk.#.ffn_up"},
    {"blk.#.enc_ffn_up", "encoder.block.#.layer.1.DenseReluDense.wi"},
    {"blk.#.enc_ffn_down", "encoder.block.#.layer.1.DenseReluDense.wo", "enc.blk.#.ffn_down"},
    {"blk.#.attn_norm", "decoder.block.#.layer.0.layer_norm", "dec.blk.#.attn_norm"},
    {"blk.#.attn_q", "decoder.block.#.layer.0.SelfAttention.q", "dec.blk.#.attn_q"},
    {"blk.#.attn_k", "decoder.block.#.layer.0.SelfAttention.k", "dec.blk.#.attn_k"},
    {"blk.#.attn_v", "decoder.block.#.layer.0.SelfAttention.v", "dec.blk.#.attn_v"},
    {"blk.#.attn_output", "decoder.block.#.layer.0.SelfAttention.o", "dec.blk.#.attn_o"},
    {"blk.#.attn_rel_b", "decoder.block.#.layer.0.SelfAttention.relative_attention_bias", "dec.blk.#.attn_rel_b"},
    {"blk.#.cross_attn_norm", "decoder.block.#.layer.1.layer_norm", "dec.blk.#.cross_attn_norm"},
    {"blk.#.cross_attn_q", "decoder.block.#.layer.1.EncDecAttention.q", "dec.blk.#.cross_attn_q"},
    {"blk.#.cross_attn_k", "decoder.block.#.layer.1.EncDecAttention.k", "dec.blk.#.cross_attn_k"},
    {"blk.#.cross_attn_v", "decoder.block.#.layer.1.EncDecAttention.v", "dec.blk.#.cross_attn_v"},
    {"blk.#.cross_attn_output", "decoder.block.#.layer.1.EncDecAttention.o", "dec.blk.#.cross_attn_o"},
    {"blk.#.ffn_norm", "decoder.block.#.layer.2.layer_norm", "dec.blk.#.ffn_norm"},
    {"blk.#.ffn_gate", "decoder.block.#.layer.2.DenseReluDense.wi_0", "dec.blk.#.ffn_gate"},
    {"blk.#.ffn_up", "decoder.block.#.layer.2.DenseReluDense.wi_1", "dec.blk.#.ffn_up"},
    {"blk.#.ffn_up", "decoder.block.#.layer.2.DenseReluDense.wi"},
    {"blk.#.ffn_down", "decoder.block.#.layer.2.DenseReluDense.wo", "dec.blk.#.ffn_down"},
};

void family(ModelConfig& c) {
  c.norm_eps = 1e-6f;
  c.gated = false;
  c.activation = Activation::relu;
  c.bias_buckets = 32, c.bias_reach = 128;
  c.pooling.refusal = "it is an encoder-decoder, which answers /v1/completions; take an encoder for embeddings";
}

// Outputs are scaled where the head is the embedding. Distances have no end, so neither has a text: what the model was
// trained on is a measure for each of the two.
void finish(ModelConfig& c) {
  if (c.tied_head && c.hidden > 0) c.logit_scale = 1 / std::sqrt(float(c.hidden));
  if (c.context < INT32_MAX / 2) c.context = 2 * c.context + 1;
}

// "relu", "gated-gelu" and the like; newer folders say the same in two keys more.
Status read_activation(const JsonKeys& in, ModelConfig& c) {
  const std::string said = in.text("feed_forward_proj").empty() ? "relu" : in.text("feed_forward_proj");
  c.gated = said.starts_with("gated-");
  const std::string name = c.gated ? said.substr(6) : said;
  std::string act = name == "gelu" && c.gated ? "gelu_new" : name;
  if (act == "relu")
    c.activation = Activation::relu;
  else if (act == "gelu_new")
    c.activation = Activation::gelu_tanh;
  else if (act == "gelu")
    c.activation = Activation::gelu;
  else if (act == "silu")
    c.activation = Activation::silu;
  else
    return invalid_argument(cat(in.file(), ": feed_forward_proj is '", said.substr(0, 64),
                                "'; relu, gelu and silu are supported, and each of them after gated-"));
  if (!in.text("dense_act_fn").empty()) KVASIR_TRY(in.only("dense_act_fn", cat('"', act, '"').c_str()));
  return in.only("is_gated_act", c.gated ? "true" : "false");
}

Status read(const JsonKeys& in, ModelConfig& c) {
  KVASIR_TRY(in.only("is_encoder_decoder", "true"));
  for (const char* key : {"attention_bias", "mlp_bias"}) KVASIR_TRY(in.only(key, "false"));  // others' keys
  for (const char* key : {"sliding_window", "layer_types", "rope_parameters", "rope_scaling"})
    KVASIR_TRY(in.only(key, "null"));
  KVASIR_TRY(in.only("num_key_value_heads", cat(c.heads).c_str()));
  if (const auto* kinds = in.find("architectures");
      kinds && kinds->is_array() && !kinds->empty() && (*kinds)[0].is_string())
    if (const auto kind = (*kinds)[0].get<std::string>();
        !kind.ends_with("ForConditionalGeneration") && kind != "T5WithLMHeadModel")
      return invalid_argument(cat(in.file(), ": architectures has ", kind.substr(0, 64),
                                  "; of this family only ForConditionalGeneration is served: take a folder with both "
                                  "encoder and decoder"));
  KVASIR_TRY(read_activation(in, c));
  c.encoder_layers = c.decoder_layers = c.layers;
  KVASIR_TRY(in.get({"num_decoder_layers"}, &c.decoder_layers));
  KVASIR_TRY(in.get({"relative_attention_num_buckets"}, &c.bias_buckets));
  KVASIR_TRY(in.get({"relative_attention_max_distance"}, &c.bias_reach));
  KVASIR_TRY(in.get({"decoder_start_token_id", "pad_token_id"}, &c.decoder_start));
  in.pass_over({"dropout_rate", "output_past", "n_positions"});
  return {};
}

// Folders of a head of its own say so in the one key or the other.
Status json(const JsonKeys& in, ModelConfig& c) {
  KVASIR_TRY(read(in, c));
  bool scaled = true;
  KVASIR_TRY(in.get("tie_word_embeddings", &scaled));
  KVASIR_TRY(in.get("scale_decoder_outputs", &scaled));
  c.tied_head = scaled;
  finish(c);
  return {};
}

Status mt5_json(const JsonKeys& in, ModelConfig& c) {
  KVASIR_TRY(read(in, c));
  c.tied_head = false;
  finish(c);
  return {};
}

void mt5_family(ModelConfig& c) {
  family(c);
  c.gated = true;
  c.activation = Activation::gelu_tanh;
}

// llama.cpp's converter writes down neither the activation nor whether outputs are scaled; all distances end at 128.
Status metadata(const GgufKeys& in, ModelConfig& c) {
  const Gguf& file = in.file();
  if (file.tensor("enc.blk.1.attn_rel_b.weight"))
    return unimplemented(cat(
        file.name(), ": its layers have biases of their own (UMT5); T5 and mT5, whose layers share them, are served"));
  if (c.window > 0 || c.kv_heads != c.heads)
    return invalid_argument(cat(file.name(), ": ",
                                in.key(c.window > 0 ? "attention.sliding_window" : "attention.head_count_kv"), " is ",
                                c.window > 0 ? c.window : c.kv_heads, ", which is not supported in t5 models"));
  c.encoder_layers = c.decoder_layers = c.layers;
  KVASIR_TRY(in.get("decoder_block_count", &c.decoder_layers));
  KVASIR_TRY(in.get("decoder_start_token_id", &c.decoder_start));
  KVASIR_TRY(in.get("attention.relative_buckets_count", &c.bias_buckets));
  c.gated = file.tensor("enc.blk.0.ffn_gate.weight") != nullptr;
  c.activation = c.gated ? Activation::gelu_tanh : Activation::relu;
  c.tied_head = file.tensor("output.weight") == nullptr;
  finish(c);
  return {};
}

void derive(ModelConfig& c) {
  c.rope.rotary_dim = c.local_rope.rotary_dim = 0;
  c.kv_heads = c.heads;
  if (c.encoder_layers == 0 && c.decoder_layers == 0) c.encoder_layers = c.decoder_layers = c.layers;  // a dummy's
  c.layers = std::max(c.encoder_layers, c.decoder_layers);
}

}  // namespace

extern const Architecture kT5{.name = "t5",
                              .models = "T5, T5 v1.1, Flan-T5: encoder-decoders",
                              .names = kNames,
                              .json_defaults = R"({"n_positions": 512})",
                              .family = family,
                              .json = json,
                              .metadata = metadata,
                              .derive = derive,
                              .load = load_t5};
extern const Architecture kMt5{.name = "mt5",
                               .models = "mT5: encoder-decoders",
                               .gguf = "t5",
                               .names = kNames,
                               .json_defaults = R"({"n_positions": 512, "feed_forward_proj": "gated-gelu"})",
                               .family = mt5_family,
                               .json = mt5_json,
                               .metadata = metadata,
                               .derive = derive,
                               .load = load_t5};

}  // namespace kvasir::model
