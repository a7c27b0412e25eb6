#include "server/services.h"

#include <algorithm>
#include <random>

#include "core/cat.h"
#include "core/log.h"
#include "model/text/stop_expressions.h"
#include "server/counted_stream.h"
#include "server/parameters.h"
#include "server/pooled_stream.h"
#include "server/prompt.h"
#include "server/thoughts.h"

namespace kvasir::server {

const char* state_name(engine::State state) {
  switch (state) {
    case engine::State::starting: return "starting";
    case engine::State::serving: return "serving";
    case engine::State::degraded: return "degraded";
    case engine::State::draining: return "draining";
    case engine::State::stuck: return "stuck";
    case engine::State::stopped: return "stopped";
  }
  return "?";
}

namespace {

// One prompt of a call for embeddings or scores.
struct PooledTokens {
  std::vector<int32_t> ids;
  int32_t second_text = 0;  // where it begins; 0: there is none
};

Result<PooledTokens> encode_pooled(GenerateInput& in, PooledPrompt prompt, const ServerOptions& options,
                                   const engine::Engine& engine, size_t max_bytes) {
  const model::ModelInfo& info = engine.info();
  auto encode = [&](const PromptInput& text) {
    return encode_prompt_within(size_t(info.context_length), text, engine, max_bytes);
  };
  in.prompt = std::move(prompt.input);
  KVASIR_TRY(check_fields(in, options, info));
  PooledTokens out;
  KVASIR_ASSIGN(out.ids, encode(in.prompt));
  if (prompt.pair) out.second_text = int32_t(out.ids.size());
  for (TextInput& text : prompt.more) {
    KVASIR_ASSIGN(auto more, encode(std::move(text)));
    // What begins a text stands before the first of a pair alone.
    if (prompt.pair && !more.empty() && info.two_separators)
      more.front() = out.ids.back();
    else if (prompt.pair && !more.empty())
      more.erase(more.begin());
    out.ids.insert(out.ids.end(), more.begin(), more.end());
  }
  KVASIR_TRY(check_length(in, out.ids.size(), info));
  return out;
}

}  // namespace

Services::Services(const ServerOptions& options, engine::Engine& engine) : options_(options), engine_(engine) {}
Services::~Services() = default;

Result<std::unique_ptr<Services>> Services::create(const ServerOptions& options, engine::Engine& engine) {
  KVASIR_TRY(options.check_open());
  std::unique_ptr<Services> services(new Services(options, engine));
  if (!options.keys_file.empty()) {
    KVASIR_ASSIGN(services->keys_, KeyStore::open(options.keys_file));
  }
  if (!options.otlp_endpoint.empty()) {
    KVASIR_ASSIGN(CollectorAddress collector, parse_collector(options.otlp_endpoint));
    services->spans_ = std::make_unique<SpanExporter>(std::move(collector));
  }
  return services;
}

Result<Caller> Services::authenticate(std::string_view authorization) {
  if (!keys_) return everyone();
  std::string_view key = authorization;
  constexpr std::string_view kBearer = "bearer ";
  auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? char(c + 32) : c; };
  if (key.size() >= kBearer.size() &&
      std::equal(kBearer.begin(), kBearer.end(), key.begin(), [&](char a, char b) { return a == lower(b); }))
    key.remove_prefix(kBearer.size());
  while (!key.empty() && key.front() == ' ') key.remove_prefix(1);
  while (!key.empty() && key.back() == ' ') key.remove_suffix(1);
  if (!key.empty())
    if (std::optional<Caller> caller = keys_->find(key)) return *caller;
  metrics_.count_auth_failure();
  return Status(Code::unauthenticated, key.empty()
                                           ? "no API key; send the header authorization: Bearer KEY"
                                           : "the API key is not one of this server's; check it, or ask for another");
}

