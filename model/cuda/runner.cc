#include "model/cuda/runner.h"

#include <algorithm>
#include <array>

#include "core/cat.h"
#include "core/check.h"
#include "core/host.h"
#include "core/log.h"
#include "model/arch/adapter_places.h"
#include "model/arch/head_network.h"
#include "model/attention_dtype.h"
#include "model/cache_form.h"
#include "model/cuda/first_steps.h"
#include "model/cuda/ranks.h"
#include "model/device.h"
#include "model/draws.h"
#include "model/head.h"
#include "model/streaming.h"

namespace kvasir::model::cuda {
namespace {

using attention::cuda::check;

// So many rows of logits are drawn from while the next ones are on their way.
constexpr int64_t kDrawnRows = 16;
// Of a file in the page cache, so many copy as fast as the link takes it.
constexpr int kLoadThreads = 16;

// The same steps on all ranks of a network.
class CudaRunner final : public Runner, public Replaying {
 public:
  CudaRunner(const ModelConfig& config, const RunnerOptions& options, kvcache::CacheForm form, std::vector<int> devices,
             int32_t known_tokens = 0)
      : config_(config),
        options_(options),
        info_(config.info()),
        form_(std::move(form)),
        ranks_(std::move(devices)),
        pool_(std::min(8, host_limits().cpus)),
        flights_{Flight(config.vocab, pool_.threads(), known_tokens),
                 Flight(config.vocab, pool_.threads(), known_tokens)} {
    info_.kv_type = form_.to_string();
    info_.attention_type = fp8_attention(options_) ? "fp8" : "bfloat16";
  }
  ~CudaRunner() override {
    ranks_.stop();
    for (cudaEvent_t e : arrived_) cudaEventDestroy(e);
  }

  Status load(Weights& weights, const attention::Backend* attention, const LoadProgress& progress,
              const Rank::Load& network = {});
  // A head, which shares weights with `of`, and `places` for hidden states.
  Status load_as_head(const HeadConfig& head, Weights& weights, const attention::Backend* attention, CudaRunner& of,
                      int64_t places);

  const ModelInfo& info() const override { return info_; }
  int depth() const override { return 2; }
  int cache_groups() const override { return 2; }
  Status lost() const override { return ranks_.lost(); }
  int64_t cache_room() const override { return ranks_.cache_room(form_); }
  Status allocate_cache(const CachePages& pages) override;
  Result<AdapterPtr> load_adapter(const std::string& path, int64_t room) override;
  Result<std::unique_ptr<Runner>> load_head(const RunnerOptions& options, int64_t places) override;
  Status launch(const Batch& batch, std::span<const SampleRow> rows) override;
  Result<std::vector<Sampled>> wait() override;
  int64_t replays() const override { return ranks_.first().replays(); }

 private:
  // A launch. What the device draws is there when its slot is done. Rows that the host judges, because their logits
  // come to it or a constraint follows them, are settled before the next launch, or with wait() where there is none.
  struct Flight {
    Flight(int32_t vocab, int threads, int32_t known) : draws(vocab, threads, true, known) {}
    Draws draws;
    DeviceRows rows;
    PinnedMemory hidden;  // of pooled rows, bfloat16
    size_t hidden_bytes = 0;
    std::vector<Batch::Pool> pools;
    int slot = 0;
    int64_t enqueued = 0;     // sample rows
    bool by_host = false;     // some of these are for it to judge
    bool on_its_way = false;  // and are enqueued
    bool pulled = false;      // logits of the last enqueued ones come to it
    Status status;
  };
  Flight& flight(int nth) { return flights_[size_t(oldest_ + nth) % flights_.size()]; }
  int64_t pooled_cols() const { return config_.labels > 0 ? config_.labels : config_.hidden; }
  Status warm_up(int64_t cache_tokens);
  Status run(Batch batch);
  Status make_room(const Flight& f);
  Status enqueue(Rank& rank, Flight& f, const Batch& batch);
  Status forward(Rank& rank, Flight& f);
  Status enqueue_pooled(Rank& rank, Flight& f, int64_t rows);
  Status send_logits(Rank& rank, Flight& f, Buffer logits, int64_t count);
  Status settle(Flight& f);

