#include "model/cuda/ranks.h"

#include <algorithm>

#include "core/cat.h"
#include "core/log.h"
#include "model/formats/shared_weights.h"

namespace kvasir::model::cuda {

using attention::cuda::check;

void Ranks::stop() {
  if (link_) link_->lose(0, unavailable("the model is unloaded"));  // whatever still waits goes on
  for (const auto& rank : ranks_)
    if (rank->stream()) cudaStreamSynchronize(rank->stream());
}

Status Ranks::load(const ModelConfig& config, const RunnerOptions& options, int threads, Weights& weights,
                   const attention::Backend* attention, const LoadProgress& progress, const Rank::Load& network) {
  KVASIR_ASSIGN(const std::vector<ModelConfig> parts, split_over_ranks(config, weights, int32_t(devices_.size())));
  const auto count = int(parts.size());
  if (count > 1) {
    KVASIR_ASSIGN(link_, Link::open(devices_));
    leaders_ = std::make_unique<ThreadPool>(count);
  }
  for (size_t i = 0; i < parts.size(); ++i)
    ranks_.push_back(std::make_unique<Rank>(parts[i], options, devices_[i], std::max(1, threads / count), link_.get()));
  if (count == 1) return on_all([&](Rank& rank) { return rank.load(weights, attention, progress, network); });
  SharedWeights shared(weights, count);
  std::vector<std::unique_ptr<Weights>> sources;
  for (int rank = 0; rank < count; ++rank) sources.push_back(shared.of_rank(rank));
  std::vector<Status> loaded(parts.size());
  const Status ran = on_all([&](Rank& rank) {
    const auto i = size_t(rank.config().part.rank);
    const auto source = std::move(sources[i]);
    return loaded[i] = rank.load(*source, attention, rank.first() ? progress : LoadProgress());
  });
  for (const Status& s : loaded) KVASIR_TRY(s);  // a file's fault, in its own words
  return ran;
}

Status Ranks::describe(const kvcache::CacheForm& form, ModelInfo* info) const {
  for (const auto& rank : ranks_) {
    const ModelConfig& c = rank->config();
    cudaDeviceProp p{};
    KVASIR_TRY(check(cudaGetDeviceProperties(&p, rank->device()), "device"));
    log_info("gpu", {{"device", std::string(p.name)},
                     {"number", rank->device()},
                     {"memory_gib", double(p.totalGlobalMem) / (1 << 30)},
                     {"multiprocessors", p.multiProcessorCount}});
    info->kv_bytes_per_token += c.kv_bytes_per_token(form, false);
    info->windowed_kv_bytes += c.kv_bytes_per_token(form, true);
    info->weight_bytes += rank->ops().weight_bytes();
    if (!several()) continue;
    RankInfo& r = info->ranks.emplace_back();
    r.device = cat("cuda:", rank->device(), ' ', p.name);
    r.heads = c.heads, r.kv_heads = c.kv_heads, r.experts = int32_t(c.part.experts.count);
    r.weight_bytes = rank->ops().weight_bytes(), r.kv_bytes_per_token = c.kv_bytes_per_token(form, false);
    log_info("rank", {{"rank", c.part.rank},
                      {"of", ranks_.size()},
                      {"device", r.device},
                      {"heads", r.heads},
                      {"kv_heads", r.kv_heads},
                      {"weight_bytes", r.weight_bytes},
                      {"bytes_per_token", r.kv_bytes_per_token}});
  }
  return {};
}

int64_t Ranks::cache_room(const kvcache::CacheForm& form) const {
  double tokens = -1, all = 0;
  for (const auto& rank : ranks_) {
    const OnDevice on(rank->device());
    const int64_t room = rank->cache_room();
    if (room < 0 || !several()) return room;
    const auto each = double(rank->config().kv_bytes_per_token(form, false));
    all += each;
    if (tokens < 0 || double(room) / each < tokens) tokens = double(room) / each;
  }
  return int64_t(tokens * all);
}

}  // namespace kvasir::model::cuda