Health Services::health() const {
  Health h;
  h.state = engine_.state();
  if (draining() && h.state != engine::State::stopped && h.state != engine::State::stuck)
    h.state = engine::State::draining;
  h.ready = h.state == engine::State::serving || h.state == engine::State::degraded;
  h.live = h.state != engine::State::stuck && h.state != engine::State::stopped;
  if (h.state == engine::State::draining)
    h.message = "draining: running requests finish, new ones are refused";
  else if (h.state != engine::State::serving)
    h.message = engine_.stats().message;
  if (h.message.empty() && h.state != engine::State::serving) h.message = state_name(h.state);
  return h;
}

std::string Services::model_name() const {
  if (!options_.served_model_name.empty()) return options_.served_model_name;
  return engine_.state() == engine::State::starting ? "" : engine_.info().name;
}

namespace {

// Those that requests may call a model by, for a message.
std::string listed(const std::vector<std::string>& names) {
  constexpr size_t kShown = 8;
  std::string out;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) out += cat(i > 0 ? ", '" : "'", names[i], '\'');
  return names.size() > kShown ? cat(out, " and ", names.size() - kShown, " more (GET /v1/models)") : out;
}

}  // namespace

Status Services::check_model(const std::string& model) const {
  Health h = health();
  if (h.state == engine::State::starting)
    return unavailable(cat("the model is still loading", h.message.empty() ? "" : ": ", h.message, "; try again"))
        .with_retry_after(std::chrono::seconds(1));
  if (h.state == engine::State::stopped || h.state == engine::State::draining)
    return unavailable("this server is shutting down; send the request to another")
        .with_retry_after(std::chrono::seconds(5));
  if (model.empty() || options_.any_model_name || names_base(model) || engine_.has_adapter(model)) return {};
  std::vector<std::string> names = {model_name()};
  names.insert(names.end(), options_.model_alias.begin(), options_.model_alias.end());
  return not_found(cat("model '", model.substr(0, 128), "' is not served here; this server has ", listed(names)))
      .with_field("model");
}

bool Services::names_base(const std::string& model) const {
  const std::vector<std::string>& also = options_.model_alias;
  return model == model_name() || model == engine_.info().name ||
         std::find(also.begin(), also.end(), model) != also.end();
}

Result<std::string> Services::chosen_adapter(const Caller& caller, const GenerateInput& in) const {
  std::string adapter = in.request.adapter;
  if (!in.model.empty() && !names_base(in.model) && engine_.has_adapter(in.model)) {
    if (!adapter.empty() && adapter != in.model)
      return invalid_argument(cat("adapter is '", adapter.substr(0, 128), "' and model '", in.model,
                                  "', which is another adapter; name one of them"))
          .with_field("adapter");
    adapter = in.model;
  }
  if (adapter.empty() && in.model.empty() && caller.adapters.size() == 1 && !names_base(caller.adapters[0]))
    adapter = caller.adapters[0];
  if (!adapter.empty() && !engine_.has_adapter(adapter))
    return not_found(cat("the adapter '", adapter.substr(0, 128), "' is not loaded")).with_field("adapter");
  const std::string used = adapter.empty() ? model_name() : adapter;
  if (!caller.may_use(used) && !(adapter.empty() && caller.may_use(engine_.info().name)))
    return Status(Code::permission_denied, cat("the key ", caller.key_id, " may not use '", used,
                                               "'; it was made for other adapters (its --adapter)"))
        .with_field("model");
  return adapter;
}

Result<engine::AdapterInfo> Services::load_adapter(const Caller& caller, const std::string& name,
                                                   const std::string& path) {
  KVASIR_TRY(caller.require(Role::admin, "loading adapters"));
  KVASIR_TRY(check_model(""));
  if (names_base(name))
    return Status(Code::already_exists, cat("'", name, "' is the served model's own name; give the adapter another"))
        .with_field("lora_name");
  return engine_.load_adapter(name, path);
}

