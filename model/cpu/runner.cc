#include "model/cpu/runner.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <thread>

#include "core/cat.h"
#include "core/check.h"
#include "core/host.h"
#include "core/log.h"
#include "core/numa.h"
#include "model/arch/adapter_places.h"
#include "model/arch/head_network.h"
#include "model/attention_dtype.h"
#include "model/cache_form.h"
#include "model/cpu/footprint.h"
#include "model/cpu/rank.h"
#include "model/formats/shared_weights.h"
#include "model/head.h"
#include "model/streaming.h"

namespace kvasir::model::cpu {
namespace {

// A network's ranks, one where it is not split: the same batch for all of them, each with a thread that leads its own
// workers, on a node of memory of its own where there are several.
class CpuRunner final : public Runner {
 public:
  CpuRunner(const ModelConfig& config, const RunnerOptions& options, int threads, kvcache::CacheForm form,
            int32_t known_tokens = 0)
      : config_(config),
        options_(options),
        info_(config.info()),
        form_(std::move(form)),
        threads_(threads),
        draws_(config.vocab, threads, false, known_tokens) {}

  Status load(std::unique_ptr<Weights> weights, const attention::Backend* attention, const LoadProgress& progress);
  // A head, which shares weights with `of`, and `places` for hidden states.
  Status load_as_head(const HeadConfig& head, Weights& weights, const attention::Backend* attention, CpuRunner& of,
                      int64_t places);

  const ModelInfo& info() const override { return info_; }
  int depth() const override { return 1; }
  int cache_groups() const override { return 2; }
  ExpertLoad expert_load() const override { return ranks_[0]->ops().expert_load(); }
  Status lost() const override { return link_ ? link_->lost() : Status(); }
  Status allocate_cache(const CachePages& pages) override {
    return on_all([&](size_t rank) { return ranks_[rank]->allocate_cache(pages); });
  }
  Result<AdapterPtr> load_adapter(const std::string& path, int64_t room) override;
  Result<std::unique_ptr<Runner>> load_head(const RunnerOptions& options, int64_t places) override;
  Status launch(const Batch& batch, std::span<const SampleRow> rows) override;
  Result<std::vector<Sampled>> wait() override;

 private:
  // f(rank) on each rank's own thread; the first that fails is lost to the others.
  template <class F>
  Status on_all(const F& f);
  void describe_ranks(const std::vector<NumaNode>& nodes);
  void describe_weights(const Weights& weights);

