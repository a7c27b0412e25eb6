#include "model/cpu/runner.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <thread>

#include "core/cat.h"
#include "core/check.h"
#include "core/host.h"
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
  ~CpuRunner() override {
    if (cache_memory_) ::munmap(cache_memory_, cache_bytes_);
  }

  Status load(std::unique_ptr<Weights> weights, const attention::Backend* attention, const LoadProgress& progress) {
    CpuOptions o;
    o.precise = options_.precise;
    o.max_batch = options_.max_batch;
    o.max_tokens = options_.max_tokens;
    o.max_kvlen = options_.max_kvlen;
    o.max_logit_rows = kLogitRows;
    o.page_size = options_.page_size;
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
  Status allocate_cache(int64_t pages) override;
  Status launch(const Batch& batch, std::span<const SampleRow> rows) override;
  Result<std::vector<Sampled>> wait() override {
    KVASIR_CHECK(launched_, "wait() without a launch()");
    launched_ = false;
    return std::move(samples_);
  }

 private:
  void copy_page(const PageCopy& c);
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
  uint8_t* cache_memory_ = nullptr;
  size_t cache_bytes_ = 0;
  kvcache::CacheView cache_;
  std::vector<int32_t> tokens_;    // the step's, all real
  std::vector<int32_t> previous_;  // the last launch's samples, by row
  std::vector<Sampled> samples_;
  bool launched_ = false;
};

Status CpuRunner::allocate_cache(int64_t pages) {
  KVASIR_CHECK(cache_memory_ == nullptr, "the cache is allocated once");
  cache_.dtype = kv_;
  cache_.max_tokens = pages * options_.page_size;
  cache_.layers = config_.layers, cache_.kv_heads = config_.kv_heads, cache_.head_dim = config_.head_dim;
  // [layer, key or value, head, token, head_dim]: a head's keys are one run in memory.
  kvcache::Strides& s = cache_.strides;
  s.token = config_.head_dim;
  s.head = cache_.max_tokens * s.token;
  s.kv = config_.kv_heads * s.head;
  s.layer = 2 * s.kv;
  cache_bytes_ = size_t(std::max<int64_t>(1, dtype_bytes(kv_, config_.layers * s.layer)));
  void* p = ::mmap(nullptr, cache_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED)
    return resource_exhausted(cat("no memory for a key/value cache of ", cache_bytes_, " bytes; lower kv_memory"));
  cache_memory_ = static_cast<uint8_t*>(p);
  cache_.data = p;
  return ops_->set_cache(cache_);
}

void CpuRunner::copy_page(const PageCopy& c) {
  const kvcache::Strides& s = cache_.strides;
  size_t bytes = size_t(dtype_bytes(kv_, int64_t(c.tokens) * s.token));
  for (int64_t run = 0; run < 2 * int64_t(config_.layers) * config_.kv_heads; ++run) {
    auto at = [&](int32_t page) {
      return cache_memory_ + dtype_bytes(kv_, run * s.head + int64_t(page) * options_.page_size * s.token);
    };
    std::memcpy(at(c.to), at(c.from), bytes);
  }
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
  KVASIR_CHECK(cache_memory_ != nullptr, "the cache is not allocated");
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
  for (const PageCopy& c : batch.copies) copy_page(c);
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
