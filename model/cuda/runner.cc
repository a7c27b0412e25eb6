#include "model/cuda/runner.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>

#include "core/cat.h"
#include "core/check.h"
#include "core/host.h"
#include "core/log.h"
#include "model/arch/adapter_places.h"
#include "model/cache_form.h"
#include "model/cuda/cache.h"
#include "model/cuda/draw.h"
#include "model/cuda/graphs.h"
#include "model/cuda/kernels.h"
#include "model/cuda/ops.h"
#include "model/draws.h"
#include "model/streaming.h"

namespace kvasir::model::cuda {
namespace {

using attention::cuda::check;

// Logits of so many rows are made at a time; so many of them are drawn from while the next ones are on their way.
constexpr int64_t kLogitRows = 512, kDrawnRows = 16;

// One prompt of `tokens` zeros in the first pages of each of `groups` caches, all of whose logits are wanted.
Batch first_pages(int64_t tokens, int64_t page_size, kvcache::IndexMode mode, size_t groups) {
  Batch b;
  b.tokens.resize(size_t(tokens));
  b.positions.resize(size_t(tokens));
  std::iota(b.positions.begin(), b.positions.end(), 0);
  b.logit_rows = b.positions;
  b.seqstarts = b.kvstarts = {0, tokens};
  b.start_pos = {0};
  b.max_seqlen = b.max_kvlen = tokens;
  b.max_pages = (tokens + page_size - 1) / page_size;
  const bool table = mode == kvcache::IndexMode::page_table;
  const int64_t count = table ? b.max_pages : mode == kvcache::IndexMode::offset ? 1 : tokens;
  for (int64_t i = 0; i < count; ++i) b.cachestarts.push_back(table ? i * page_size : i);
  b.more_cachestarts.assign(groups - 1, b.cachestarts);
  return b;
}

class CudaRunner final : public Runner, public Replaying {
 public:
  CudaRunner(const ModelConfig& config, const RunnerOptions& options, kvcache::CacheForm form)
      : config_(config),
        options_(options),
        info_(config.info()),
        form_(std::move(form)),
        pool_(std::min(8, host_limits().cpus)),
        flights_{Flight(config.vocab, pool_.threads()), Flight(config.vocab, pool_.threads())} {
    info_.kv_bytes_per_token = config.kv_bytes_per_token(form_, false);
    info_.windowed_kv_bytes = config.kv_bytes_per_token(form_, true);
    info_.kv_type = form_.to_string();
  }
  ~CudaRunner() override {
    if (stream_) cudaStreamSynchronize(stream_);
    graphs_.reset();
    network_.reset();
    ops_.reset();
    for (cudaEvent_t e : arrived_) cudaEventDestroy(e);
    for (Flight& f : flights_)
      if (f.done) cudaEventDestroy(f.done);
    if (stream_) cudaStreamDestroy(stream_);
  }