Status Services::unload_adapter(const Caller& caller, const std::string& name) {
  KVASIR_TRY(caller.require(Role::admin, "unloading adapters"));
  KVASIR_TRY(check_model(""));
  return engine_.unload_adapter(name);
}

size_t Services::max_prompt_bytes() {
  size_t longest = longest_token_.load();
  if (longest == 0) {
    longest = 1;
    if (text::TokenizerPtr tokenizer = engine_.tokenizer())
      for (int32_t id = 0; id < tokenizer->vocab_size(); ++id)
        longest = std::max(longest, std::max(tokenizer->token_bytes(id).size(), tokenizer->token_text(id).size()));
    longest_token_.store(longest);
  }
  return longest * size_t(engine_.info().context_length);
}

Status Services::refuse(const Caller& caller, const char* protocol, Status why) {
  (void)limiter_.ask(caller);
  refused(caller, {.protocol = protocol}, why, clock_.now());
  return why;
}

Status Services::may_ask(const Caller& caller, const char* protocol) {
  Status status = limiter_.room(caller);
  if (!status.ok()) refused(caller, {.protocol = protocol}, status, clock_.now());
  return status;
}

Result<Submitted> Services::generate(const Caller& caller, GenerateInput input) {
  Time began = clock_.now();
  Result<Submitted> result = submit(caller, input);
  if (!result.ok()) refused(caller, input, result.status(), began);
  return result;
}

void Services::refused(const Caller& caller, const GenerateInput& input, const Status& why, Time began) {
  metrics_.count(input.protocol, why.code());
  if (spans_) {
    Span span{input.protocol, parse_traceparent(input.request.trace_parent).value_or(TraceContext{}), began,
              clock_.now()};
    span.error = why.message();
    spans_->add(std::move(span));
  }
  if (options_.access_log)
    log_info("request refused", {{"id", input.request.id},
                                 {"protocol", input.protocol},
                                 {"tenant", caller.tenant},
                                 {"key", caller.key_id},
                                 {"code", code_name(why.code())},
                                 {"why", why.message()},
                                 {"traceparent", input.request.trace_parent},
                                 {"user", input.said.user},
                                 {"metadata", input.said.metadata}});
}

Result<std::vector<int32_t>> Services::prompt(const Caller& caller, const GenerateInput& input) {
  const Time began = clock_.now();
  auto ids = judged_prompt(caller, input);
  if (ids.ok())
    limiter_.spend(caller, int64_t(ids->size()));
  else
    refused(caller, input, ids.status(), began);
  return ids;
}

Result<std::vector<int32_t>> Services::judged_prompt(const Caller& caller, const GenerateInput& in) {
  KVASIR_TRY(caller.require(Role::user, "generating"));
  KVASIR_TRY(check_model(in.model));
  KVASIR_TRY(limiter_.ask(caller));
  const model::ModelInfo& info = engine_.info();
  KVASIR_TRY(chosen_adapter(caller, in).status());
  KVASIR_TRY(check_fields(in, options_, info));
  KVASIR_TRY(check_priority(caller, in.request));
  KVASIR_ASSIGN(auto ids, encode_prompt_within(size_t(info.context_length), in.prompt, engine_, max_prompt_bytes()));
  KVASIR_TRY(check_length(in, ids.size(), info));
  return ids;
}

// Token ids as text where the model has a tokenizer, else their numbers.
std::string Services::shown(const std::vector<int32_t>& ids) const {
  if (const text::TokenizerPtr tokenizer = engine_.tokenizer())
    if (auto text = tokenizer->decode(ids, false); text.ok()) return std::move(*text);
  std::string out;
  for (int32_t id : ids) out += cat(out.empty() ? "" : " ", id);
  return out;
}

