#include "model/cpu/runner.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>

#include "core/cat.h"
#include "core/check.h"
#include "core/host.h"
#include "model/arch/adapter_places.h"
#include "model/cache_form.h"
#include "model/cpu/cache.h"
#include "model/cpu/ops.h"
#include "model/draws.h"
#include "model/streaming.h"

namespace kvasir::model::cpu {
namespace {

// Logits of so many rows are made at a time, so that scoring a long prompt needs no room for all.
constexpr int64_t kLogitRows = 64;

class CpuRunner final : public Runner {
 public:
  CpuRunner(const ModelConfig& config, const RunnerOptions& options, int threads, kvcache::CacheForm form)
      : config_(config),
        options_(options),
        info_(config.info()),
        form_(std::move(form)),
        pool_(threads),
        draws_(config.vocab, threads) {
    info_.kv_bytes_per_token = config.kv_bytes_per_token(form_, false);
    info_.windowed_kv_bytes = config.kv_bytes_per_token(form_, true);
    info_.kv_type = form_.to_string();
  }

  Status load(std::unique_ptr<Weights> weights, const attention::Backend* attention, const LoadProgress& progress) {
    KVASIR_TRY(say_streaming(config_, options_, &info_));
    CpuOptions o;
    o.precise = options_.precise;
    o.max_batch = options_.max_batch;
    o.max_tokens = options_.max_tokens;
    o.max_kvlen = options_.max_kvlen;
    o.max_logit_rows = kLogitRows;
    o.page_size = options_.page_size;
    o.index_mode = options_.index_mode;
    o.attention = attention;
    o.runner = options_;
    ops_.emplace(o, pool_, best_kernels());
    pool_.begin_step();  // the workers stay awake between the tensors
    auto network = load_network(config_, *weights, *ops_, progress);
    pool_.end_step();
    if (!network.ok()) return network.status();
    network_ = std::move(network).value();
    info_.parameters = weights->parameters();
    info_.weight_bytes = ops_->weight_bytes();
    return {};
  }

  const ModelInfo& info() const override { return info_; }
  int depth() const override { return 1; }
  int cache_groups() const override { return 2; }
  ExpertLoad expert_load() const override { return ops_->expert_load(); }
  Status allocate_cache(const CachePages& pages) override;
  Result<AdapterPtr> load_adapter(const std::string& path, int64_t room) override;
  Status launch(const Batch& batch, std::span<const SampleRow> rows) override;
  Result<std::vector<Sampled>> wait() override { return draws_.take(); }

 private:
  Status run(const Batch& batch, std::span<const SampleRow> rows);

