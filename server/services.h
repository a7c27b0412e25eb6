// What every protocol shares: who is asking, what is refused, prompts to tokens, one submitted request with
// its accounting, the state of the whole. Adapters hold a Services& and translate; nothing else.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/clock.h"
#include "core/status.h"
#include "engine/engine.h"
#include "server/caller.h"
#include "server/generate.h"
#include "server/keys.h"
#include "server/limiter.h"
#include "server/memory.h"
#include "server/metrics.h"
#include "server/options.h"
#include "server/span_exporter.h"

namespace kvasir::server {

// A request on its way. The stream counts, limits and logs as it is read; destroying it cancels.
struct Submitted {
  std::unique_ptr<engine::Stream> stream;
  std::vector<int32_t> prompt;
  std::string model;  // that answers: the served one's name, or an adapter's
  uint64_t seed = 0;
};

// The table of the contract: what each probe is to say.
struct Health {
  engine::State state = engine::State::starting;
  bool live = true;     // /health
  bool ready = false;   // /ready, grpc.health.v1, VllmEngine's HealthCheck
  std::string message;  // in words; empty when all is well
};
// One of the prompts of a call for embeddings or scores.
struct PooledPrompt {
  PromptInput input;
  std::vector<TextInput> more;  // texts that follow, each in tokens by itself
  bool pair = false;            // `more` is the second text of a pair, to a model that reads pairs
};
const char* state_name(engine::State state);  // "serving"

class Services {
 public:
  // Keys are read here.
  static Result<std::unique_ptr<Services>> create(const ServerOptions& options, engine::Engine& engine);
  ~Services();

  // `authorization` as a header has it ("Bearer ...", or the bare key). Without keys everyone is admin.
  Result<Caller> authenticate(std::string_view authorization);
  bool has_keys() const { return keys_ != nullptr; }

  // Whether this caller may ask for what costs; before anything of it is read. Tenants over their limits cost nothing.
  Status may_ask(const Caller& caller, const char* protocol);
  // All of it: fields, limits, prompt, length, submission. Call it on a worker: it may tokenize.
  Result<Submitted> generate(const Caller& caller, GenerateInput input);
  // Prompts as wholes, in place of `input.prompt`: one stream, whose one Finished has a result for each. What
  // `input.request` says of embeddings and scores holds for all. Counted, limited and logged as one request of all
  // their tokens.
  Result<Submitted> pool(const Caller& caller, GenerateInput input, std::vector<PooledPrompt> prompts);
  // What an adapter refuses itself: it was looked at, so it costs as any other. The refusal.
  Status refuse(const Caller& caller, const char* protocol, Status why);
  // What an adapter reads of a request, as it is. What it refuses itself is counted and logged as generate()'s refusals
  // are.
  template <class T>
  Result<T> read(const Caller& caller, const char* protocol, Result<T> request) {
    if (!request.ok()) (void)refuse(caller, protocol, request.status());
    return request;
  }
  // The model is the served one (or unnamed) or one of its adapters, and there is one to serve.
  Status check_model(const std::string& model) const;
  Result<std::vector<int32_t>> tokenize(const Caller& caller, const std::string& model, const PromptInput& prompt);
  // The prompt that generate() would give the engine, judged as there; nothing is submitted.
  Result<std::vector<int32_t>> prompt(const Caller& caller, const GenerateInput& input);
  // A chat as its template writes it.
  Result<std::string> render(const Caller& caller, const std::string& model, const ChatInput& chat);
  Result<std::string> detokenize(const Caller& caller, const std::string& model, const std::vector<int64_t>& ids,
                                 bool skip_special);
  // While serving, by an admin.
  Result<engine::AdapterInfo> load_adapter(const Caller& caller, const std::string& name, const std::string& path);
  Status unload_adapter(const Caller& caller, const std::string& name);
  bool cancel(const Caller& caller, const std::string& id) { return engine_.cancel(caller.tenant, id); }
  void cancel_all(const Caller& caller) { engine_.cancel_all(caller.tenant); }  // the caller's own

  Health health() const;
  void set_draining() { draining_.store(true); }
  bool draining() const { return draining_.load(); }

  std::string model_name() const;  // --served-model-name, or the model's own; empty until it has loaded
  const ServerOptions& options() const { return options_; }
  engine::Engine& engine() { return engine_; }
  const engine::Engine& engine() const { return engine_; }
  ByteBudget& budget() { return budget_; }
  Metrics& metrics() { return metrics_; }
  const Metrics& metrics() const { return metrics_; }
  Time started() const { return started_; }
  const SpanExporter* spans() const { return spans_.get(); }

 private:
  Services(const ServerOptions& options, engine::Engine& engine);
  class CountedStream;
  Result<Submitted> submit(const Caller& caller, GenerateInput& input);
  Result<std::vector<int32_t>> judged_prompt(const Caller& caller, const GenerateInput& input);
  Result<Submitted> submit_pooled(const Caller& caller, GenerateInput& input, std::vector<PooledPrompt>& prompts);
  // The adapter of a request, which its caller may use: its own field's, or the one that its model or its key names.
  Result<std::string> chosen_adapter(const Caller& caller, const GenerateInput& input) const;
  bool names_base(const std::string& model) const;
  Status check_priority(const Caller& caller, const engine::Request& request) const;
  std::string shown(const std::vector<int32_t>& ids) const;
  void refused(const Caller& caller, const GenerateInput& input, const Status& why, Time began);
  size_t max_prompt_bytes();

  const ServerOptions options_;
  engine::Engine& engine_;
  SystemClock clock_;
  Limiter limiter_{clock_};
  ByteBudget budget_{size_t(options_.max_held.bytes)};
  Metrics metrics_;
  std::unique_ptr<KeyStore> keys_;
  std::unique_ptr<SpanExporter> spans_;  // null: nobody collects them
  std::atomic<bool> draining_{false};
  std::atomic<size_t> longest_token_{0};  // bytes; 0: not known yet
  const Time started_ = clock_.now();
};

}  // namespace kvasir::server
