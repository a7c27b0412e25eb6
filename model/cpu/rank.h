// One rank's part of a network on the host: its weights, its cache, its workers. A network that is not split has one.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "model/arch/registry.h"
#include "model/cpu/cache.h"
#include "model/cpu/link.h"
#include "model/cpu/ops.h"
#include "model/draws.h"

namespace kvasir::model::cpu {

class Rank {
 public:
  // Logits of so many rows are made at a time, so that scoring a long prompt needs no room for all.
  static constexpr int64_t kLogitRows = 64;

  // `link` is null where there is one.
  Rank(const ModelConfig& part, const RunnerOptions& options, const kvcache::CacheForm& form, int threads, Link* link)
      : config_(part), options_(options), form_(form), link_(link), pool_(threads) {}

  using Load = std::function<Result<std::unique_ptr<Network>>(CpuOps& ops)>;
  // `network`: how it is loaded, where it is not the one that the configuration names.
  Status load(Weights& weights, const attention::Backend* attention, const LoadProgress& progress,
              const Load& network = {});
  Status allocate_cache(const CachePages& pages);
  // All ranks at once, with the same batch; the first of them draws `rows` rows and pools what is to be pooled.
  Status step(const Batch& batch, const std::vector<int32_t>& tokens, int64_t rows, Draws* draws);

  int threads() const { return pool_.threads(); }
  const ModelConfig& config() const { return config_; }
  CpuOps& ops() { return *ops_; }
  const CpuOps& ops() const { return *ops_; }
  Network& network() { return *network_; }
  const Network& network() const { return *network_; }
  bool has_cache() const { return !caches_.empty(); }

 private:
  Status forward(const Batch& batch, const std::vector<int32_t>& tokens, int64_t rows, Draws* draws);

  const ModelConfig config_;
  const RunnerOptions options_;
  const kvcache::CacheForm form_;
  Link* const link_;
  ThreadPool pool_;
  std::optional<CpuOps> ops_;
  std::unique_ptr<Network> network_;
  bool apart_ = false;                          // layers with a window have pages of their own
  std::vector<std::unique_ptr<Cache>> caches_;  // of layers without a window, and of those with one where it is another
};

}  // namespace kvasir::model::cpu