  ModelConfig config_;
  RunnerOptions options_;
  ModelInfo info_;
  kvcache::CacheForm form_;
  ThreadPool pool_;
  std::optional<CpuOps> ops_;
  std::unique_ptr<Network> network_;
  Draws draws_;
  bool apart_ = false;                          // layers with a window have pages of their own
  std::vector<std::unique_ptr<Cache>> caches_;  // of layers without a window, and of those with one where it is another
};

Status CpuRunner::allocate_cache(const CachePages& pages) {
  KVASIR_CHECK(caches_.empty() && !pages.groups.empty() && pages.groups.size() <= 2, "the cache is allocated once");
  apart_ = pages.groups.size() > 1;
  const bool two = apart_ || config_.two_cache_shapes();
  std::vector<CacheShape> shapes(two ? 2 : 1, {form_, 0, config_.kv_heads, config_.head_dim, options_.page_size});
  std::vector<int32_t> places;
  for (int32_t layer = 0; layer < config_.layers; ++layer) {
    CacheShape& of = shapes[two && config_.windowed(layer) ? 1 : 0];
    of.kv_heads = config_.kv_heads_of(layer), of.head_dim = config_.head_dim_of(layer);
    places.push_back(config_.cache_layer(layer) == layer ? of.layers++ : -1);
  }
  std::vector<kvcache::CacheView> views;
  for (size_t i = 0; i < shapes.size(); ++i) {
    const size_t group = apart_ ? i : 0;
    KVASIR_ASSIGN(auto cache, Cache::make(shapes[i], pages.groups[group], group == 0 ? pages.host : 0));
    views.push_back(cache->view());
    caches_.push_back(std::move(cache));
  }
  return ops_->set_caches(std::move(views), apart_, std::move(places), form_.tensor_scales);
}

Result<AdapterPtr> CpuRunner::load_adapter(const std::string& path, int64_t room) {
  // float32 files become bfloat16 unless the model is precise; of quantized ones there is less.
  KVASIR_ASSIGN(const AdapterFile file, read_adapter(path, 2 * room + (1 << 20)));
  KVASIR_ASSIGN(const std::vector<LowRank> changes, place_adapter(file, config_, *network_));
  return ops_->load_adapter(changes, room);
}

Status CpuRunner::launch(const Batch& batch, std::span<const SampleRow> rows) {
  KVASIR_CHECK(!caches_.empty(), "the cache is not allocated");
  KVASIR_CHECK(int64_t(batch.tokens.size()) <= options_.max_tokens, batch.tokens.size(), " tokens, the limit is ",
               options_.max_tokens);
  auto begun = std::chrono::steady_clock::now();
  pool_.begin_step();
  Status status = run(batch, rows);
  pool_.end_step();
  if (config_.step_ms > 0)
    std::this_thread::sleep_until(begun + std::chrono::duration<double, std::milli>(config_.step_ms));
  return status;
}

Status CpuRunner::run(const Batch& batch, std::span<const SampleRow> rows) {
  KVASIR_TRY(draws_.begin(batch, rows));
  // One pool of pages may lie in two caches; only one that has a second tier moves pages.
  for (size_t i = 0; i < caches_.size(); ++i) {
    const int32_t group = apart_ ? int32_t(i) : 0;
    if (group == 0)
      for (const PageMove& m : batch.moves) caches_[i]->move(m);
    for (const PageCopy& c : batch.copies)
      if (c.group == group) caches_[i]->copy(c);
  }
  if (!batch.tokens.empty()) {
    KVASIR_TRY(ops_->begin(batch, draws_.tokens()));
    KVASIR_TRY(network_->forward());
    while (draws_.rows_left() > 0) {
      const int64_t count = std::min(kLogitRows, draws_.rows_left());
      KVASIR_ASSIGN(Buffer logits, network_->logits(draws_.rows_drawn(), count));
      draws_.draw(pool_, ops_->data(logits), logits.cols, count);
    }
    const int64_t drawn = std::ssize(rows), pooled = batch.pooled_rows();
    for (int64_t first = 0; first < pooled; first += kLogitRows) {
      const int64_t count = std::min(kLogitRows, pooled - first);
      KVASIR_ASSIGN(Buffer hidden, network_->hidden(drawn + first, count));
      add_pooled(batch.pools, first, count, ops_->data(hidden), hidden.cols, 1 / config_.logit_scale);
    }
  }
  draws_.end();
  return {};
}

}  // namespace

Result<std::unique_ptr<Runner>> make_runner(const ModelConfig& config, std::unique_ptr<Weights> weights,
                                            const RunnerOptions& options, const LoadProgress& progress) {
  if (options.quantize != "auto" && !options.quantize.empty())
    return invalid_argument(
               cat("quantize is ", options.quantize,
                   ", which is for a GPU (--device cuda); a CPU computes with weights as they are stored: auto"))
        .with_field("quantize");
  KVASIR_ASSIGN(auto form, cache_form_of(config, options.kv, options.precise ? DType::f32 : DType::f16, *weights));
  KVASIR_ASSIGN(const attention::Backend* attention,
                attention::find_backend(options.attention == "auto" ? "cpu" : options.attention));
  KVASIR_TRY(attention->available());
  int threads = options.threads > 0 ? options.threads : host_limits().cpus;
  auto runner = std::make_unique<CpuRunner>(config, options, threads, std::move(form));
  KVASIR_TRY(runner->load(std::move(weights), attention, progress));
  return std::unique_ptr<Runner>(std::move(runner));
}

}  // namespace kvasir::model::cpu
