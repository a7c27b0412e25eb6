// What a network is, whatever file said so: the hyperparameters every architecture reads.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "attention/rope.h"
#include "core/status.h"
#include "model/runner.h"

namespace kvasir::model {

class Gguf;

enum class Activation : uint8_t { silu, gelu_tanh };

struct ModelConfig {
  std::string name, architecture, quantization;
  int32_t vocab = 0, context = 0, layers = 0, hidden = 0, ffn = 0;
  int32_t heads = 0, kv_heads = 0, head_dim = 0;
  float norm_eps = 1e-5f;
  float norm_shift = 0;  // added to every norm weight (Gemma's checkpoints store w - 1)
  float embedding_scale = 1;
  bool tied_head = false;  // the head is the embedding even where the files hold another
  float query_scale = 0;   // scores are multiplied by it; 0: 1/sqrt(head_dim)
  Activation activation = Activation::silu;
  attention::RopeConfig rope;
  attention::RopeConfig local_rope;  // of the windowed layers, when window_pattern is set
  std::vector<float> rope_divisors;  // of each frequency of `rope`, when the file brings them (Llama 3)
  int32_t window = 0;                // 0: none
  int32_t window_pattern = 0;        // 0: every layer has the window; n: every n-th layer has none
  double step_ms = 0;                // dummy: a step takes at least so long
  uint64_t dummy_seed = 0;

  bool windowed(int32_t layer) const {
    return window > 0 && (window_pattern == 0 || (layer + 1) % window_pattern != 0);
  }
  // Every field within what the rest of the program can bear; names the first that is not.
  Status validate() const;
  ModelInfo info() const;
};

Result<ModelConfig> config_from_gguf(const Gguf& gguf);
Result<ModelConfig> config_from_json(std::string_view text, const std::string& name);    // Hugging Face's config.json
Result<ModelConfig> config_from_params(std::string_view text, const std::string& name);  // ppl.llm's params.json
Result<ModelConfig> config_from_dummy(std::string_view spec);                            // what follows "dummy:"

}  // namespace kvasir::model
