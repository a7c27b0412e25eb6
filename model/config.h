// What a network is, whatever file said so: the hyperparameters every architecture reads, and the flags by which
// decoders differ (arch/decoder.h runs them all).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "attention/rope.h"
#include "core/status.h"
#include "model/experts.h"
#include "model/linear_attention.h"
#include "model/ranks.h"
#include "model/runner.h"

namespace kvasir::model {

class Gguf;

enum class Activation : uint8_t { silu, gelu_tanh, gelu, relu, relu_squared, tanh };
enum class NormKind : uint8_t { rms, layer };  // layer: with the mean taken off, and a bias
enum class QkNorm : uint8_t { none, head, full };

// Latent attention (MLA): a token's key and value are one row of the cache that all heads share, a rotated part and a
// latent which each head's own weights read its keys and values from. head_dim is then the row's, kv_heads 1.
struct LatentConfig {
  int32_t rank = 0;        // of the latent; 0: attention is the usual one
  int32_t rope = 0;        // the rotated part of queries and of the row
  int32_t nope = 0;        // the other part of a head's queries
  int32_t value = 0;       // a head's value
  int32_t query_rank = 0;  // of what queries are made of; 0: the stream itself
  bool on() const { return rank > 0; }
};

// How one layer attends where layers differ.
struct LayerKind {
  bool windowed = false;
  bool rotated = true;
  bool linear = false;  // linear attention (LinearConfig), without keys and values in the cache
  bool operator==(const LayerKind&) const = default;
};

struct ModelConfig {
  std::string name, architecture, quantization;
  int32_t vocab = 0, context = 0, layers = 0, hidden = 0, ffn = 0;
  int32_t heads = 0, kv_heads = 0, head_dim = 0;
  bool tied_head = false;  // the head is the embedding even where the files hold another

  NormKind norm = NormKind::rms;
  float norm_eps = 1e-5f;
  float norm_shift = 0;         // added to every norm weight (Gemma's checkpoints store w - 1)
  bool norm_bias = true;        // of layer norms
  bool input_norms = true;      // of what a sublayer reads
  bool first_norm = true;       // before the first layer's attention, too
  bool output_norms = false;    // of what a sublayer adds
  bool embedding_norm = false;  // of the embedding, before the first layer
  QkNorm qk_norm = QkNorm::none;
  bool parallel = false;     // attention and MLP read the same residual stream
  bool shared_norm = false;  // through one norm

  bool gated = true;  // the MLP is activation(gate) * up, not activation(up)
  Activation activation = Activation::silu;
  bool qkv_bias = false, out_bias = false, mlp_bias = false, head_bias = false;
  ExpertsConfig experts;      // instead of one MLP
  bool qkv_by_group = false;  // the fused tensor has the rows of each key/value head together: its queries, key, value

  float embedding_scale = 1, residual_scale = 1, logit_scale = 1;
  LinearConfig linear;           // of the layers that are linear
  bool gated_attention = false;  // q_proj yields a gate, too; a head's output *= sigmoid(gate)
  bool head_sinks = false;       // each head has a logit that takes part in its softmax without a value
  float query_scale = 0;         // scores are multiplied by it; 0: 1/sqrt(head_dim)
  float attention_softcap = 0;   // of scores; 0: none
  float logit_softcap = 0;       // 0: none
  bool alibi = false;
  std::vector<float> alibi_slopes;  // a head; empty: the usual ones
  float query_position_slope = 0;   // queries grow by 1 + slope * log(1 + floor(position / unit))
  int32_t query_position_unit = 1;

  attention::RopeConfig rope;
  attention::RopeConfig local_rope;    // of the layers with a window; style none: as the others'
  std::vector<float> rope_divisors;    // of each frequency of `rope`, when the file brings them (Llama 3)
  int32_t window = 0;                  // of the layers that have one; 0: none has
  int32_t window_each_way = 0;         // likewise, of an encoder: tokens that each sees to either side
  std::vector<LayerKind> layer_kinds;  // empty: all are alike, and have the window where there is one

  // Where layers differ in these (a family that says `sizes_by_layer`); empty: each has the model's.
  std::vector<int32_t> layer_ffn, layer_kv_heads, layer_head_dim;
  bool sizes_by_layer = false;
  bool key_is_value = false;     // in layers without a window: both are made by the same weights
  int32_t shared_kv_layers = 0;  // the last ones: they read the cache of the last layer of their kind before them
  int32_t layer_input = 0;       // numbers that a token gives to each layer beside the stream; 0: none

