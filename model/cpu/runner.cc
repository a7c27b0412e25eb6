#include "model/cpu/runner.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>

#include "core/cat.h"
#include "core/check.h"
#include "core/host.h"
#include "model/cpu/cache.h"
#include "model/cpu/ops.h"
#include "model/sampler.h"

namespace kvasir::model::cpu {
namespace {

// Logits of so many rows are made at a time, so that scoring a long prompt needs no room for all.
constexpr int64_t kLogitRows = 64;

class CpuRunner final : public Runner {
 public:
  CpuRunner(const ModelConfig& config, const RunnerOptions& options, int threads, DType kv)
      : config_(config), options_(options), info_(config.info()), kv_(kv), pool_(threads) {
    info_.kv_bytes_per_token = dtype_bytes(kv, 2 * int64_t(config.layers) * config.kv_heads * config.head_dim);
    for (int i = 0; i < threads; ++i) samplers_.emplace_back(config.vocab);
  }

  Status load(std::unique_ptr<Weights> weights, const attention::Backend* attention, const LoadProgress& progress) {
    CpuOptions o;
    o.precise = options_.precise;
    o.max_batch = options_.max_batch;
    o.max_tokens = options_.max_tokens;
    o.max_kvlen = options_.max_kvlen;
    o.max_logit_rows = kLogitRows;
    o.page_size = options_.page_size;
    o.index_mode = options_.index_mode;
    o.attention = attention;
    ops_.emplace(o, pool_, best_kernels());
    pool_.begin_step();  // the workers stay awake between the tensors
    auto network = find_architecture(config_.architecture)->load(config_, *weights, *ops_, progress);
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
  Status allocate_cache(const CachePages& pages) override;
  Status launch(const Batch& batch, std::span<const SampleRow> rows) override;
  Result<std::vector<Sampled>> wait() override {
    KVASIR_CHECK(launched_, "wait() without a launch()");
    launched_ = false;
    return std::move(samples_);
  }

 private:
  Status resolve_tokens(const Batch& batch);
  Status run(const Batch& batch, std::span<const SampleRow> rows);

  ModelConfig config_;
  RunnerOptions options_;
  ModelInfo info_;
  DType kv_;
  ThreadPool pool_;
  std::optional<CpuOps> ops_;
  std::unique_ptr<Network> network_;
  std::vector<Sampler> samplers_;
  std::vector<std::unique_ptr<Cache>> caches_;  // by layer group
  std::vector<int32_t> tokens_;                 // the step's, all real
  std::vector<int32_t> previous_;               // the last launch's samples, by row
  std::vector<Sampled> samples_;
  bool launched_ = false;
};

Status CpuRunner::allocate_cache(const CachePages& pages) {
  KVASIR_CHECK(caches_.empty() && !pages.groups.empty() && pages.groups.size() <= 2, "the cache is allocated once");
  const bool apart = pages.groups.size() > 1;
  std::vector<int32_t> places, layers(pages.groups.size(), 0);
  for (int32_t layer = 0; layer < config_.layers; ++layer)
    places.push_back(layers[apart && config_.windowed(layer) ? 1 : 0]++);
  std::vector<kvcache::CacheView> views;
  for (size_t g = 0; g < layers.size(); ++g) {
    const CacheShape shape{kv_, layers[g], config_.kv_heads, config_.head_dim, options_.page_size};
    KVASIR_ASSIGN(auto cache, Cache::make(shape, pages.groups[g], g == 0 ? pages.host : 0));
    views.push_back(cache->view());
    caches_.push_back(std::move(cache));
  }
  return ops_->set_caches(std::move(views), std::move(places));
}

Status CpuRunner::resolve_tokens(const Batch& batch) {
  tokens_ = batch.tokens;
  for (int32_t& t : tokens_) {
    if (t < 0) {
      size_t row = size_t(-1 - t);
      KVASIR_CHECK(row < previous_.size(), "the step names sample row ", row, " of ", previous_.size());
      t = previous_[row];
    }
    if (t < 0 || t >= config_.vocab)
      return invalid_argument(cat("token id ", t, " is outside the vocabulary of ", config_.vocab))
          .with_field("prompt");
  }
  return {};
}

Status CpuRunner::launch(const Batch& batch, std::span<const SampleRow> rows) {
  KVASIR_CHECK(!launched_, "a launch is in flight already");
  KVASIR_CHECK(!caches_.empty(), "the cache is not allocated");
  KVASIR_CHECK(rows.size() == batch.logit_rows.size(), rows.size(), " sample rows for ", batch.logit_rows.size());
  KVASIR_CHECK(int64_t(batch.tokens.size()) <= options_.max_tokens, batch.tokens.size(), " tokens, the limit is ",
               options_.max_tokens);
  auto begun = std::chrono::steady_clock::now();
  pool_.begin_step();
  Status status = run(batch, rows);
  pool_.end_step();
  if (config_.step_ms > 0)
    std::this_thread::sleep_until(begun + std::chrono::duration<double, std::milli>(config_.step_ms));
  launched_ = status.ok();
  return status;
}

Status CpuRunner::run(const Batch& batch, std::span<const SampleRow> rows) {
  KVASIR_TRY(resolve_tokens(batch));
  for (const PageMove& m : batch.moves) caches_[0]->move(m);
  for (const PageCopy& c : batch.copies) caches_[size_t(c.group)]->copy(c);
  samples_.assign(rows.size(), {});
  if (!tokens_.empty()) {
    KVASIR_TRY(ops_->begin(batch, tokens_));
    KVASIR_TRY(network_->forward());
    for (int64_t first = 0; first < int64_t(rows.size()); first += kLogitRows) {
      int64_t count = std::min(kLogitRows, int64_t(rows.size()) - first);
      KVASIR_ASSIGN(Buffer logits, network_->logits(first, count));
      pool_.for_each(count, 1, [&](int64_t i, int worker) {
        std::span<float> row(ops_->data(logits) + i * logits.cols, size_t(config_.vocab));
        samples_[size_t(first + i)] = samplers_[size_t(worker)].sample(row, rows[size_t(first + i)]);
      });
    }
  }
  previous_.clear();
  for (const Sampled& s : samples_) previous_.push_back(s.token);
  return {};
}

Result<DType> kv_type(const RunnerOptions& options) {
  if (options.kv_dtype == "auto" || options.kv_dtype.empty()) return options.precise ? DType::f32 : DType::f16;
  DType type;
  if (parse_dtype(options.kv_dtype, &type) && (type == DType::f32 || type == DType::f16 || type == DType::bf16))
    return type;
  return invalid_argument(cat("kv_dtype is ", options.kv_dtype, "; on a CPU it is auto, float32, float16 or bfloat16"))
      .with_field("kv_dtype");
}

}  // namespace

Result<std::unique_ptr<Runner>> make_runner(const ModelConfig& config, std::unique_ptr<Weights> weights,
                                            const RunnerOptions& options, const LoadProgress& progress) {
  KVASIR_ASSIGN(DType kv, kv_type(options));
  KVASIR_ASSIGN(const attention::Backend* attention,
                attention::find_backend(options.attention == "auto" ? "cpu" : options.attention));
  KVASIR_TRY(attention->available());
  RunnerOptions o = options;
  int threads = o.threads > 0 ? o.threads : host_limits().cpus;
  if (o.max_batch <= 0) o.max_batch = 64;
  if (o.max_tokens <= 0) o.max_tokens = 512;
  if (o.max_kvlen <= 0) o.max_kvlen = config.context;
  auto runner = std::make_unique<CpuRunner>(config, o, threads, kv);
  KVASIR_TRY(runner->load(std::move(weights), attention, progress));
  return std::unique_ptr<Runner>(std::move(runner));
}

}  // namespace kvasir::model::cpu