  ModelConfig config_;
  RunnerOptions options_;
  ModelInfo info_;
  kvcache::CacheForm form_;
  Ranks ranks_;
  std::vector<int32_t> token_of_;  // of a head that draws of a vocabulary of its own
  ThreadPool pool_;                // draws
  std::array<Flight, 2> flights_;
  int oldest_ = 0, in_flight_ = 0;
  bool apart_ = false;  // layers with a window have pages of their own
  PinnedMemory logits_;
  std::vector<cudaEvent_t> arrived_;
};

Status CudaRunner::load(Weights& weights, const attention::Backend* attention, const LoadProgress& progress,
                        const Rank::Load& network) {
  KVASIR_TRY(say_streaming(config_, options_, &info_));
  weights.leave_seeded();
  if (multiplies_bytes()) weights.leave_bytes();
  KVASIR_TRY(ranks_.load(config_, options_, std::min(kLoadThreads, host_limits().cpus), weights, attention, progress,
                         network));
  info_.parameters = weights.parameters();
  KVASIR_TRY(ranks_.describe(form_, &info_));
  const OnDevice on(ranks_.first().device());
  const int64_t rows = ranks_.first().ops().max_logit_rows();
  for (int64_t row = 0; row < rows; row += kDrawnRows)
    KVASIR_TRY(check(cudaEventCreateWithFlags(&arrived_.emplace_back(), cudaEventDisableTiming), "event"));
  flights_[1].slot = 1;
  if (config_.encoder) return {};
  return logits_.allocate(size_t(rows * config_.vocab) * sizeof(float));
}

Status CudaRunner::load_as_head(const HeadConfig& head, Weights& weights, const attention::Backend* attention,
                                CudaRunner& of, int64_t places) {
  Rank& model = of.ranks_.first();
  const OnDevice on(model.device());
  const auto states = std::make_shared<DeviceMemory>();
  KVASIR_TRY(states->allocate(size_t(places * head.given) * sizeof(uint16_t)));
  KVASIR_TRY(check(cudaMemset(states->get(), 0, size_t(places * head.given) * sizeof(uint16_t)), "hidden states"));
  KVASIR_TRY(load(weights, attention, {}, [&](CudaOps& ops) -> Result<std::unique_ptr<Network>> {
    ops.hand_over(states, head.given);
    KVASIR_ASSIGN(const Matrix embedding, ops.borrow(model.ops(), model.network().embedding()));
    KVASIR_ASSIGN(const Matrix out, ops.borrow(model.ops(), model.network().head()));
    return load_head_network(head, weights, ops, embedding, out);
  }));
  token_of_ = head.token_of;
  head.describe(places, &info_);
  KVASIR_TRY(model.network().keep(head.kept));
  model.ops().hand_over(states, head.given);
  return {};
}

Result<std::unique_ptr<Runner>> CudaRunner::load_head(const RunnerOptions& options, int64_t places) {
  KVASIR_ASSIGN(HeadFiles files, open_head(options.model, options_.model, config_, int32_t(ranks_.size())));
  if (!files.weights) return std::unique_ptr<Runner>();
  KVASIR_TRY(ranks_.first().network().keep({}));  // refuses where it cannot
  RunnerOptions o = options;
  o.ranks = 1, o.max_kvlen = files.config.decoder.context;
  KVASIR_ASSIGN(auto form, cache_form_of(files.config.decoder, o.kv, DType::bf16, *files.weights));
  KVASIR_ASSIGN(const attention::Backend* attention,
                attention::find_backend(o.attention == "auto" ? "cuda" : o.attention));
  auto head = std::make_unique<CudaRunner>(files.config.decoder, o, std::move(form),
                                           std::vector<int>{ranks_.first().device()}, files.config.known_tokens);
  KVASIR_TRY(head->load_as_head(files.config, *files.weights, attention, *this, places));
  return std::unique_ptr<Runner>(std::move(head));
}

Status CudaRunner::allocate_cache(const CachePages& pages) {
  apart_ = pages.groups.size() > 1;
  KVASIR_TRY(ranks_.on_all([&](Rank& rank) { return rank.allocate_cache(pages, form_); }));
  KVASIR_TRY(warm_up(*std::min_element(pages.groups.begin(), pages.groups.end()) * options_.page_size));
  return ranks_.join();
}

Status CudaRunner::run(Batch batch) {
  if (info_.state_bytes > 0) batch.states.assign(size_t(batch.size()), 0);
  if (info_.given > 0) batch.given_at.resize(batch.tokens.size()), batch.given_cols = info_.given;
  static const SamplingParams greedy{.temperature = 0};
  std::vector<SampleRow> rows(batch.logit_rows.size());
  for (SampleRow& r : rows) r.params = &greedy;
  KVASIR_TRY(launch(batch, rows));
  return wait().status();
}

// The library's ways of multiplying are timed for each number of rows when it first comes (Cublas::product): now,
// before anybody waits, not in the steps that the first users' requests need. Ranks do not wait for one another yet
// (Link::joined): on several, decodes and the largest prompt come, too, so that what is made when it is first used is.
Status CudaRunner::warm_up(int64_t cache_tokens) {
  if (config_.encoder || config_.encoder_layers > 0) return {};  // their prompts have rows of any number
  const size_t groups = apart_ ? 2 : 1;
  const int64_t fit = std::min(options_.max_kvlen, cache_tokens);
  const int64_t most = std::min({Cublas::kTimedRows, ranks_.first().ops().max_logit_rows(), fit});
  for (int64_t n = kDrawnRows; n <= most && !options_.batch_invariant; ++n)
    if (CudaOps::padded(n) == n || n == most)
      KVASIR_TRY(run(first_pages(n, options_.page_size, options_.index_mode, groups)));
  if (!ranks_.several()) return {};
  const int64_t decodes = std::min({options_.max_batch, options_.max_tokens, cache_tokens / options_.page_size});
  for (int64_t n = 1; n <= decodes; n *= 2)
    KVASIR_TRY(run(first_decodes(n, options_.page_size, options_.index_mode, groups)));
  for (int64_t n : {std::min(fit, options_.max_tokens), std::min(fit, options_.max_tokens / 2 + 1)}) {
    Batch prompt = first_pages(n, options_.page_size, options_.index_mode, groups);
    prompt.logit_rows = {int32_t(n - 1)};
    KVASIR_TRY(run(prompt));
  }
  return {};
}

Result<AdapterPtr> CudaRunner::load_adapter(const std::string& path, int64_t room) {
  // float32 files become bfloat16; of quantized ones there is less.
  KVASIR_ASSIGN(const AdapterFile file, read_adapter(path, 2 * room + (1 << 20)));
  return load_parts(int32_t(ranks_.size()), room, [&](int32_t rank, int64_t left) -> Result<AdapterPtr> {
    Rank& r = ranks_[size_t(rank)];
    const OnDevice on(r.device());
    KVASIR_ASSIGN(const std::vector<LowRank> changes, place_adapter(file, config_, r.network()));
    return r.ops().load_adapter(changes, left);
  });
}

Status CudaRunner::launch(const Batch& batch, std::span<const SampleRow> rows) {
  KVASIR_CHECK(in_flight_ < depth(), in_flight_, " launches are in flight");
  KVASIR_TRY(lost());
  Flight* before = in_flight_ > 0 ? &flight(in_flight_ - 1) : nullptr;
  const bool waits = std::any_of(rows.begin(), rows.end(), [this](const SampleRow& r) {
    return r.last && *r.last < 0 && !draws_on_device(r, true);
  });
  if (before && (before->by_host || waits)) before->status = settle(*before);
  Flight& f = flight(in_flight_);
  f.enqueued = 0, f.by_host = f.on_its_way = f.pulled = false, f.status = {};
  KVASIR_TRY(f.draws.begin(batch, rows, before ? &before->draws : nullptr));
  f.pools = batch.pools;
  f.rows.wishes.assign(rows.size(), {}), f.rows.there.assign(rows.size(), false);
  f.rows.changes.clear();
  for (int64_t i = 0; i < f.rows.count(); ++i) {
    const bool there = f.rows.there[size_t(i)] = f.draws.for_device(i);
    f.by_host |= !there || f.draws.row(i).constraint;
    if (!there) continue;
    f.rows.wishes[size_t(i)] = wish_of(f.draws.row(i), config_.vocab);
    f.rows.changes.add(i, f.rows.count(), f.draws.row(i), config_.vocab);
  }
  KVASIR_TRY(make_room(f));
  const Status s = ranks_.on_all([&](Rank& rank) { return enqueue(rank, f, batch); });
  if (!s.ok()) {
    // What did come to be enqueued reads memory that the next step writes.
    for (const auto& rank : ranks_) cudaStreamSynchronize(rank->stream());
    return s;
  }
  ++in_flight_;
  return {};
}

// Several ranks come to rest before: what makes room may wait for kernels, and those for other ranks.
Status CudaRunner::make_room(const Flight& f) {
  auto has = [&](const auto& rank) { return rank->has_room(f.rows, f.slot); };
  if (std::all_of(ranks_.begin(), ranks_.end(), has)) return {};
  if (ranks_.several())
    KVASIR_TRY(ranks_.on_all([](Rank& rank) { return check(cudaStreamSynchronize(rank.stream()), "step"); }));
  return ranks_.on_all([&](Rank& rank) { return rank.make_room(f.rows, f.slot); });
}

Status CudaRunner::enqueue(Rank& rank, Flight& f, const Batch& batch) {
  if (rank.config().part.rank == config_.dummy_lost_rank && int64_t(batch.step) >= config_.dummy_lost_step)
    return internal_error(cat("the dummy model says so (lost_step=", config_.dummy_lost_step, ")"));
  if (rank.config().part.rank == config_.dummy_hung_rank && int64_t(batch.step) >= config_.dummy_lost_step) rank.hang();
  KVASIR_TRY(rank.move_pages(batch));
  if (!batch.tokens.empty()) {
    KVASIR_TRY(rank.begin(batch, f.draws.tokens(), f.slot));
    KVASIR_TRY(forward(rank, f));
    if (rank.first() && !f.pools.empty()) KVASIR_TRY(enqueue_pooled(rank, f, batch.pooled_rows()));
    KVASIR_TRY(rank.ops().end());
  }
  return rank.end(f.slot);
}

Result<std::vector<Sampled>> CudaRunner::wait() {
  KVASIR_CHECK(in_flight_ > 0, "wait() without a launch()");
  Flight& f = flight(0);
  Status s = f.status.ok() ? settle(f) : f.status;
  if (s.ok() && !f.pools.empty()) {
    s = ranks_.first().wait(f.slot);
    int64_t rows = 0;
    for (const Batch::Pool& p : f.pools) rows += p.count;
    std::vector<float> hidden(s.ok() ? size_t(rows * pooled_cols()) : 0);
    for (size_t i = 0; i < hidden.size(); ++i) hidden[i] = bf16_to_f32(f.hidden.as<uint16_t>()[i]);
    if (s.ok()) add_pooled(f.pools, 0, rows, hidden.data(), pooled_cols(), 1 / config_.logit_scale);
  }
  oldest_ ^= 1, --in_flight_;
  f.draws.end();
  auto drawn = f.draws.take();
  name_tokens(token_of_, drawn);
  KVASIR_TRY(s);
  KVASIR_TRY(lost());
  return drawn;
}

// The first rank also sends logits to the host, which draws from them.
Status CudaRunner::forward(Rank& rank, Flight& f) {
  const int64_t all = f.rows.count();
  auto take = [&](Buffer logits, int64_t first, int64_t count) -> Status {
    KVASIR_TRY(rank.draw(logits, f.rows, first, count, f.slot));
    return rank.first() ? send_logits(rank, f, logits, count) : Status();
  };
  if (rank.ops().decodes()) {
    KVASIR_ASSIGN(const Buffer logits, rank.decode());
    return take(logits, 0, all);
  }
  KVASIR_TRY(rank.network().forward());
  for (int64_t first = 0; first < all;) {
    if (rank.first() && f.on_its_way) KVASIR_TRY(settle(f));  // there is room for the logits of so many rows
    const int64_t count = std::min(rank.ops().max_logit_rows(), all - first);
    KVASIR_ASSIGN(const Buffer logits, rank.network().logits(first, count));
    KVASIR_TRY(take(logits, first, count));
    first += count;
  }
  return {};
}

// Hidden states come to the host as they are, and are pooled there by wait().
Status CudaRunner::enqueue_pooled(Rank& rank, Flight& f, int64_t rows) {
  const size_t bytes = size_t(rows * pooled_cols()) * sizeof(uint16_t);
  if (std::exchange(f.hidden_bytes, std::max(f.hidden_bytes, bytes)) < bytes) {
    Status s = f.hidden.allocate(bytes);
    if (!s.ok()) f.hidden_bytes = 0;
    KVASIR_TRY(s);
  }
  CudaOps& ops = rank.ops();
  for (int64_t first = 0; first < rows; first += ops.max_logit_rows()) {
    const int64_t count = std::min(ops.max_logit_rows(), rows - first);
    KVASIR_ASSIGN(Buffer hidden, rank.network().hidden(f.rows.count() + first, count));
    KVASIR_ASSIGN(const void* from, ops.half_data(hidden));
    KVASIR_TRY(
        check(cudaMemcpyAsync(f.hidden.as<uint16_t>() + first * hidden.cols, from,
                              size_t(count * hidden.cols) * sizeof(uint16_t), cudaMemcpyDeviceToHost, rank.stream()),
              "embeddings"));
  }
  return {};
}

// Rows that the device does not draw come here a few at a time, so that some are drawn from while the next are on their
// way.
Status CudaRunner::send_logits(Rank& rank, Flight& f, Buffer logits, int64_t count) {
  const int64_t before = f.enqueued;
  auto there = [&](int64_t i) { return bool(f.rows.there[size_t(before + i)]); };
  f.enqueued += count, f.pulled = false;
  for (int64_t i = 0; i < count; ++i) {
    f.pulled |= !there(i);
    f.on_its_way |= !there(i) || f.draws.row(before + i - f.draws.rows_drawn()).constraint;
  }
  if (!f.on_its_way) return {};
  if (!f.pulled) return check(cudaEventRecord(arrived_[0], rank.stream()), "draws");
  const float* from = rank.ops().data(logits);
  auto* to = logits_.as<float>();
  for (int64_t first = 0; first < count; first += kDrawnRows) {
    const int64_t end = std::min(count, first + kDrawnRows);
    for (int64_t i = first, begin; i < end; ++i) {
      for (begin = i; i < end && !there(i);) ++i;
      if (begin < i)
        KVASIR_TRY(check(
            cudaMemcpyAsync(to + begin * logits.cols, from + begin * logits.cols,
                            size_t((i - begin) * logits.cols) * sizeof(float), cudaMemcpyDeviceToHost, rank.stream()),
            "logits"));
    }
    KVASIR_TRY(check(cudaEventRecord(arrived_[size_t(first / kDrawnRows)], rank.stream()), "logits"));
  }
  return {};
}

Status CudaRunner::settle(Flight& f) {
  Rank& rank = ranks_.first();
  const Redraw redraw = [&](std::span<const MaskedRow> rows, std::span<DeviceDraw> out) {
    const OnDevice on(rank.device());
    return rank.redraw(rows, out, f.slot);
  };
  auto said = [&](int64_t first) {
    return Said{rank.drawn(f.slot) + first, rank.top(f.slot) + first * kMostDeviceTop, &redraw};
  };
  if (!f.on_its_way) {
    KVASIR_TRY(rank.wait(f.slot));
    return f.draws.draw(pool_, nullptr, config_.vocab, f.draws.rows_left(), said(f.draws.rows_drawn()));
  }
  // Rows before these were the device's alone, and done when these are.
  const int64_t most = rank.ops().max_logit_rows(), copied = (f.enqueued - 1) / most * most;
  const int64_t at_once = f.pulled ? kDrawnRows : most;
  f.on_its_way = false;
  for (int64_t first = f.draws.rows_drawn(); first < f.enqueued;) {
    const int64_t row = std::max(first, copied), end = std::min(f.enqueued, row + at_once);
    KVASIR_TRY(check(cudaEventSynchronize(arrived_[size_t((row - copied) / kDrawnRows)]), "step"));
    if (first < copied) {
      KVASIR_TRY(f.draws.draw(pool_, nullptr, config_.vocab, copied - first, said(first)));
      first = copied;
      continue;
    }
    KVASIR_TRY(f.draws.draw(pool_, logits_.as<float>() + (first - copied) * config_.vocab, config_.vocab, end - first,
                            said(first)));
    first = end;
  }
  return {};
}

// The GPU of each rank: those that `device` names, else the first ones.
Result<std::vector<int>> gpus_of(const RunnerOptions& options) {
  KVASIR_ASSIGN(DeviceChoice choice, parse_device(options.device));
  int there = 0;
  KVASIR_TRY(check(cudaGetDeviceCount(&there), "device"));
  std::vector<int> gpus = std::move(choice.gpus);
  const bool named = !gpus.empty();
  for (int i = 0; !named && i < options.ranks; ++i) gpus.push_back(i);
  const auto count = std::ssize(gpus);
  if (count > kMostGpus)
    return invalid_argument(cat("ranks is ", count, "; a model runs on at most ", kMostGpus, " GPUs"))
        .with_field("ranks");
  if (named && options.ranks > 1 && options.ranks != count)
    return invalid_argument(cat("ranks is ", options.ranks, ", and device is ", options.device, ", which has ", count,
                                "; leave ranks out, or name a GPU for each"))
        .with_field("ranks");
  const int most = *std::max_element(gpus.begin(), gpus.end());
  if (most >= there)
    return invalid_argument(cat(named ? cat("device is ", options.device) : cat("ranks is ", options.ranks), ", and ",
                                there, there == 1 ? " GPU is" : " GPUs are", " visible here (numbers from 0 on)"))
        .with_field(named ? "device" : "ranks");
  return gpus;
}

}  // namespace

Result<std::unique_ptr<Runner>> make_runner(const ModelConfig& config, std::unique_ptr<Weights> weights,
                                            const RunnerOptions& options, const LoadProgress& progress) {
  if (options.precise)
    return invalid_argument("precise is for the CPU; on a GPU activations between operations are float32 already")
        .with_field("precise");
  KVASIR_ASSIGN(const kvcache::FormWish wish, cache_wish(config, options.kv, options.attention_dtype));
  KVASIR_ASSIGN(auto form, cache_form_of(config, wish, DType::bf16, *weights));
  KVASIR_ASSIGN(const attention::Backend* attention,
                attention::find_backend(options.attention == "auto" ? "cuda" : options.attention));
  if (attention->name() != "cuda")
    return invalid_argument(cat("attention is ", options.attention, "; on a GPU it is auto or cuda"))
        .with_field("attention");
  KVASIR_TRY(attention->available());
  KVASIR_ASSIGN(std::vector<int> devices, gpus_of(options));
  if (config.dummy_hung_rank >= 0 && devices.size() == 1)
    return invalid_argument("a dummy's hung_rank is one of several GPUs (--ranks 2)").with_field("model");
  RunnerOptions o = options;
  o.ranks = int32_t(devices.size());
  auto runner = std::make_unique<CudaRunner>(config, o, std::move(form), std::move(devices));
  KVASIR_TRY(runner->load(*weights, attention, progress));
  return std::unique_ptr<Runner>(std::move(runner));
}

std::optional<GpuMemory> memory_of(int device) {
  cudaDeviceProp p{};
  size_t free = 0, total = 0;
  const OnDevice on(device);
  if (cudaGetDeviceProperties(&p, device) != cudaSuccess || cudaMemGetInfo(&free, &total) != cudaSuccess)
    return std::nullopt;
  return GpuMemory{p.name, int64_t(total), int64_t(free)};
}

}  // namespace kvasir::model::cuda
