// From what an operator names as --model (a file, a directory, dummy:...) to a network's configuration, weights
// and text assets. Commands have made a file of hf:... before. Only the operator names a model, never a request.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/status.h"
#include "model/config.h"
#include "model/device.h"
#include "model/formats/weights.h"
#include "model/runner.h"
#include "model/text/text.h"

namespace kvasir::model {

struct ModelFiles {
  ModelConfig config;
  std::unique_ptr<Weights> weights;
};
Result<ModelFiles> open_model(const std::string& model);

// Whether a model is to run on a GPU, as far as that is known before its files are read.
bool prefers_gpu(const RunnerOptions& options);

// Of the first GPU here that this build can use; nothing: there is none.
std::optional<GpuMemory> gpu_memory();

// What a params.json says of how its model's cache is indexed; empty and 0 where there is none, or it does not say.
struct CacheIndexing {
  std::string kv_index;
  int32_t page_size = 0;
};
Result<CacheIndexing> read_cache_indexing(const std::string& model);

// What a tokenizer and a chat template are made of: a GGUF vocabulary, or tokenizer.json beside weights.
struct TextAssets {
  std::optional<text::GgufVocab> vocab;
  std::string tokenizer_json, tokenizer_config_json;  // when there is no vocab
  std::string chat_template;                          // empty: the model has none
  std::vector<int32_t> end_of_generation;             // beside those the tokenizer knows
};
Result<TextAssets> load_text_assets(const std::string& model);

}  // namespace kvasir::model
