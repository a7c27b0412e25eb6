// What kvasir inspect has found out of a model, as JSON or as lines of text.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/kv_memory.h"
#include "kvcache/form.h"
#include "model/formats/weights.h"
#include "model/load.h"
#include "scheduler/options.h"

namespace kvasir::cli {

// How many tensors there are of each type, and their bytes.
using TensorTypes = std::map<std::string, std::pair<int64_t, int64_t>>;
template <class Tensors>
TensorTypes types_of(const Tensors& tensors) {
  TensorTypes out;
  for (const auto& t : tensors) {
    auto& [count, bytes] = out[std::string(model::type_info(t.type)->name)];
    ++count, bytes += t.bytes;
  }
  return out;
}

// The pages that serve makes of its memory, and how that comes about.
struct PageMemory {
  int64_t memory = 0;
  std::string formula;
  std::vector<scheduler::PageGroup> groups;
  engine::StateSlots states;
};

// What serving takes of this machine's memory on its processors, or of a GPU's; and what there is.
struct Needs {
  bool on_gpu = false;
  std::string gpu;  // its name; empty: there is none here, and so no limit
  int64_t weights = 0, steps = 0, cache = 0, program = 0;
  int64_t limit = 0, free = 0;
  bool is_there() const { return !on_gpu || !gpu.empty(); }
  int64_t all() const { return weights + steps + cache + program; }
  int64_t lacking() const { return is_there() ? std::max<int64_t>(0, all() - free) : 0; }
};

// A draft model's part of that memory.
struct DraftMemory {
  std::string name;
  int64_t weight_bytes = 0, kv_bytes_per_token = 0, pages = 0, bytes = 0;
};

struct Inspection {
  model::ModelFiles files;
  model::ModelInfo info;
  std::vector<model::ModelConfig> ranks;
  kvcache::CacheForm form;
  std::string attention_dtype;
  int batch = 0, context = 0;  // that `cache` is for
  int32_t page_size = 0;
  int64_t cache = 0;  // bytes
  PageMemory pages;
  Needs needs;
  std::optional<DraftMemory> draft;
  bool list_tensors = false;
  // As the files are; of dummies these change with what is read of them.
  std::vector<model::HostTensor> tensors;
  TensorTypes types;
  int64_t parameters = 0, bytes = 0;

  int64_t active_parameters() const { return parameters - files.config.idle_parameters(); }
};

nlohmann::ordered_json inspection_json(const Inspection& found);
void print_inspection(const Inspection& found);
void print_types(const TensorTypes& types);
std::string human(int64_t bytes);  // "1.50 GiB"

}  // namespace kvasir::cli
