// The step loop: plan, run, sample, publish. Knows no wire protocol.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/status.h"
#include "engine/adapters.h"
#include "engine/drafts.h"
#include "engine/histogram.h"
#include "engine/request.h"
#include "engine/step_trace.h"
#include "kvcache/cache_events.h"
#include "kvcache/view.h"
#include "model/runner.h"
#include "model/text/text.h"

namespace kvasir::engine {

struct EngineOptions {
  int64_t kv_memory = 0;       // bytes; 0: the documented default
  int64_t host_kv_memory = 0;  // bytes of the second tier, in the host's memory; 0: none
  kvcache::IndexMode kv_index = kvcache::IndexMode::page_table;
  std::string cost_model;  // JSON file as in configs/cost; empty: what is known of no machine
  int32_t page_size = 16;
  int64_t max_tokens_per_step = 512;
  double max_step_ms = 40;  // of a step with decodes: prompts beside them are cut; 0: no bound
  int32_t max_running = 64;
  int32_t max_draft = 8;       // tokens of a draft that are verified at once; 0: none
  std::string draft_model;     // drafts where nothing else does: a model, or an EAGLE-3 head; empty: none
  bool mtp = true;             // where it is empty, the model's own layer of multi-token prediction, if it has one
  int64_t max_waiting = 1024;  // requests
  int64_t max_waiting_tokens = 1 << 20;
  std::string policy = "fcfs";
  bool prefix_cache = true;
  int32_t event_buffer = 64;  // Tokens events a slow reader may leave unread before its request is paused
  std::chrono::milliseconds slow_reader_limit{60000};
  std::chrono::milliseconds watchdog{10000};
  double degraded_at = 0.75;                                      // of max_waiting: where `serving` becomes `degraded`
  int64_t tenant_max_waiting = 0, tenant_max_waiting_tokens = 0;  // 0: no bound of its own
  // Who would not have their turn within it is refused at once; 0: three times as long as an answer takes, and at least
  // 4 s.
  std::chrono::milliseconds max_wait{0};
  double tenant_queue_share = 1;                 // of what is left of the queue, for one tenant; 0: no bound
  double tenant_cache_share = 1.0;               // of the pages, for one tenant's prefixes
  std::map<std::string, double> tenant_weights;  // policy fair: 1 when not named
  int32_t cache_event_ring = 4096;               // cache events a router may ask for again, a tenant
  std::string step_trace;                        // Chrome trace file
  std::string record;                            // of the scheduler's calls, for kvasir simulate
  std::string chat_template;                     // a file; empty: the model's own
  double kv_memory_share = 1;                    // of what kv_memory 0 is
  std::vector<int32_t> stop_tokens;              // end every answer, as the model's own do
  std::vector<AdapterSource> adapters;           // loaded with the model
  int64_t adapter_memory = int64_t(1) << 30;     // bytes, of all of them
  // Of one request; 0: no bound but the model's context.
  int64_t max_input_tokens = 0, max_output_tokens = 0, max_total_tokens = 0;
  int64_t max_context = 0;      // tokens of a request, prompt and answer; 0: the model's own
  bool template_dates = false;  // chat templates are told the day (model/dated_template.h)
};

// What the step loop runs, as a loader gives it.
struct Loaded {
  std::unique_ptr<model::Runner> runner;
  // A smaller model of the same vocabulary, or a head on the runner's hidden states; null: none.
  std::unique_ptr<model::Runner> draft = nullptr;
  text::TokenizerPtr tokenizer;                             // null: token ids only
  std::shared_ptr<const text::ChatTemplate> chat_template;  // null: the model has none
  std::shared_ptr<text::GrammarCompiler> grammars;          // null: made of the tokenizer by the first that needs it
};
using LoadProgress = std::function<void(const char* phase, double fraction)>;
using Loader = std::function<Result<Loaded>(const LoadProgress&)>;

using kvcache::CacheEvent;
using kvcache::CacheEvents;

enum class State : uint8_t { starting, serving, degraded, draining, stuck, stopped };

struct Stats {
  State state = State::starting;
  std::string message;
  int64_t running = 0, waiting = 0, paused = 0;
  int64_t waiting_tokens = 0;                // of the prompts that wait for their first step
  double expected_wait = 0, wait_bound = 0;  // seconds, of one that came now, and where it would be refused; 0: nowhere
  int64_t pages_total = 0, pages_free = 0, pages_cached = 0;
  std::string kv_type;         // what the cache is made of, once there is one
  std::string attention_type;  // what scores are made of, likewise
  int64_t kv_bytes_per_token = 0;
  std::vector<model::RankInfo> ranks;                               // likewise; empty: one
  int64_t prompt_tokens = 0, cached_tokens = 0, output_tokens = 0;  // counters
  int64_t requests = 0, finished = 0, failed = 0, cancelled = 0, preemptions = 0, steps = 0;
  int64_t steps_cut = 0;  // that took up fewer prompt tokens, for max_step_ms
  DraftCounts drafts{};
  struct {
    std::string name;   // empty: there is none
    std::string fault;  // why it drafts no more
    int64_t pages_total = 0, pages_free = 0;
    double seconds = 0;  // that its steps have taken
  } draft_model;
  int64_t moved = 0;  // preemptions that moved their pages to the second tier
  model::ExpertLoad experts;
  std::map<std::string, int64_t> errors;  // by cause (code name)
  double tokens_per_second = 0;           // computed, prompts included, lately
  double outputs_per_second = 0;          // of those that run