Result<Submitted> Services::submit(const Caller& caller, GenerateInput& in) {
  Submitted out;
  KVASIR_ASSIGN(out.prompt, judged_prompt(caller, in));
  KVASIR_ASSIGN(in.request.adapter, chosen_adapter(caller, in));
  out.model = in.request.adapter.empty() ? model_name() : in.request.adapter;
  const model::ModelInfo& info = engine_.info();
  engine::Request& r = in.request;
  if (in.prediction) {
    auto predicted = encode_prompt_within(size_t(info.context_length), *in.prediction, engine_, max_prompt_bytes());
    if (!predicted.ok()) return Status(predicted.status()).with_field("prediction");
    r.prediction = std::move(*predicted);
  }
  KVASIR_ASSIGN(r.sampling.bad_sequences, encode_bad_words(r.bad_words, engine_));
  if (!r.stop_regex.empty()) {
    const char* name = name_of(in, parameter("stop_regex"));
    auto expressions = text::StopExpressions::compile(r.stop_regex);
    if (!expressions.ok()) return invalid_argument(cat(name, expressions.status().message())).with_field(name);
    r.stop_expressions = *std::move(expressions);
  }
  for (int32_t* wanted : {&r.sampling.logprobs, &r.prompt_logprobs})
    if (*wanted == kAllLogprobs) *wanted = info.vocab_size;
  r.tenant = caller.tenant;
  r.weight = caller.weight;
  r.prompt = out.prompt;
  KVASIR_TRY(limit_thoughts(options_, engine_, in));
  if (!r.max_tokens && in.default_max_tokens > 0) r.max_tokens = in.default_max_tokens;
  if (r.max_tokens) r.max_tokens = std::min(*r.max_tokens, info.context_length - int64_t(out.prompt.size()));
  if (in.draw_seed) {
    thread_local std::mt19937_64 draw{std::random_device{}()};
    // It fits a double, so JSON clients can send it back. A greedy answer draws nothing: any seed gives it again.
    if (options_.seed >= 0)
      r.sampling.seed = uint64_t(options_.seed);
    else
      r.sampling.seed = r.sampling.temperature == 0 ? 0 : draw() >> 11;
  }
  out.seed = r.sampling.seed;

  KVASIR_TRY(limiter_.admit(caller, int64_t(out.prompt.size())));
  std::string trace_parent = r.trace_parent;
  const int64_t choices = r.n;
  const std::optional<int64_t> max_tokens = r.max_tokens;
  auto stream = engine_.submit(std::move(r));
  if (!stream.ok()) {
    limiter_.release(caller);
    return stream.status();
  }
  metrics_.count_request(choices, max_tokens);
  if (log_enabled(LogLevel::debug)) {
    const LogRequest of((*stream)->id());
    log_prompt("prompt", shown(out.prompt));
  }
  out.stream = std::make_unique<CountedStream>(*this, caller, in, std::move(trace_parent), std::move(*stream),
                                               out.prompt.size());
  return out;
}

Status Services::check_priority(const Caller& caller, const engine::Request& request) const {
  if (request.priority <= caller.priority_ceiling) return {};
  return invalid_argument(cat("priority is ", request.priority, "; key ", caller.key_id, " may ask for at most ",
                              caller.priority_ceiling))
      .with_field("priority");
}

Result<Submitted> Services::pool(const Caller& caller, GenerateInput input, std::vector<PooledPrompt> prompts) {
  Time began = clock_.now();
  Result<Submitted> result = submit_pooled(caller, input, prompts);
  if (!result.ok()) refused(caller, input, result.status(), began);
  return result;
}

