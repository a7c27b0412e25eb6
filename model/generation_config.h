// What generation_config.json of a folder says: how its makers sample the model, and which tokens end an answer.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "model/sampling.h"

namespace kvasir::model {

struct GenerationConfig {
  SamplingParams sampling;  // where a request leaves them unset
  std::vector<int32_t> end_of_generation;

  std::string sampling_json() const;  // those that are not the usual ones; {} where all are
};
// `name`: the file's, for messages.
Result<GenerationConfig> generation_config_from_json(std::string_view text, const std::string& name);
// The usual values for whatever has no such file: a GGUF file, a dummy, a folder without one.
Result<GenerationConfig> read_generation_config(const std::string& model);

}  // namespace kvasir::model
