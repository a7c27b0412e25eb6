#include "cli/ppl_names.h"

#include <charconv>
#include <filesystem>

#include "cli/serve_config.h"
#include "model/load.h"

namespace kvasir::cli {
namespace {

namespace fs = std::filesystem;

Result<std::vector<int32_t>> parse_ids(const std::string& text) {
  std::vector<int32_t> out;
  const char *at = text.data(), *end = at + text.size();
  while (at < end) {
    int32_t id = -1;
    auto [next, error] = std::from_chars(at, end, id);
    if (error != std::errc() || id < 0 || (next < end && *next != ','))
      return invalid_argument(
                 cat("stop_tokens is '", text, "'; it must be token ids with commas between them: 2,32000"))
          .with_field("stop_tokens");
    out.push_back(id);
    at = next < end ? next + 1 : end;
  }
  return out;
}

// These can only say what is so here.
void define_settled(Options& o) {
  o.foreign("model_format", {"huggingface", "safetensors", "gguf"},
            "weights are read from safetensors or GGUF, not from ONNX or PMX graphs");
  o.foreign("use_pmx", {"false"}, "weights as PMX graphs are not read: put the checkpoint they were made from there",
            true);
  o.foreign("tokenizer_type", {"huggingface"}, "the tokenizer is the model's own: tokenizer.json, or in the GGUF file");
  o.foreign("special_tokens", {}, "the tokenizer's files name them");
  o.foreign("quant_method", {"none"},
            "weights are computed with as the model's file has them: quantize the file (a GGUF of Q8_0 or Q4_0)");
  o.foreign("max_cooldown_request", {}, "a request without room is preempted and comes back by itself: leave it out");
  o.foreign("max_prefill_batch", {}, "max_tokens_per_step bounds the prompts of a step: leave it out");
  o.foreign("control_port", {}, "POST /drain of the HTTP port, or SIGTERM, ends the server: leave it out");
  o.foreign("enable_profiling", {"false"}, "step_trace writes a trace of the steps", true);
  o.foreign("disable_log_stats", {"true"}, "figures are at /metrics and not in the log", true);
  const char* kernels = "kernels are chosen from the shapes of a step";
  for (const char* name :
       {"disable_decoding_shm_mha", "disable_decoding_inf_mha", "disable_decoding_inf_gqa", "disable_graph_fusion"})
    o.foreign(name, {"false"}, kernels, true);
  o.foreign("cublas_layout_hint", {"default"}, kernels);
  o.foreign("configure_decoding_attn_split_k", {"1"}, kernels);  // which says that a heuristic decides
  o.foreign("specify_decoding_attn_tpb", {"0"}, kernels);        // likewise
}

}  // namespace

void PplNames::define(Options& o, ServeConfig& config) {
  // host and max_tokens_per_step are the same word for the same thing.
  o.alias("model_dir", "model");
  o.alias("port", "grpc_port");
  o.alias("monitor_port", "http_port");  // its figures are at /metrics there, too
  o.alias("max_running_batch", "max_running");
  o.alias("enable_prefix_cache", "prefix_cache");
  o.alias("max_tokens_scale", "kv_memory_share");
  o.alias("tensor_parallel_size", "ranks");

  o.section("As ppl.llm.serving has it");
  o.add("kv_memory_share", &config.model.engine.kv_memory_share, "Part of what kv_memory 0 is that the cache takes")
      .range(0.01, 1);
  o.add("stop_tokens", &stop_tokens, "Token ids that end every answer, beside the model's own and a request's: 2,32000")
      .value_name("IDS");
  o.add("top_p", &top_p, "top_p of requests that do not say; 0: what generation_config says").range(0, 1);
  o.add("top_k", &top_k, "top_k of requests that do not say; 0: what generation_config says").range(0, 1 << 20);
  o.add("enable_penalty", &config.server.penalties, "Requests may ask for penalties");
  o.add("max_input_tokens_per_request", &config.model.engine.max_input_tokens,
        "Prompt tokens of a request; 0: no bound")
      .at_least(0);
  o.add("max_output_tokens_per_request", &config.model.engine.max_output_tokens,
        "Tokens a request may ask for, and has where it asks for no number; 0: no bound")
      .at_least(0);
  o.add("max_total_tokens_per_request", &config.model.engine.max_total_tokens,
        "Prompt and answer together; 0: the model's context")
      .at_least(0);
  o.alias("max_tokens_per_request", "max_total_tokens_per_request");
  const char* inside = "What there is of it must be the model's own";
  o.add("model_type", &model_type, "The architecture, which must be the one that the model's files name");
  o.add("model_param_path", &model_param_path, inside).value_name("FILE");
  o.add("tokenizer_path", &tokenizer_path, inside).value_name("FILE");
  o.add("tokenizer_config_path", &tokenizer_config_path, inside).value_name("FILE");
  define_settled(o);
  o.check([this, &config]() -> Status {
    KVASIR_ASSIGN(config.model.engine.stop_tokens, parse_ids(stop_tokens));
    return {};
  });
}

Status PplNames::check(const std::string& model) const {
  std::error_code error;
  for (auto [name, path] : {std::pair{"model_param_path", &model_param_path},
                            {"tokenizer_path", &tokenizer_path},
                            {"tokenizer_config_path", &tokenizer_config_path}}) {
    if (path->empty()) continue;
    const fs::path here = fs::weakly_canonical(*path, error), home = fs::weakly_canonical(model, error);
    if (here != home && here.parent_path() != home)
      return invalid_argument(cat(name, " is ", *path, "; it is read from the model itself, ", model,
                                  ": put the file there, or leave ", name, " out"))
          .with_field(name);
  }
  if (model_type.empty()) return {};
  KVASIR_ASSIGN(auto files, model::open_model(model));
  if (files.config.architecture == model_type) return {};
  return invalid_argument(cat("model_type is ", model_type, "; the model's files say ", files.config.architecture))
      .with_field("model_type");
}

void PplNames::apply(model::SamplingParams& sampling) const {
  if (top_p > 0) sampling.top_p = float(top_p);
  if (top_k > 0) sampling.top_k = top_k;
}

}  // namespace kvasir::cli