  Status load(std::unique_ptr<Weights> weights, const attention::Backend* attention, const LoadProgress& progress) {
    KVASIR_TRY(check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream"));
    KVASIR_TRY(say_streaming(config_, options_, &info_));
    CudaOptions o;
    o.max_batch = options_.max_batch;
    o.max_tokens = options_.max_tokens;
    o.max_kvlen = options_.max_kvlen;
    o.max_logit_rows = std::min(kLogitRows, options_.max_tokens);
    o.page_size = options_.page_size;
    o.index_mode = options_.index_mode;
    o.attention = attention;
    o.pool = &pool_;
    o.batch_invariant = options_.batch_invariant;
    KVASIR_ASSIGN(o.quantize, parse_quantize(options_.quantize));
    o.runner = options_;
    ops_.emplace(o, stream_);
    KVASIR_TRY(ops_->prepare());
    weights->leave_seeded();
    if (multiplies_bytes()) weights->leave_bytes();
    KVASIR_ASSIGN(network_, load_network(config_, *weights, *ops_, progress));
    info_.parameters = weights->parameters();
    info_.weight_bytes = ops_->weight_bytes();
    if (options_.graphs) graphs_.emplace(stream_);
    for (int64_t row = 0; row < o.max_logit_rows; row += kDrawnRows)
      KVASIR_TRY(check(cudaEventCreateWithFlags(&arrived_.emplace_back(), cudaEventDisableTiming), "event"));
    for (Flight& f : flights_) {
      KVASIR_TRY(check(cudaEventCreateWithFlags(&f.done, cudaEventDisableTiming), "event"));
      KVASIR_TRY(f.drawn.allocate(size_t(ops_->most_rows()) * sizeof(DeviceDraw)));
      KVASIR_TRY(f.wishes.allocate(size_t(ops_->most_rows()) * sizeof(Wish)));
      KVASIR_TRY(f.device_wishes.allocate(size_t(ops_->most_rows()) * sizeof(Wish)));
    }
    if (config_.encoder) return {};
    return logits_.allocate(size_t(o.max_logit_rows * config_.vocab) * sizeof(float));
  }

  const ModelInfo& info() const override { return info_; }
  int depth() const override { return 2; }
  int cache_groups() const override { return 2; }
  int64_t cache_room() const override {
    size_t free = 0, total = 0;
    if (cudaMemGetInfo(&free, &total) != cudaSuccess) return -1;
    return std::max<int64_t>(0, int64_t(free) - int64_t(total / 20));  // a twentieth stays for the libraries
  }
  Status allocate_cache(const CachePages& pages) override;
  Result<AdapterPtr> load_adapter(const std::string& path, int64_t room) override;
  Status launch(const Batch& batch, std::span<const SampleRow> rows) override;
  Result<std::vector<Sampled>> wait() override;
  int64_t replays() const override { return graphs_ ? graphs_->replays() : 0; }

 private:
  // A launch. What the device draws is there when `done` is; other rows' logits come to the host, whose draws (settle)
  // come before the next launch, or with wait() where there is none.
  struct Flight {
    Flight(int32_t vocab, int threads) : draws(vocab, threads) {}
    Draws draws;
    PinnedMemory drawn, wishes;  // by sample row
    DeviceMemory device_wishes;
    PinnedMemory hidden;  // of pooled rows, bfloat16
    size_t hidden_bytes = 0;
    std::vector<Batch::Pool> pools;
    cudaEvent_t done = nullptr;
    int64_t enqueued = 0;     // sample rows
    bool by_host = false;     // some of these
    bool on_its_way = false;  // what the host draws from
    Status status;
  };
  Flight& flight(int nth) { return flights_[size_t(oldest_ + nth) % flights_.size()]; }
  int64_t pooled_cols() const { return config_.labels > 0 ? config_.labels : config_.hidden; }
  Status time_products(int64_t cache_tokens);
  Status enqueue(Flight& f, const Batch& batch);
  Status forward(Flight& f);
  Status enqueue_pooled(Flight& f, int64_t rows);
  Status enqueue_draws(Flight& f, Buffer logits, int64_t count);
  Status settle(Flight& f);

  ModelConfig config_;
  RunnerOptions options_;
  ModelInfo info_;
  kvcache::CacheForm form_;
  ThreadPool pool_;  // draws
  std::array<Flight, 2> flights_;
  int oldest_ = 0, in_flight_ = 0;
  cudaStream_t stream_ = nullptr;
  std::optional<CudaOps> ops_;
  std::unique_ptr<Network> network_;
  bool apart_ = false;                          // layers with a window have pages of their own
  std::vector<std::unique_ptr<Cache>> caches_;  // by layer group
  std::optional<Graphs> graphs_;
  Buffer decoded_;  // logits of a step of decodes
  PinnedMemory logits_;
  std::vector<cudaEvent_t> arrived_;
};

Status CudaRunner::allocate_cache(const CachePages& pages) {
  KVASIR_CHECK(caches_.empty() && !pages.groups.empty() && pages.groups.size() <= 2, "the cache is allocated once");
  apart_ = pages.groups.size() > 1;
  CacheLayout layout = cache_layout(config_, form_, options_.page_size, apart_);
  std::vector<kvcache::CacheView> views;
  for (size_t i = 0; i < layout.shapes.size(); ++i) {
    const size_t group = apart_ ? i : 0;
    KVASIR_ASSIGN(auto cache, Cache::make(layout.shapes[i], pages.groups[group], group == 0 ? pages.host : 0));
    views.push_back(cache->view());
    caches_.push_back(std::move(cache));
  }
  KVASIR_TRY(ops_->set_caches(std::move(views), apart_, std::move(layout.places), form_.tensor_scales));
  return time_products(*std::min_element(pages.groups.begin(), pages.groups.end()) * options_.page_size);
}

// The library's ways of multiplying are timed for each number of rows when it first comes (Cublas::product): now,
// before anybody waits, not in the steps that the first users' requests need.
Status CudaRunner::time_products(int64_t cache_tokens) {
  if (options_.batch_invariant || config_.encoder) return {};  // an encoder's prompts have rows of any number
  const int64_t most = std::min({Cublas::kTimedRows, ops_->max_logit_rows(), options_.max_kvlen, cache_tokens});
  const SamplingParams greedy{.temperature = 0};
  for (int64_t n = kDrawnRows; n <= most; ++n) {
    if (CudaOps::padded(n) != n && n != most) continue;
    const Batch prompt = first_pages(n, options_.page_size, options_.index_mode, apart_ ? 2 : 1);
    std::vector<SampleRow> rows(static_cast<size_t>(n));
    for (SampleRow& r : rows) r.params = &greedy;
    KVASIR_TRY(launch(prompt, rows));
    KVASIR_TRY(wait().status());
  }
  return {};
}

Result<AdapterPtr> CudaRunner::load_adapter(const std::string& path, int64_t room) {
  // float32 files become bfloat16; of quantized ones there is less.
  KVASIR_ASSIGN(const AdapterFile file, read_adapter(path, 2 * room + (1 << 20)));
  KVASIR_ASSIGN(const std::vector<LowRank> changes, place_adapter(file, config_, *network_));
  return ops_->load_adapter(changes, room);
}

Status CudaRunner::launch(const Batch& batch, std::span<const SampleRow> rows) {
  KVASIR_CHECK(in_flight_ < depth(), in_flight_, " launches are in flight");
  Flight* before = in_flight_ > 0 ? &flight(in_flight_ - 1) : nullptr;
  const bool waits = std::any_of(rows.begin(), rows.end(), [](const SampleRow& r) { return r.last && *r.last < 0; });
  if (before && (before->by_host || waits)) before->status = settle(*before);
  Flight& f = flight(in_flight_);
  f.enqueued = 0, f.by_host = f.on_its_way = false, f.status = {};
  KVASIR_TRY(f.draws.begin(batch, rows, before ? &before->draws : nullptr));
  if (Status s = enqueue(f, batch); !s.ok()) {
    cudaStreamSynchronize(stream_);  // what did come to be enqueued reads memory that the next step writes
    return s;
  }
  ++in_flight_;
  return {};
}

Status CudaRunner::enqueue(Flight& f, const Batch& batch) {
  // One pool of pages may lie in two caches; only one that has a second tier moves pages.
  for (size_t i = 0; i < caches_.size(); ++i) {
    const int32_t group = apart_ ? int32_t(i) : 0;
    if (group == 0)
      for (const PageMove& m : batch.moves) KVASIR_TRY(caches_[i]->move(m, stream_));
    for (const PageCopy& c : batch.copies)
      if (c.group == group) KVASIR_TRY(caches_[i]->copy(c, stream_));
  }
  f.pools = batch.pools;
  if (!batch.tokens.empty()) {
    KVASIR_TRY(ops_->begin(batch, f.draws.tokens()));
    KVASIR_TRY(forward(f));
    if (!f.pools.empty()) KVASIR_TRY(enqueue_pooled(f, batch.pooled_rows()));
    KVASIR_TRY(ops_->end());
  }
  return check(cudaEventRecord(f.done, stream_), "step");
}

Result<std::vector<Sampled>> CudaRunner::wait() {
  KVASIR_CHECK(in_flight_ > 0, "wait() without a launch()");
  Flight& f = flight(0);
  Status s = f.status.ok() ? settle(f) : f.status;
  if (s.ok() && !f.pools.empty()) {
    s = check(cudaEventSynchronize(f.done), "step");
    int64_t rows = 0;
    for (const Batch::Pool& p : f.pools) rows += p.count;
    std::vector<float> hidden(s.ok() ? size_t(rows * pooled_cols()) : 0);
    for (size_t i = 0; i < hidden.size(); ++i) hidden[i] = bf16_to_f32(f.hidden.as<uint16_t>()[i]);
    if (s.ok()) add_pooled(f.pools, 0, rows, hidden.data(), pooled_cols(), 1 / config_.logit_scale);
  }
  oldest_ ^= 1, --in_flight_;
  f.draws.end();
  auto drawn = f.draws.take();
  KVASIR_TRY(s);
  return drawn;
}

Status CudaRunner::forward(Flight& f) {
  if (ops_->decodes()) {  // one kind of step with all its logits: a graph where it was launched before
    auto step = [this]() -> Status {
      KVASIR_TRY(network_->forward());
      KVASIR_ASSIGN(decoded_, network_->logits(0, ops_->rows()));
      return {};
    };
    const uint64_t key = graphs_ ? ops_->key() : 0;
    KVASIR_TRY(key ? graphs_->run(key, step) : step());
    return enqueue_draws(f, decoded_, f.draws.rows_left());
  }
  KVASIR_TRY(network_->forward());
  while (f.enqueued < f.draws.rows_drawn() + f.draws.rows_left()) {
    if (f.on_its_way) KVASIR_TRY(settle(f));  // there is room for the logits of so many rows
    const int64_t left = f.draws.rows_drawn() + f.draws.rows_left() - f.enqueued;
    const int64_t count = std::min(ops_->max_logit_rows(), left);
    KVASIR_ASSIGN(Buffer logits, network_->logits(f.enqueued, count));
    KVASIR_TRY(enqueue_draws(f, logits, count));
  }
  return {};
}

// Hidden states come to the host as they are, and are pooled there by wait().
Status CudaRunner::enqueue_pooled(Flight& f, int64_t rows) {
  const size_t bytes = size_t(rows * pooled_cols()) * sizeof(uint16_t);
  if (std::exchange(f.hidden_bytes, std::max(f.hidden_bytes, bytes)) < bytes) {
    Status s = f.hidden.allocate(bytes);
    if (!s.ok()) f.hidden_bytes = 0;
    KVASIR_TRY(s);
  }
  const int64_t drawn = f.draws.rows_drawn() + f.draws.rows_left();
  for (int64_t first = 0; first < rows; first += ops_->max_logit_rows()) {
    const int64_t count = std::min(ops_->max_logit_rows(), rows - first);
    KVASIR_ASSIGN(Buffer hidden, network_->hidden(drawn + first, count));
    KVASIR_ASSIGN(const void* from, ops_->half_data(hidden));
    KVASIR_TRY(check(cudaMemcpyAsync(f.hidden.as<uint16_t>() + first * hidden.cols, from,
                                     size_t(count * hidden.cols) * sizeof(uint16_t), cudaMemcpyDeviceToHost, stream_),
                     "embeddings"));
  }
  return {};
}

// Rows that are for the device are drawn where they are; the others come here a few at a time, so that some are drawn
// from while the next are on their way.
Status CudaRunner::enqueue_draws(Flight& f, Buffer logits, int64_t count) {
  const int64_t drawn = f.draws.rows_drawn(), before = f.enqueued;
  auto there = [&](int64_t i) { return f.draws.for_device(before - drawn + i); };
  bool some = false, random = false;
  Wish* wishes = f.wishes.as<Wish>() + before;
  for (int64_t i = 0; i < count; ++i) {
    (there(i) ? some : f.on_its_way) = true;
    wishes[i] = there(i) ? wish_of(f.draws.row(before - drawn + i), config_.vocab) : Wish{};
    random |= wishes[i].scale > 0;
  }
  f.by_host |= f.on_its_way;
  const float* from = ops_->data(logits);
  DeviceDraw* out = f.drawn.as<DeviceDraw>() + before;
  int32_t* tokens = ops_->drawn() + before;
  if (some) launch_greatest(from, out, tokens, count, logits.cols, stream_);
  if (random) {
    Wish* on_device = f.device_wishes.as<Wish>() + before;
    KVASIR_TRY(check(cudaMemcpyAsync(on_device, wishes, size_t(count) * sizeof(Wish), cudaMemcpyHostToDevice, stream_),
                     "draws"));
    launch_draw(from, on_device, out, tokens, count, logits.cols, stream_);
  }
  KVASIR_TRY(check(cudaGetLastError(), "draws"));
  f.enqueued += count;
  if (!f.on_its_way) return {};
  auto* to = logits_.as<float>();
  for (int64_t first = 0; first < count; first += kDrawnRows) {
    const int64_t end = std::min(count, first + kDrawnRows);
    for (int64_t i = first, begin; i < end; ++i) {
      for (begin = i; i < end && !there(i);) ++i;
      if (begin < i)
        KVASIR_TRY(
            check(cudaMemcpyAsync(to + begin * logits.cols, from + begin * logits.cols,
                                  size_t((i - begin) * logits.cols) * sizeof(float), cudaMemcpyDeviceToHost, stream_),
                  "logits"));
    }
    KVASIR_TRY(check(cudaEventRecord(arrived_[size_t(first / kDrawnRows)], stream_), "logits"));
  }
  return {};
}

Status CudaRunner::settle(Flight& f) {
  const auto* drawn = f.drawn.as<DeviceDraw>();
  if (!f.on_its_way) {
    KVASIR_TRY(check(cudaEventSynchronize(f.done), "step"));
    f.draws.draw(pool_, nullptr, config_.vocab, f.draws.rows_left(), drawn);
    return {};
  }
  // Rows before these were the device's alone, and done when these are.
  const int64_t most = ops_->max_logit_rows(), copied = (f.enqueued - 1) / most * most;
  f.on_its_way = false;
  for (int64_t first = f.draws.rows_drawn(); first < f.enqueued;) {
    const int64_t row = std::max(first, copied), end = std::min(f.enqueued, row + kDrawnRows);
    KVASIR_TRY(check(cudaEventSynchronize(arrived_[size_t((row - copied) / kDrawnRows)]), "step"));
    if (first < copied) {
      f.draws.draw(pool_, nullptr, config_.vocab, copied - first, drawn + first);
      first = copied;
      continue;
    }
    f.draws.draw(pool_, logits_.as<float>() + (first - copied) * config_.vocab, config_.vocab, end - first,
                 drawn + first);
    first = end;
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<Runner>> make_runner(const ModelConfig& config, std::unique_ptr<Weights> weights,
                                            const RunnerOptions& options, const LoadProgress& progress) {
  if (options.precise)
    return invalid_argument("precise is for the CPU; on a GPU activations between operations are float32 already")
        .with_field("precise");
  KVASIR_ASSIGN(auto form, cache_form_of(config, options.kv, DType::bf16, *weights));
  KVASIR_ASSIGN(const attention::Backend* attention,
                attention::find_backend(options.attention == "auto" ? "cuda" : options.attention));
  if (attention->name() != "cuda")
    return invalid_argument(cat("attention is ", options.attention, "; on a GPU it is auto or cuda"))
        .with_field("attention");
  KVASIR_TRY(attention->available());
  auto runner = std::make_unique<CudaRunner>(config, options, std::move(form));
  KVASIR_TRY(runner->load(std::move(weights), attention, progress));
  int device = 0;
  cudaDeviceProp p{};
  if (cudaGetDevice(&device) == cudaSuccess && cudaGetDeviceProperties(&p, device) == cudaSuccess)
    log_info("gpu", {{"device", std::string(p.name)},
                     {"memory_gib", double(p.totalGlobalMem) / (1 << 30)},
                     {"multiprocessors", p.multiProcessorCount}});
  return std::unique_ptr<Runner>(std::move(runner));
}

}  // namespace kvasir::model::cuda