  kvcache::FormWish kv;   // of the cache the checkpoint was made for, where it says so
  std::string kv_index;   // likewise; empty: it does not say
  int32_t page_size = 0;  // likewise; 0

  PoolingRule pooling;          // of embeddings
  bool encoder = false;         // ModelInfo's
  int32_t labels = 0;           // likewise
  bool two_separators = false;  // likewise
  int32_t next_layers = 0;      // ModelInfo's; behind `layers` in the files
  int32_t qkv_input = 0;        // what queries, keys and values are made of, where it is not the stream (EAGLE-3); 0
  int32_t first_position = 0;   // of learned positions: the row of the first token
  int32_t token_types = 0;      // texts of a pair that tokens are told apart by
  // An encoder-decoder (`layers` is then the more of both, as they take turns in the cache): its layers, the token that
  // the decoder begins with, and the buckets of its biases by distance. 0: it is none.
  int32_t encoder_layers = 0, decoder_layers = 0, decoder_start = 0;
  int32_t bias_buckets = 0, bias_reach = 0;
  double step_ms = 0;  // dummy: a step takes at least so long
  uint64_t dummy_seed = 0;
  bool from_gguf = false;         // its tensors lie as GGUF's converters leave them
  bool from_mistral = false;      // a folder as Mistral publishes it: names of its own, rows of heads as in GGUF files
  int32_t int4_zero_shift = 0;    // of the zeros that a folder of 4 bits stores (Int4)
  std::string dummy_expert_type;  // where experts' weights are of another type than the others
  int32_t dummy_lost_rank = -1;   // which fails at step `dummy_lost_step`: tests see what becomes of the others
  int32_t dummy_lost_step = 0;
  int32_t dummy_hung_rank = -1;  // whose GPU stops in that step
  RankPart part;  // of a network that is split over ranks: heads, ffn, vocab and the like are then this rank's
  LatentConfig latent;

  LayerKind kind(int32_t layer) const {
    return layer_kinds.empty() ? LayerKind{.windowed = window > 0} : layer_kinds[size_t(layer)];
  }
  bool windowed(int32_t layer) const { return window > 0 && kind(layer).windowed; }
  bool is_linear(int32_t layer) const { return linear.taps > 0 && kind(layer).linear; }
  bool has_cache(int32_t layer) const { return cache_layer(layer) == layer && !is_linear(layer); }
  int32_t ffn_of(int32_t layer) const { return layer_ffn.empty() ? ffn : layer_ffn[size_t(layer)]; }
  int32_t kv_heads_of(int32_t layer) const { return layer_kv_heads.empty() ? kv_heads : layer_kv_heads[size_t(layer)]; }
  int32_t head_dim_of(int32_t layer) const { return layer_head_dim.empty() ? head_dim : layer_head_dim[size_t(layer)]; }
  // The layer whose keys and values this one reads: itself, or one before it. -1: there is none.
  int32_t cache_layer(int32_t layer) const;
  // Layers with a window have caches of another shape than the others.
  bool two_cache_shapes() const { return !layer_kv_heads.empty() || !layer_head_dim.empty(); }
  // Of one token, with its scales; of all layers, or of those with a window alone.
  int64_t kv_bytes_per_token(const kvcache::CacheForm& form, bool windowed_only) const;
  // Of one sequence, in all layers; 0: it has no state.
  int64_t state_bytes() const;
  // Every `pattern`-th layer has no window, the others do.
  void set_window_pattern(int32_t pattern);
  // LongRoPE's magnitude is that of the model's whole context, whichever part of it is served.
  void settle_longrope();
  // Parameters of experts that a token does not choose.
  int64_t idle_parameters() const;
  // Every field within what the rest of the program can bear; names the first that is not.
  Status validate() const;
  ModelInfo info() const;

 private:
  Status validate_layer_sizes() const;
  Status validate_latent() const;
};

Result<ModelConfig> config_from_gguf(const Gguf& gguf);
Result<ModelConfig> config_from_json(std::string_view text, const std::string& name);     // Hugging Face's config.json
Result<ModelConfig> config_from_params(std::string_view text, const std::string& name);   // ppl.llm's params.json
Result<ModelConfig> config_from_mistral(std::string_view text, const std::string& name);  // Mistral's params.json
Result<ModelConfig> config_from_dummy(std::string_view spec);                             // what follows "dummy:"

}  // namespace kvasir::model