  ModelConfig config_;
  RunnerOptions options_;
  ModelInfo info_;
  kvcache::CacheForm form_;
  int threads_;
  Draws draws_;
  std::vector<int32_t> token_of_;        // of a head that draws of a vocabulary of its own
  std::unique_ptr<Link> link_;           // where there are several
  std::unique_ptr<ThreadPool> leaders_;  // likewise: a thread a rank, and the caller, who only waits
  std::vector<std::unique_ptr<Rank>> ranks_;
};

template <class F>
Status CpuRunner::on_all(const F& f) {
  if (!leaders_) return f(0);
  leaders_->run([&](int worker) {
    if (worker == 0) return;
    const int32_t rank = worker - 1;
    Status s;
    try {
      s = f(size_t(rank));
    } catch (const std::exception& e) {
      s = resource_exhausted(e.what());
    }
    if (!s.ok()) link_->lose(rank, s);
  });
  return link_->lost();
}

Status CpuRunner::load(std::unique_ptr<Weights> weights, const attention::Backend* attention,
                       const LoadProgress& progress) {
  KVASIR_TRY(say_streaming(config_, options_, &info_));
  KVASIR_ASSIGN(const std::vector<ModelConfig> parts, split_over_ranks(config_, *weights, options_.ranks));
  if (leaves_bytes(parts)) weights->leave_bytes();
  const auto count = int32_t(parts.size());
  if (count == 1) {
    ranks_.push_back(std::make_unique<Rank>(config_, options_, form_, threads_, nullptr));
    KVASIR_TRY(ranks_[0]->load(*weights, attention, progress));
  } else {
    const std::vector<NumaNode> nodes = numa_nodes();
    link_ = std::make_unique<Link>(count);
    leaders_ = std::make_unique<ThreadPool>(count + 1);
    ranks_.resize(size_t(count));
    SharedWeights shared(*weights, count);
    std::vector<std::unique_ptr<Weights>> sources;
    sources.reserve(parts.size());
    for (int32_t rank = 0; rank < count; ++rank) sources.push_back(shared.of_rank(rank));
    std::vector<Status> loaded(parts.size());
    // Workers are where the thread that makes them is, and so is the memory that they write first.
    const Status ran = on_all([&](size_t rank) {
      if (nodes.size() > 1) run_on(nodes[rank * nodes.size() / size_t(count)]);
      const int threads = (threads_ + int(rank)) / count;
      auto source = std::move(sources[rank]);
      ranks_[rank] = std::make_unique<Rank>(parts[rank], options_, form_, std::max(1, threads), link_.get());
      return loaded[rank] = ranks_[rank]->load(*source, attention, rank == 0 ? progress : LoadProgress());
    });
    for (const Status& s : loaded) KVASIR_TRY(s);  // a file's fault, in its own words
    KVASIR_TRY(ran);
    describe_ranks(nodes);
  }
  describe_weights(*weights);
  return {};
}

void CpuRunner::describe_weights(const Weights& weights) {
  for (const auto& rank : ranks_) {
    info_.kv_bytes_per_token += rank->config().kv_bytes_per_token(form_, false);
    info_.windowed_kv_bytes += rank->config().kv_bytes_per_token(form_, true);
    info_.weight_bytes += rank->ops().weight_bytes();
  }
  info_.kv_type = form_.to_string();
  info_.attention_type = fp8_attention(options_) ? "fp8" : "float32";
  info_.parameters = weights.parameters();
}

Status CpuRunner::load_as_head(const HeadConfig& head, Weights& weights, const attention::Backend* attention,
                               CpuRunner& of, int64_t places) {
  // Zeros, which are no memory until they are written.
  const std::shared_ptr<float[]> states(static_cast<float*>(std::calloc(size_t(places * head.given), sizeof(float))),
                                        std::free);
  if (!states) return resource_exhausted(cat("no memory for the hidden states of ", places, " tokens"));
  ranks_.push_back(std::make_unique<Rank>(config_, options_, form_, threads_, nullptr));
  Rank& model = *of.ranks_[0];
  auto network = [&](CpuOps& ops) -> Result<std::unique_ptr<Network>> {
    auto lent = [&](Matrix m) { return m.id < 0 ? m : ops.borrow(model.ops(), m); };
    ops.hand_over(states, head.given);
    return load_head_network(head, weights, ops, lent(model.network().embedding()), lent(model.network().head()));
  };
  KVASIR_TRY(ranks_[0]->load(weights, attention, {}, network));
  describe_weights(weights);
  token_of_ = head.token_of;
  head.describe(places, &info_);
  KVASIR_TRY(model.network().keep(head.kept));
  model.ops().hand_over(states, head.given);
  return {};
}

Result<std::unique_ptr<Runner>> CpuRunner::load_head(const RunnerOptions& options, int64_t places) {
  KVASIR_ASSIGN(HeadFiles files, open_head(options.model, options_.model, config_, int32_t(ranks_.size())));
  if (!files.weights) return std::unique_ptr<Runner>();
  KVASIR_TRY(ranks_[0]->network().keep({}));  // refuses where it cannot
  RunnerOptions o = options;
  o.max_kvlen = files.config.decoder.context;
  KVASIR_ASSIGN(auto form,
                cache_form_of(files.config.decoder, o.kv, o.precise ? DType::f32 : DType::f16, *files.weights));
  KVASIR_ASSIGN(const attention::Backend* attention,
                attention::find_backend(o.attention == "auto" ? "cpu" : o.attention));
  auto head =
      std::make_unique<CpuRunner>(files.config.decoder, o, threads_, std::move(form), files.config.known_tokens);
  KVASIR_TRY(head->load_as_head(files.config, *files.weights, attention, *this, places));
  return std::unique_ptr<Runner>(std::move(head));
}

Result<std::vector<Sampled>> CpuRunner::wait() {
  std::vector<Sampled> out = draws_.take();
  name_tokens(token_of_, out);
  return out;
}

void CpuRunner::describe_ranks(const std::vector<NumaNode>& nodes) {
  for (size_t i = 0; i < ranks_.size(); ++i) {
    const Rank& rank = *ranks_[i];
    const ModelConfig& c = rank.config();
    RankInfo& r = info_.ranks.emplace_back();
    if (nodes.size() > 1) r.device = cat("node ", nodes[i * nodes.size() / ranks_.size()].number, ", ");
    r.device += cat(rank.threads(), rank.threads() == 1 ? " thread" : " threads");
    r.heads = c.heads, r.kv_heads = c.kv_heads, r.experts = int32_t(c.part.experts.count);
    r.weight_bytes = rank.ops().weight_bytes(), r.kv_bytes_per_token = c.kv_bytes_per_token(form_, false);
    log_info("rank", {{"rank", i},
                      {"of", ranks_.size()},
                      {"device", r.device},
                      {"heads", r.heads},
                      {"kv_heads", r.kv_heads},
                      {"weight_bytes", r.weight_bytes},
                      {"bytes_per_token", r.kv_bytes_per_token}});
  }
}

Result<AdapterPtr> CpuRunner::load_adapter(const std::string& path, int64_t room) {
  // float32 files become bfloat16 unless the model is precise; of quantized ones there is less.
  KVASIR_ASSIGN(const AdapterFile file, read_adapter(path, 2 * room + (1 << 20)));
  return load_parts(int32_t(ranks_.size()), room, [&](int32_t rank, int64_t left) -> Result<AdapterPtr> {
    Rank& r = *ranks_[size_t(rank)];
    KVASIR_ASSIGN(const std::vector<LowRank> changes, place_adapter(file, config_, r.network()));
    return r.ops().load_adapter(changes, left);
  });
}

Status CpuRunner::launch(const Batch& batch, std::span<const SampleRow> rows) {
  KVASIR_CHECK(ranks_[0]->has_cache(), "the cache is not allocated");
  KVASIR_CHECK(int64_t(batch.tokens.size()) <= options_.max_tokens, batch.tokens.size(), " tokens, the limit is ",
               options_.max_tokens);
  const auto begun = std::chrono::steady_clock::now();
  KVASIR_TRY(lost());
  KVASIR_TRY(draws_.begin(batch, rows));
  if (leaders_) leaders_->begin_step();
  const Status status = on_all([&](size_t rank) {
    return ranks_[rank]->step(batch, draws_.tokens(), std::ssize(rows), rank == 0 ? &draws_ : nullptr);
  });
  if (leaders_) leaders_->end_step();
  if (config_.step_ms > 0)
    std::this_thread::sleep_until(begun + std::chrono::duration<double, std::milli>(config_.step_ms));
  KVASIR_TRY(status);
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
  if (config.dummy_hung_rank >= 0)
    return invalid_argument("a dummy's hung_rank is one of several GPUs (--device cuda --ranks 2)").with_field("model");
  if (options.attention_dtype == "bf16")
    return invalid_argument(
               "attention_dtype is bf16, which is for a GPU; a CPU computes scores in float32: auto or fp8")
        .with_field("attention_dtype");
  KVASIR_ASSIGN(const kvcache::FormWish wish, cache_wish(config, options.kv, options.attention_dtype));
  KVASIR_ASSIGN(auto form, cache_form_of(config, wish, options.precise ? DType::f32 : DType::f16, *weights));
  KVASIR_ASSIGN(const attention::Backend* attention,
                attention::find_backend(options.attention == "auto" ? "cpu" : options.attention));
  KVASIR_TRY(attention->available());
  int threads = options.threads > 0 ? options.threads : host_limits().cpus;
  auto runner = std::make_unique<CpuRunner>(config, options, threads, std::move(form));
  KVASIR_TRY(runner->load(std::move(weights), attention, progress));
  return std::unique_ptr<Runner>(std::move(runner));
}

}  // namespace kvasir::model::cpu