  // Seconds: submit to first token, between tokens, submit to end, submit to first run, one step.
  Histogram first_token, between_tokens, whole, queued, step_time;
  Histogram batch_size, step_tokens;       // sequences and tokens of a step
  Histogram handled_tokens;                // those of prompts that it began, cached or not, and of answers
  Histogram prompt_length, output_length;  // tokens of a request
  Histogram preempted;                     // how often a request lost its pages, of those that ended
  Histogram prefill, decode;               // seconds: from its first step to the first token, and from there to the end
  int64_t longest = 0;                     // tokens of a sequence that has ended, its prompt and its answer
  int64_t draft_runs = 0;                  // drafts that were verified

  double cache_hit_rate() const { return prompt_tokens > 0 ? double(cached_tokens) / double(prompt_tokens) : 0; }
  DraftCount all_drafts() const {
    DraftCount sum;
    for (const DraftCount& d : drafts) sum.drafted += d.drafted, sum.accepted += d.accepted;
    return sum;
  }
  // Of waiting_tokens, if as many of them will be found cached as were so far.
  int64_t waiting_uncached_tokens() const { return int64_t(double(waiting_tokens) * (1 - cache_hit_rate())); }
};

class Engine {
 public:
  virtual ~Engine() = default;
  // Returns at once in state `starting`; the model loads on the step thread.
  static std::unique_ptr<Engine> start(model::RunnerOptions model, EngineOptions options);
  static std::unique_ptr<Engine> start(Loader loader, EngineOptions options);

  virtual State state() const = 0;
  virtual Stats stats() const = 0;
  virtual std::vector<StepSample> recent_steps() const = 0;                     // the last 256, oldest first
  virtual Status wait_ready() = 0;                                              // blocks until serving, or why not
  virtual const model::ModelInfo& info() const = 0;                             // once serving
  virtual text::TokenizerPtr tokenizer() const = 0;                             // null: none, or still loading
  virtual std::shared_ptr<const text::ChatTemplate> chat_template() const = 0;  // null: the model has none

  // Thread-safe, never blocks on a step. A refusal (queue full, draining, bad value) is the Status.
  virtual Result<std::unique_ptr<Stream>> submit(Request request) = 0;
  virtual bool cancel(const std::string& tenant, const std::string& id) = 0;
  virtual void cancel_all(const std::string& tenant) = 0;  // those that the tenant has now
  virtual Status flush_prefix_cache() = 0;
  // While it serves, from any thread; a load takes as long as the files and the device take. What fails changes
  // nothing.
  virtual Result<AdapterInfo> load_adapter(const std::string& /*name*/, const std::string& /*path*/) {
    return unimplemented("this engine loads no adapters");
  }
  virtual Status unload_adapter(const std::string& /*name*/) { return unimplemented("this engine loads no adapters"); }
  virtual std::vector<AdapterInfo> adapters() const { return {}; }
  virtual bool has_adapter(const std::string& /*name*/) const { return false; }
  // What is cached and what goes, by tenant; null: the engine does not say.
  virtual std::shared_ptr<const CacheEvents> cache_events() const { return nullptr; }

  // Stop accepting, finish what runs within the limit, then stop; what is left then fails as unavailable.
  // Blocks until stopped. A second call with a shorter limit, from any thread, shortens the first.
  virtual void drain(std::chrono::milliseconds limit) = 0;
};

}  // namespace kvasir::engine