Result<Submitted> Services::submit_pooled(const Caller& caller, GenerateInput& in, std::vector<PooledPrompt>& prompts) {
  KVASIR_TRY(caller.require(Role::user, "embeddings"));
  KVASIR_TRY(check_model(in.model));
  KVASIR_TRY(limiter_.ask(caller));
  const char* field = in.request.scored.empty() && !in.request.classified ? "input" : "documents";
  if (prompts.empty()) return invalid_argument(cat(field, " is empty; give at least one text")).with_field(field);
  if (prompts.size() > size_t(options_.max_inputs))
    return invalid_argument(
               cat(field, " has ", prompts.size(), " texts; at most ", options_.max_inputs, " are taken (max_inputs)"))
        .with_field(field);
  Submitted out;
  KVASIR_ASSIGN(in.request.adapter, chosen_adapter(caller, in));
  out.model = in.request.adapter.empty() ? model_name() : in.request.adapter;
  KVASIR_TRY(check_priority(caller, in.request));

  engine::Request& r = in.request;
  r.pooled = true;
  r.detokenize = false;
  r.max_tokens = 0;
  r.tenant = caller.tenant;
  r.weight = caller.weight;
  auto all = std::make_shared<std::vector<PooledTokens>>();
  int64_t tokens = 0;
  for (size_t i = 0; i < prompts.size(); ++i) {
    auto one = encode_pooled(in, std::move(prompts[i]), options_, engine_, max_prompt_bytes());
    if (one.ok()) {
      tokens += int64_t(one->ids.size());
      all->push_back(*std::move(one));
      continue;
    }
    const Status& s = one.status();
    if (s.field() != "prompt") return s;
    return Status(s.code(),
                  prompts.size() == 1 ? cat(field, ": ", s.message()) : cat(field, '[', i, "]: ", s.message()))
        .with_field(field);
  }
  in.prompt = TokensInput();

  KVASIR_TRY(limiter_.admit(caller, tokens));
  std::string trace_parent = r.trace_parent;
  auto ask = [this, all, request = std::move(r)](size_t i) {
    engine::Request one = request;
    one.prompt = (*all)[i].ids;
    one.second_text = (*all)[i].second_text;
    if (i > 0 && !one.id.empty()) one.id = cat(one.id, '-', i);
    return engine_.submit(std::move(one));
  };
  auto stream = PooledStream::begin(std::move(ask), prompts.size(), 2 * size_t(options_.max_running));
  if (!stream.ok()) {
    limiter_.release(caller);
    return stream.status();
  }
  out.stream =
      std::make_unique<CountedStream>(*this, caller, in, std::move(trace_parent), std::move(*stream), size_t(tokens));
  return out;
}

Result<std::vector<int32_t>> Services::tokenize(const Caller& caller, const std::string& model,
                                                const PromptInput& prompt) {
  KVASIR_TRY(caller.require(Role::user, "tokenizing"));
  KVASIR_TRY(check_model(model));
  KVASIR_TRY(limiter_.ask(caller));
  KVASIR_ASSIGN(auto ids, encode_prompt(prompt, engine_, size_t(options_.max_body.bytes)));
  limiter_.spend(caller, int64_t(ids.size()));
  return ids;
}

Result<std::string> Services::render(const Caller& caller, const std::string& model, const ChatInput& chat) {
  KVASIR_TRY(caller.require(Role::user, "rendering a template"));
  KVASIR_TRY(check_model(model));
  KVASIR_TRY(limiter_.ask(caller));
  return prompt_text(chat, engine_);
}

Result<std::string> Services::detokenize(const Caller& caller, const std::string& model,
                                         const std::vector<int64_t>& ids, bool skip_special) {
  KVASIR_TRY(caller.require(Role::user, "detokenizing"));
  KVASIR_TRY(check_model(model));
  KVASIR_TRY(limiter_.ask(caller));
  limiter_.spend(caller, int64_t(ids.size()));
  text::TokenizerPtr tokenizer = engine_.tokenizer();
  if (!tokenizer) return failed_precondition("this model came without a tokenizer");
  for (size_t i = 0; i < ids.size(); ++i)
    if (ids[i] < 0 || ids[i] >= engine_.info().vocab_size)
      return invalid_argument(
                 cat("token ", i, " is ", ids[i], "; it must be an id from 0 to ", engine_.info().vocab_size - 1))
          .with_field("tokens");
  return tokenizer->decode(std::vector<int32_t>(ids.begin(), ids.end()), skip_special);
}

}  // namespace kvasir::server
