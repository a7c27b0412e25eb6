#include "model/arch/experts.h"

#include <nlohmann/json.hpp>

namespace kvasir::model {
namespace {

constexpr int32_t kMostLayers = 1024;  // validate() refuses more

Status read_dense_layers(const JsonKeys& in, ModelConfig& c) {
  int32_t step = 1, first = 0;
  KVASIR_TRY(in.get({"decoder_sparse_step"}, &step));
  KVASIR_TRY(in.get({"first_k_dense_replace"}, &first));
  const nlohmann::json* list = in.find("mlp_only_layers");
  if (step < 1) return in.wrong("decoder_sparse_step", "at least 1");
  if (list && !list->is_array()) return in.wrong("mlp_only_layers", "a list of layers");
  if (step == 1 && first == 0 && (!list || list->empty())) return {};
  c.experts.dense.assign(size_t(std::min(c.layers, kMostLayers)), false);
  for (size_t i = 0; i < c.experts.dense.size(); ++i)
    c.experts.dense[i] = int64_t(i) < first || (i + 1) % size_t(step) != 0;
  for (const nlohmann::json& layer : list ? *list : nlohmann::json::array()) {
    if (!layer.is_number_unsigned()) return in.wrong("mlp_only_layers", "a list of layers");
    if (const auto i = layer.get<uint64_t>(); i < c.experts.dense.size()) c.experts.dense[i] = true;
  }
  return {};
}

}  // namespace

Status read_experts(const JsonKeys& in, ModelConfig& c) {
  ExpertsConfig& e = c.experts;
  Routing& r = e.routing;
  KVASIR_TRY(in.need({"num_experts", "num_local_experts", "n_routed_experts"}, &r.experts));
  if (r.experts == 0) return in.wrong("num_experts", "at least 1");
  KVASIR_TRY(in.need({"num_experts_per_tok", "experts_per_token"}, &r.used));
  e.ffn = c.ffn;
  KVASIR_TRY(in.get({"moe_intermediate_size"}, &e.ffn));
  KVASIR_TRY(in.get("norm_topk_prob", &r.normalized));
  KVASIR_TRY(in.get({"routed_scaling_factor"}, &r.scale));
  KVASIR_TRY(in.get({"n_group"}, &r.groups));
  KVASIR_TRY(in.get({"topk_group"}, &r.used_groups));
  KVASIR_TRY(in.get({"shared_expert_intermediate_size"}, &e.shared_ffn));
  int32_t shared = 0;
  KVASIR_TRY(in.get({"n_shared_experts"}, &shared));
  if (shared > 0) e.shared_ffn = int32_t(std::min<int64_t>(int64_t(shared) * e.ffn, INT32_MAX));
  in.pass_over({"router_jitter_noise"});  // of training
  return read_dense_layers(in, c);
}

Status read_experts(const GgufKeys& in, ModelConfig& c) {
  ExpertsConfig& e = c.experts;
  Routing& r = e.routing;
  KVASIR_TRY(in.need("expert_count", &r.experts));
  if (r.experts == 0) return invalid_argument(cat(in.file().name(), ": ", in.key("expert_count"), " is 0"));
  KVASIR_TRY(in.need("expert_used_count", &r.used));
  e.ffn = c.ffn;
  KVASIR_TRY(in.get("expert_feed_forward_length", &e.ffn));
  KVASIR_TRY(in.get("expert_weights_norm", &r.normalized));
  KVASIR_TRY(in.get("expert_weights_scale", &r.scale));
  if (r.scale == 0) r.scale = 1;
  KVASIR_TRY(in.get("expert_group_count", &r.groups));
  KVASIR_TRY(in.get("expert_group_used_count", &r.used_groups));
  int32_t gating = 0, shared = 0;
  KVASIR_TRY(in.get("expert_gating_func", &gating));
  constexpr ExpertScores kScores[] = {ExpertScores::softmax, ExpertScores::sigmoid, ExpertScores::of_chosen};
  if (gating > 3)
    return invalid_argument(cat(in.file().name(), ": ", in.key("expert_gating_func"), " is ", gating,
                                "; 1 (softmax), 2 (sigmoid) and 3 (softmax of the chosen) are supported"));
  if (gating > 0) r.scores_of = kScores[gating - 1];
  KVASIR_TRY(in.get("expert_shared_count", &shared));
  if (shared > 0) e.shared_ffn = int32_t(std::min<int64_t>(int64_t(shared) * e.ffn, INT32_MAX));
  KVASIR_TRY(in.get("expert_shared_feed_forward_length", &e.shared_ffn));
  in.pass_over({"leading_dense_block_count", "decoder_sparse_step"});  // the tensors say it
  auto has = [&](std::string_view name) { return in.file().tensor(name) != nullptr; };
  std::vector<bool> dense;
  for (int32_t i = 0; i < std::min(c.layers, kMostLayers); ++i)
    dense.push_back(!has(cat("blk.", i, ".ffn_gate_inp.weight")));
  if (std::find(dense.begin(), dense.end(), true) != dense.end()) e.dense = std::move(dense);
  return {};
}

}  // namespace kvasir::model
