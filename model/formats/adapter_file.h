// The files of a low-rank adapter: PEFT's folder (adapter_config.json, adapter_model.safetensors), or a GGUF file as
// llama.cpp's converter writes it. A file is believed only as far as its bytes go, and what is not served is refused by
// its name.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "model/formats/weights.h"

namespace kvasir::model {

struct AdapterModule {
  std::string name;              // of PEFT "model.layers.3.self_attn.q_proj", of GGUF "blk.3.attn_q"
  HostTensor a, b;               // [rank, inputs], [outputs, rank]
  std::vector<float> magnitude;  // of DoRA, a number an output; empty: none
  float scale = 1;               // of their product
};

struct AdapterFile {
  std::string path;
  bool gguf = false;
  std::string architecture;  // of GGUF
  std::vector<AdapterModule> modules;
  std::shared_ptr<const std::vector<uint8_t>> bytes;  // what the tensors are in
};

// A folder or a .gguf of at most so many bytes. They are read, not mapped: who changes a file that is being loaded
// spoils the adapter alone.
Result<AdapterFile> read_adapter(const std::string& path, int64_t most_bytes);

Result<AdapterFile> peft_adapter(const std::string& path, std::string_view config, std::vector<uint8_t> safetensors);
Result<AdapterFile> gguf_adapter(const std::string& path, std::vector<uint8_t> gguf);

}  // namespace kvasir::model
