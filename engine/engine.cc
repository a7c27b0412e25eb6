// The engine's front: takes requests in, hands streams out, tells the state. What runs is step_loop.cc.
#include "engine/engine.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <random>
#include <thread>
#include <unordered_map>

#include "core/cat.h"
#include "core/host.h"
#include "core/log.h"
#include "engine/draft_head.h"
#include "engine/draft_model.h"
#include "engine/job_stream.h"
#include "engine/kv_memory.h"
#include "engine/least_time.h"
#include "engine/prepare.h"
#include "engine/scheduler_options.h"
#include "engine/step_cost.h"
#include "engine/step_loop.h"
#include "engine/validate.h"

namespace kvasir::engine {
namespace {

using std::chrono::milliseconds;

int64_t states_of(const scheduler::Settings& plan) { return plan.recurrent ? plan.max_running + plan.kept_states : 0; }

class EngineImpl final : public Engine {
 public:
  EngineImpl(Loader loader, EngineOptions options)
      : options_(std::move(options)),
        publisher_(options_.step_trace, [this](const Job& job) { forget(job); }),
        watchdog_(options_.watchdog),
        thread_([this, loader = std::move(loader)] { run(loader); }) {}

  ~EngineImpl() override {
    drain(milliseconds(0));
    thread_.join();
  }

  State state() const override;
  Stats stats() const override;
  std::vector<StepSample> recent_steps() const override {
    std::lock_guard lock(shared_.mutex);
    return {shared_.recent.begin(), shared_.recent.end()};
  }
  Status wait_ready() override {
    std::unique_lock lock(phase_mutex_);
    phase_changed_.wait(lock, [&] { return phase_ != State::starting; });
    if (phase_ == State::serving) return {};
    return load_status_.ok() ? unavailable("the server is shutting down") : load_status_;
  }
  const model::ModelInfo& info() const override { return info_; }
  text::TokenizerPtr tokenizer() const override { return has_loaded_ ? loaded_.tokenizer : nullptr; }
  std::shared_ptr<const text::ChatTemplate> chat_template() const override {
    return has_loaded_ ? loaded_.chat_template : nullptr;
  }

  Result<std::unique_ptr<Stream>> submit(Request request) override;
  bool cancel(const std::string& tenant, const std::string& id) override;
  void cancel_all(const std::string& tenant) override;
  Status flush_prefix_cache() override;
  Result<AdapterInfo> load_adapter(const std::string& name, const std::string& path) override {
    KVASIR_TRY(accepting());
    return load_into_runner(name, path);
  }
  Status unload_adapter(const std::string& name) override { return adapters_.unload(name); }
  std::vector<AdapterInfo> adapters() const override;
  bool has_adapter(const std::string& name) const override { return adapters_.find(name).ok(); }
  std::shared_ptr<const CacheEvents> cache_events() const override { return cache_events_; }
  void drain(milliseconds limit) override;

 private:
  void run(const Loader& loader);
  Status load(const Loader& loader);
  Result<scheduler::Settings> allocate_cache(int64_t memory);
  Status set_ends();  // the model's own tokens that end an answer, and the operator's
  void set_limits();
  void start_grammars();
  void log_cache(const scheduler::Settings& plan, int64_t memory) const;
  Result<std::unique_ptr<Drafter>> load_draft(int64_t* memory);
  Result<AdapterInfo> load_into_runner(const std::string& name, const std::string& path) {
    return adapters_.load(
        name, path, [this](const std::string& from, int64_t room) { return loaded_.runner->load_adapter(from, room); });
  }
  void enter(State phase, std::string message = "");
  Status accepting() const;
  Status in_time(const Request& request) const;
  void hand_over(JobPtr job);
  void forget(const Job& job);
  static std::string key(const std::string& tenant, const std::string& id) { return tenant + '\0' + id; }

  const EngineOptions options_;
  Shared shared_;
  const std::shared_ptr<Mailbox> mailbox_ = std::make_shared<Mailbox>();

  mutable std::mutex phase_mutex_;
  std::condition_variable phase_changed_;
  State phase_ = State::starting;
  std::string message_ = "starting";
  Status load_status_;
  std::optional<Time> drain_until_;

