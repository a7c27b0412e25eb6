// A folder of safetensors (one file, or shards named by an index) as a network's weights. Tensors are asked
// for by GGUF's names and found under Hugging Face's, or Mistral's.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/status.h"
#include "model/formats/mapped_file.h"
#include "model/formats/tensor_names.h"
#include "model/formats/weights.h"

namespace kvasir::model {

struct SafeTensor {
  WeightType type = WeightType::f32;
  std::vector<int64_t> shape;
  const uint8_t* data = nullptr;
  int64_t bytes = 0;
  int file = 0;
};
using SafeTensors = std::unordered_map<std::string, SafeTensor>;

// Adds one file's tensors; every claim is checked against the bytes there are.
Status parse_safetensors(const std::string& name, std::span<const uint8_t> bytes, int file, SafeTensors* out);

// `tied`: the head is the embedding, whatever else the files hold. `stem`: what the files' names begin with.
Result<std::unique_ptr<Weights>> open_safetensors(const std::string& folder, bool tied, TensorNames names = {},
                                                  int32_t int4_zero_shift = 0, const std::string& stem = "model");

}  // namespace kvasir::model
