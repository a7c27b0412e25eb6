#include "cli/ppl_names.h"

namespace kvasir::cli {

void define_ppl_names(Options& o) {
  // host and max_tokens_per_step are the same word for the same thing.
  o.alias("model_dir", "model");
  o.alias("port", "grpc_port");
  o.alias("max_running_batch", "max_running");
  o.alias("enable_prefix_cache", "prefix_cache");

  const char* in_model = "the model's files say it";
  for (const char* name : {"model_type", "model_format", "model_param_path", "tokenizer_path", "tokenizer_type",
                           "tokenizer_config_path", "special_tokens"})
    o.foreign(name, in_model);
  o.foreign("use_pmx", in_model, true);
  o.foreign("stop_tokens", "the model's own end tokens hold, and each request names others in stop_tokens");
  o.foreign("top_p", "each request says it (choosing_parameters.top_p)");
  o.foreign("top_k", "each request says it (choosing_parameters.top_k)");
  o.foreign("enable_penalty", "a request that asks for a penalty has it", true);
  o.foreign("tensor_parallel_size", "the model runs on one device");
  o.foreign("quant_method", "weights are computed with as the model's file has them");
  o.foreign("max_tokens_scale", "kv_memory is the cache's size in bytes; 0 takes what is left on a GPU");
  for (const char* name : {"max_tokens_per_request", "max_input_tokens_per_request", "max_output_tokens_per_request",
                           "max_total_tokens_per_request"})
    o.foreign(name, "a request is bounded by the model's context, and a tenant by its key (kvasir keys)");
  o.foreign("max_cooldown_request", "a request without room is preempted and comes back by itself");
  o.foreign("max_prefill_batch", "max_tokens_per_step bounds the prompts of a step");
  o.foreign("monitor_port", "figures are at /metrics of the HTTP port");
  o.foreign("control_port", "POST /drain of the HTTP port, or SIGTERM");
  o.foreign("enable_profiling", "step_trace writes a trace of the steps", true);
  o.foreign("disable_log_stats", "figures are at /metrics and not in the log", true);
  const char* kernels = "kernels are chosen from the shapes of a step";
  for (const char* name :
       {"disable_decoding_shm_mha", "disable_decoding_inf_mha", "disable_decoding_inf_gqa", "disable_graph_fusion"})
    o.foreign(name, kernels, true);
  for (const char* name : {"cublas_layout_hint", "configure_decoding_attn_split_k", "specify_decoding_attn_tpb"})
    o.foreign(name, kernels);
}

}  // namespace kvasir::cli