  const std::shared_ptr<CacheEvents> cache_events_ =
      std::make_shared<CacheEvents>(static_cast<size_t>(options_.cache_event_ring));
  Loaded loaded_;
  std::atomic<bool> has_loaded_{false};  // until then the step thread's alone
  model::ModelInfo info_;
  RequestLimits limits_;
  std::vector<int32_t> end_of_generation_;

  Adapters adapters_{options_.adapter_memory};

  mutable std::mutex registry_mutex_;
  std::unordered_map<std::string, std::weak_ptr<Job>> registry_;  // by tenant and id
  std::atomic<uint64_t> next_number_{1};
  std::atomic<int64_t> requests_{0};
  const uint32_t id_prefix_ = std::random_device()();

  // In the order they may be used by one another: the last is stopped first.
  Publisher publisher_;
  Watchdog watchdog_;
  std::unique_ptr<GrammarWorker> grammars_;
  std::unique_ptr<StepLoop> loop_;
  std::thread thread_;
};

// ---- the step thread's life

void EngineImpl::run(const Loader& loader) {
  Status loaded = load(loader);
  if (loaded.ok()) {
    has_loaded_ = true;
    enter(State::serving, "serving");
    loop_->run();
    publisher_.wait_empty();
  }
  std::lock_guard lock(phase_mutex_);
  load_status_ = loaded;
  phase_ = State::stopped;
  message_ = loaded.ok() ? "stopped" : loaded.message();
  phase_changed_.notify_all();
}

Status EngineImpl::load(const Loader& loader) {
  KVASIR_TRY(publisher_.trace_status());
  KVASIR_ASSIGN(loaded_, loader([this](const char* phase, double fraction) {
                  std::lock_guard lock(phase_mutex_);
                  message_ = cat(phase, ' ', int(fraction * 100), '%');
                }));
  info_ = loaded_.runner->info();
  if (options_.max_context > 0)
    info_.context_length = int32_t(std::min<int64_t>(info_.context_length, options_.max_context));
  // Before the cache, which takes what they leave.
  for (const AdapterSource& a : options_.adapters) KVASIR_TRY(load_into_runner(a.name, a.path).status());
  int64_t memory = options_.kv_memory, room = loaded_.runner->cache_room();
  if (memory <= 0)
    memory = int64_t(double(room >= 0 ? room : default_kv_memory(host_limits().memory_available)) *
                     options_.kv_memory_share);
  KVASIR_ASSIGN(std::unique_ptr<Drafter> draft, load_draft(&memory));
  KVASIR_ASSIGN(const scheduler::Settings plan, allocate_cache(memory));
  KVASIR_ASSIGN(auto scheduler, scheduler::Scheduler::create(plan));
  KVASIR_TRY(set_ends());
  set_limits();
  start_grammars();
  loop_ = std::make_unique<StepLoop>(options_, *loaded_.runner, std::move(scheduler), end_of_generation_, *mailbox_,
                                     grammars_.get(), std::move(draft), publisher_, watchdog_, shared_);
  log_cache(plan, memory);
  return {};
}

Result<scheduler::Settings> EngineImpl::allocate_cache(int64_t memory) {
  KVASIR_ASSIGN(scheduler::Settings plan, scheduler_options(options_, *loaded_.runner, memory));
  plan.cache_events = cache_events_;
  KVASIR_TRY(plan.validate());
  model::CachePages cache({}, plan.host_pages);
  for (const scheduler::PageGroup& g : plan.groups) cache.groups.push_back(g.pages);
  cache.states = states_of(plan);
  KVASIR_TRY(loaded_.runner->allocate_cache(cache));
  if (plan.host_pages > 0) {
    KVASIR_ASSIGN(plan.cost.page_move_us, time_page_moves(*loaded_.runner, cache.groups[0], plan.host_pages));
  }
  return plan;
}

Status EngineImpl::set_ends() {
  if (loaded_.tokenizer) end_of_generation_ = loaded_.tokenizer->end_of_generation();
  for (int32_t t : options_.stop_tokens) {
    if (t < 0 || t >= info_.vocab_size)
      return invalid_argument(cat("stop_tokens has ", t, "; the model's token ids are 0 to ", info_.vocab_size - 1))
          .with_field("stop_tokens");
    end_of_generation_.push_back(t);
  }
  publisher_.set_tokenizer(loaded_.tokenizer, info_.decoder_start >= 0);
  return {};
}

void EngineImpl::set_limits() {
  limits_ = {.vocab_size = info_.vocab_size,
             .context_length = info_.context_length,
             .default_length = info_.streaming ? info_.trained_context : 0,
             .max_choices = options_.max_running,
             .has_text = loaded_.tokenizer != nullptr,
             .has_grammars = loaded_.tokenizer || loaded_.grammars,
             .max_input = options_.max_input_tokens,
             .max_output = options_.max_output_tokens,
             .max_total = options_.max_total_tokens,
             .hidden = info_.hidden,
             .labels = info_.labels,
             .no_embeddings = info_.pooling.refusal,
             .encoder = info_.encoder,
             .encodes = info_.decoder_start >= 0};
}

void EngineImpl::start_grammars() {
  if (!limits_.has_grammars) return;
  auto compiler = [this]() -> Result<std::shared_ptr<text::GrammarCompiler>> {
    if (loaded_.grammars) return loaded_.grammars;
    return text::GrammarCompiler::create(loaded_.tokenizer);
  };
  grammars_ = std::make_unique<GrammarWorker>(std::move(compiler), loaded_.tokenizer, info_.vocab_size);
}

void EngineImpl::log_cache(const scheduler::Settings& plan, int64_t memory) const {
  if (plan.recurrent)
    log_info("each sequence has a state; nothing is drafted", {{"state_bytes", info_.state_bytes},
                                                               {"running", plan.max_running},
                                                               {"max_running", options_.max_running},
                                                               {"kept_for_prefixes", plan.kept_states},
                                                               {"bytes", states_of(plan) * info_.state_bytes}});
  if (plan.recurrent && options_.prefix_cache && plan.kept_states == 0)
    log_warn("no prefix is used again: half of kv_memory has room for one state",
             {{"kv_memory", memory}, {"state_bytes", info_.state_bytes}});
  log_info("cache ready", {{"pages", plan.groups[0].pages},
                           {"window_pages", plan.groups.size() > 1 ? plan.groups[1].pages : 0},
                           {"host_pages", plan.host_pages},
                           {"page_size", options_.page_size},
                           {"type", info_.kv_type},
                           {"attention", info_.attention_type},
                           {"bytes_per_token", info_.kv_bytes_per_token},
                           {"bytes", memory}});
}

// Its cache is a part of the memory that the operator gave for one.
Result<std::unique_ptr<Drafter>> EngineImpl::load_draft(int64_t* memory) {
  if (!loaded_.draft) return std::unique_ptr<Drafter>();
  const model::ModelInfo& draft = loaded_.draft->info();
  const KvSteps steps{options_.page_size, options_.max_running, options_.max_tokens_per_step};
  const DraftPages part = draft_pages(*memory, info_, draft, steps);
  *memory -= part.bytes;
  const model::ModelInfo said = draft;
  CachedDrafter::Limits limits{part.pages, options_.page_size, options_.max_tokens_per_step, options_.max_running,
                               info_.vocab_size};
  std::unique_ptr<Drafter> made;
  if (said.given > 0) {
    limits.max_tokens = DraftHead::step_tokens(limits.max_tokens, limits.max_sequences);
    KVASIR_ASSIGN(made, DraftHead::create(std::move(loaded_.draft), limits));
  } else {
    KVASIR_ASSIGN(made, DraftModel::create(std::move(loaded_.draft), limits));
  }
  log_info(said.given > 0 ? "draft head ready" : "draft model ready", {{"model", said.name},
                                                                       {"parameters", said.parameters},
                                                                       {"weight_bytes", said.weight_bytes},
                                                                       {"pages", part.pages},
                                                                       {"bytes_per_token", said.kv_bytes_per_token},
                                                                       {"bytes", part.bytes},
                                                                       {"token_us", made->token_us(0, 1)}});
  return made;
}

void EngineImpl::enter(State phase, std::string message) {
  std::lock_guard lock(phase_mutex_);
  if (phase_ == State::starting || phase > phase_) phase_ = phase;
  if (drain_until_ && phase_ == State::serving) phase_ = State::draining;  // asked for while loading
  message_ = std::move(message);
  phase_changed_.notify_all();
}

void EngineImpl::drain(milliseconds limit) {
  std::unique_lock lock(phase_mutex_);
  Time until = std::chrono::steady_clock::now() + limit;
  if (!drain_until_ || until < *drain_until_) drain_until_ = until;
  if (phase_ == State::serving) phase_ = State::draining, message_ = "draining";
  phase_changed_.notify_all();
  shared_.draining = true;
  mailbox_->wake();
  while (phase_ != State::stopped) {
    if (std::chrono::steady_clock::now() >= *drain_until_) {
      shared_.cut_short = true;
      mailbox_->wake();
      phase_changed_.wait(lock, [&] { return phase_ == State::stopped; });
      return;
    }
    phase_changed_.wait_until(lock, *drain_until_);
  }
}

// ---- what others ask

State EngineImpl::state() const {
  std::lock_guard lock(phase_mutex_);
  if (phase_ != State::serving && phase_ != State::draining) return phase_;
  if (watchdog_.stuck()) return State::stuck;
  std::lock_guard stats_lock(shared_.mutex);
  if (!shared_.lost.ok()) return State::stuck;
  if (phase_ != State::serving) return phase_;
  const bool many = double(shared_.waiting.all().requests) > options_.degraded_at * double(options_.max_waiting);
  const bool long_wait = shared_.stats.expected_wait > options_.degraded_at * shared_.stats.wait_bound;
  return many || (long_wait && shared_.stats.wait_bound > 0) ? State::degraded : phase_;
}

Stats EngineImpl::stats() const {
  Stats s;
  Status lost;
  {
    std::lock_guard lock(shared_.mutex);
    s = shared_.stats;
    lost = shared_.lost;
  }
  Published p = publisher_.counts();
  s.finished = p.finished;
  s.failed = p.failed;
  s.cancelled = p.cancelled;
  s.output_tokens = p.output_tokens;
  s.longest = p.longest;
  s.errors = std::move(p.errors);
  s.first_token = std::move(p.first_token);
  s.prefill = std::move(p.prefill);
  s.decode = std::move(p.decode);
  s.between_tokens = std::move(p.between_tokens);
  s.whole = std::move(p.whole);
  s.prompt_length = std::move(p.prompt_tokens);
  s.output_length = std::move(p.output_length);
  s.preempted = std::move(p.preempted);
  s.requests = requests_.load();
  const WaitingRoom::Held waiting = shared_.waiting.all();
  s.waiting += waiting.requests;
  s.waiting_tokens = waiting.tokens;
  s.state = state();
  if (has_loaded_) {
    s.kv_type = info_.kv_type, s.attention_type = info_.attention_type;
    s.kv_bytes_per_token = info_.kv_bytes_per_token;
    s.ranks = info_.ranks;
  }
  std::lock_guard lock(phase_mutex_);
  s.message = message_;
  if (s.state == State::stuck) s.message = cat("no step has finished for ", options_.watchdog.count() / 1000.0, " s");
  if (s.state == State::stuck && !lost.ok()) s.message = lost.message();
  if (s.state == State::serving && !s.draft_model.fault.empty())
    s.message = cat("serving; the draft model drafts no more: ", s.draft_model.fault);
  if (s.state == State::degraded)
    s.message = cat(s.waiting, " requests are waiting; one that came now would wait for ",
                    std::round(s.expected_wait * 10) / 10, " s");
  return s;
}

std::vector<AdapterInfo> EngineImpl::adapters() const {
  std::vector<AdapterInfo> out = adapters_.all();
  std::lock_guard lock(registry_mutex_);
  for (const auto& [id, held] : registry_) {
    const JobPtr job = held.lock();
    if (!job || !job->adapter) continue;
    for (AdapterInfo& a : out)
      if (a.name == job->adapter->info.name) ++(job->left_queue.load() ? a.running : a.waiting);
  }
  return out;
}

// ---- requests

Status EngineImpl::accepting() const {
  std::lock_guard lock(phase_mutex_);
  if (phase_ == State::serving) {
    std::lock_guard stats_lock(shared_.mutex);
    if (!shared_.lost.ok()) return shared_.lost;
  }
  switch (phase_) {
    case State::serving: return {};
    case State::starting:
      return unavailable(cat("the model is loading: ", message_)).with_retry_after(milliseconds(1000));
    case State::draining: return unavailable("the server is draining and takes nothing new");
    default: return unavailable("the server has stopped");
  }
}

Status EngineImpl::in_time(const Request& request) const {
  if (!request.deadline) return {};
  Duration left = *request.deadline - std::chrono::steady_clock::now();
  if (left <= Duration::zero()) return {};  // the scheduler's to refuse
  std::lock_guard lock(shared_.mutex);
  return check_deadline(request, left, options_, shared_.recent, shared_.stats, shared_.waiting.all().tokens);
}

Result<std::unique_ptr<Stream>> EngineImpl::submit(Request request) {
  KVASIR_TRY(accepting());
  KVASIR_TRY(validate(request, limits_));
  LoadedAdapterPtr adapter;
  if (!request.adapter.empty()) {
    KVASIR_ASSIGN(adapter, adapters_.find(request.adapter));
  }
  set_max_tokens(request, limits_, info_);
  KVASIR_TRY(in_time(request));
  if (info_.decoder_start >= 0) request.prompt.push_back(info_.decoder_start);  // for which a sequence has room
  uint64_t number = next_number_.fetch_add(1);
  if (request.id.empty()) request.id = cat("req-", id_prefix_, '-', number);
  auto job = std::make_shared<Job>(std::move(request), mailbox_, int64_t(options_.event_buffer) * request.n);
  job->number = number;
  job->adapter = std::move(adapter);
  job->arrived = std::chrono::steady_clock::now();
  KVASIR_TRY(prepare(*job, info_, end_of_generation_));
  const std::string& tenant = job->request.tenant;
  const auto tokens = int64_t(job->request.prompt.size());
  KVASIR_TRY(shared_.waiting.enter(tenant, tokens,
                                   {options_.max_waiting, options_.max_waiting_tokens, options_.tenant_queue_share},
                                   shared_.tokens_per_second.load(std::memory_order_relaxed)));
  {
    std::lock_guard lock(registry_mutex_);
    if (!registry_.emplace(key(tenant, job->request.id), job).second) {
      shared_.waiting.leave(tenant, tokens);
      return Status(Code::already_exists, cat("request id '", job->request.id, "' is in use by a running request"))
          .with_field("request_id");
    }
  }
  requests_.fetch_add(1);
  auto stream = std::make_unique<JobStream>(job);
  if (!job->request.constrained()) {
    hand_over(std::move(job));
  } else {
    grammars_->compile(std::move(job), [this](JobPtr compiled, Status status) {
      compiled->failure = std::move(status);
      hand_over(std::move(compiled));
    });
  }
  return std::unique_ptr<Stream>(std::move(stream));
}

void EngineImpl::hand_over(JobPtr job) {
  if (mailbox_->submit(job)) return;
  shared_.waiting.leave(job->request.tenant, int64_t(job->request.prompt.size()));
  job->failure = unavailable("the server is shutting down");
  std::vector<Publication> records;
  records.push_back({Publication::Kind::failed, false, 0, FinishReason::cancelled, std::move(job)});
  publisher_.post(std::move(records));
}

void EngineImpl::forget(const Job& job) {
  std::lock_guard lock(registry_mutex_);
  registry_.erase(key(job.request.tenant, job.request.id));
}

bool EngineImpl::cancel(const std::string& tenant, const std::string& id) {
  JobPtr job;
  {
    std::lock_guard lock(registry_mutex_);
    auto it = registry_.find(key(tenant, id));
    if (it != registry_.end()) job = it->second.lock();
  }
  if (!job) return false;
  if (!job->cancel_requested.exchange(true)) job->touch();
  return true;
}

void EngineImpl::cancel_all(const std::string& tenant) {
  std::vector<JobPtr> jobs;
  {
    std::lock_guard lock(registry_mutex_);
    for (const auto& [id, held] : registry_)
      if (JobPtr job = held.lock(); job && job->request.tenant == tenant) jobs.push_back(std::move(job));
  }
  for (const JobPtr& job : jobs)
    if (!job->cancel_requested.exchange(true)) job->touch();
}

Status EngineImpl::flush_prefix_cache() {
  KVASIR_TRY(accepting());
  shared_.flush = true;
  mailbox_->wake();
  return {};
}

}  // namespace

std::unique_ptr<Engine> Engine::start(Loader loader, EngineOptions options) {
  return std::make_unique<EngineImpl>(std::move(loader), std::move(options));
}

}  // namespace kvasir::engine
