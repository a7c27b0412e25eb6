// The options of every command that runs a model: which one, on what, and how its steps are scheduled.
#pragma once

#include "cli/hub/hub.h"
#include "core/config.h"
#include "core/log.h"
#include "engine/engine.h"
#include "model/runner.h"

namespace kvasir::cli {

// The options that say what the cache is made of.
void define_cache_form(Options& options, kvcache::FormWish& wish);
void define_attention_dtype(Options& options, std::string& dtype);

// What a step is on a GPU where nothing is said.
constexpr int kGpuRunning = 256, kGpuTokens = 4096;

struct ModelFlags {
  model::RunnerOptions model;
  engine::EngineOptions engine;
  ByteSize kv_memory, host_kv_memory, lora_memory{engine::EngineOptions().adapter_memory};
  hub::HubOptions hub;

  void define(Options& options);
  void define_adapters(Options& options);
  void define_queue(Options& options);  // serve's: what only a server with many clients needs

  // A model named hf:... becomes the file or folder it is here, downloaded when it must be. What its params.json says
  // of the cache holds where the operator says nothing.
  Status fetch();
  model::RunnerOptions runner_options() const { return model; }
  engine::EngineOptions engine_options() const;

 private:
  bool bounds_steps() const;
  void fit_device();
  Status check() const;
  const Option *kv_index_option_ = nullptr, *page_size_option_ = nullptr, *prefix_cache_option_ = nullptr,
               *max_tokens_option_ = nullptr, *max_running_option_ = nullptr, *max_step_ms_option_ = nullptr;
  int64_t event_buffer_ = 64, cache_event_ring_ = 4096;
  std::string kv_index_ = "page_table";
  std::vector<std::string> tenant_weights_, lora_;
};

}  // namespace kvasir::cli
