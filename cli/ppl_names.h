// Flags and configuration keys of ppl.llm.serving, so that what starts its server starts this one: each does what it
// says there, or is refused by name where it says what is not so here.
#pragma once

#include <string>

#include "core/config.h"
#include "model/sampling.h"

namespace kvasir::cli {

struct ServeConfig;

struct PplNames {
  std::string stop_tokens;  // "2,32000"
  double top_p = 0;
  int top_k = 0;
  std::string model_type, model_param_path, tokenizer_path, tokenizer_config_path;

  void define(Options& options, ServeConfig& config);
  // After the model's files are known: whether they are those that are named.
  Status check(const std::string& model) const;
  // top_p and top_k, for what requests leave unset.
  void apply(model::SamplingParams& sampling) const;
};

}  // namespace kvasir::cli
