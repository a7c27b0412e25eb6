// An engine of scripted answers, so that adapters are tested without a model: it answers the prompt's ids
// again, in order, or follows the script a request's cache_salt names.
//   "hang"  Started, then nothing until it is cancelled
//   "fail"  Started, one token, then Failed(internal)
//   "flood" Started, then tokens for as long as they are read
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "core/cat.h"
#include "engine/engine.h"

namespace kvasir::server {

// Ids 0 to 255 are bytes, 256 is the end.
class ByteTokenizer : public text::Tokenizer {
 public:
  int32_t vocab_size() const override { return 257; }
  Result<std::vector<int32_t>> encode(std::string_view text, bool, bool) const override {
    std::vector<int32_t> ids;
    for (unsigned char c : text) ids.push_back(c);
    return ids;
  }
  Result<std::string> decode(std::span<const int32_t> ids, bool) const override {
    std::string out;
    for (int32_t id : ids) out += token_bytes(id);
    return out;
  }
  std::string token_text(int32_t id) const override {
    return id < 0 ? "" : id < 256 ? std::string(1, char(id)) : "<end>";
  }
  std::string token_bytes(int32_t id) const override { return id < 256 ? std::string(1, char(id)) : ""; }
  bool is_special(int32_t id) const override { return id == 256; }
  int32_t token_id(std::string_view text) const override { return text == "<end>" ? 256 : -1; }
  int32_t bos() const override { return -1; }
  const std::vector<int32_t>& end_of_generation() const override { return end_; }
  const std::string& chat_template() const override { return template_; }

 private:
  std::vector<int32_t> end_{256};
  std::string template_ = "{% for m in messages %}{{ m.content }}{% endfor %}{# tools are left out #}";
};

// The same with names for some ids.
class NamedTokens final : public ByteTokenizer {
 public:
  explicit NamedTokens(std::map<std::string, int32_t> names) : names_(std::move(names)) {}
  int32_t token_id(std::string_view text) const override {
    const auto it = names_.find(std::string(text));
    return it == names_.end() ? -1 : it->second;
  }

 private:
  const std::map<std::string, int32_t> names_;
};

class FakeEngine final : public engine::Engine {
 public:
  FakeEngine() {
    info_.name = "fake";
    info_.architecture = "llama";
    info_.vocab_size = 257;
    info_.context_length = 128;
  }

  engine::State state() const override { return state_; }
  engine::Stats stats() const override {
    engine::Stats s;
    s.state = state_;
    s.running = open_;
    s.pages_total = 100;
    s.kv_type = "float16", s.attention_type = "float32", s.kv_bytes_per_token = 128;
    s.pages_free = 60;
    s.waiting_tokens = 1000;
    s.preempted = engine::times_histogram();
    for (double times : {0, 0, 0, 1, 3}) s.preempted.add(times);
    s.prompt_tokens = 400;
    s.cached_tokens = 100;
    s.tokens_per_second = 900;
    s.outputs_per_second = 12.5;
    return s;
  }
  std::vector<engine::StepSample> recent_steps() const override {
    return {{.step = 1, .decodes = 2, .prefills = 1, .tokens = 66}, {.step = 2, .decodes = 3, .tokens = 3}};
  }
  Status wait_ready() override { return {}; }
  const model::ModelInfo& info() const override { return info_; }
  text::TokenizerPtr tokenizer() const override { return tokenizer_; }
  std::shared_ptr<const text::ChatTemplate> chat_template() const override { return chat_template_; }
  Status flush_prefix_cache() override {
    ++flushes;
    return {};
  }
  Result<engine::AdapterInfo> load_adapter(const std::string& name, const std::string& path) override {
    std::lock_guard lock(mutex_);
    if (path == "broken") return invalid_argument("the adapter is broken").with_field("lora_path");
    return adapters_[name] = {.name = name, .path = path, .bytes = 1000, .rank = 8};
  }
  Status unload_adapter(const std::string& name) override {
    std::lock_guard lock(mutex_);
    return adapters_.erase(name) > 0 ? Status() : not_found(cat("the adapter '", name, "' is not loaded"));
  }
  std::vector<engine::AdapterInfo> adapters() const override {
    std::lock_guard lock(mutex_);
    std::vector<engine::AdapterInfo> out;
    for (const auto& [name, info] : adapters_) {
      out.push_back(info);
      for (const engine::Request& r : requests) out.back().running += r.adapter == name;  // that ever were
    }
    return out;
  }
  bool has_adapter(const std::string& name) const override {
    std::lock_guard lock(mutex_);
    return adapters_.contains(name);
  }
  std::shared_ptr<const engine::CacheEvents> cache_events() const override { return events; }
  void drain(std::chrono::milliseconds) override { state_ = engine::State::stopped; }

  Result<std::unique_ptr<engine::Stream>> submit(engine::Request request) override {
    if (request.id.empty()) request.id = cat("fake-", ++made_);
    std::lock_guard lock(mutex_);
    if (!refusal_.ok()) return refusal_;
    requests.push_back(request);
    auto script = std::make_shared<Script>();
    write_script(request, *script);
    live_[{request.tenant, request.id}] = script;
    ++open_;
    open_changed_.notify_all();
    return std::unique_ptr<engine::Stream>(std::make_unique<FakeStream>(*this, std::move(request), script));
  }
  bool cancel(const std::string& tenant, const std::string& id) override {
    std::shared_ptr<Script> script;
    {
      std::lock_guard lock(mutex_);
      auto it = live_.find({tenant, id});
      if (it == live_.end()) return false;
      script = it->second;
    }
    script->cancel();
    return true;
  }

  void cancel_all(const std::string& tenant) override {
    std::vector<std::shared_ptr<Script>> scripts;
    {
      std::lock_guard lock(mutex_);
      for (const auto& [id, script] : live_)
        if (id.first == tenant) scripts.push_back(script);
    }
    for (const auto& script : scripts) script->cancel();
  }

  void set_state(engine::State s) { state_ = s; }
  void set_context(int32_t tokens) { info_.context_length = tokens; }
  void use_tokenizer(text::TokenizerPtr tokenizer) { tokenizer_ = std::move(tokenizer); }
  void use_template(const char* source) { chat_template_ = *text::ChatTemplate::compile(source, ByteTokenizer()); }
  // What was asked so far is forgotten (an hour of fuzzing asks much).
  void forget() {
    std::lock_guard lock(mutex_);
    requests.clear();
  }
  // What submit() answers from now on; ok: it takes requests.
  void refuse(Status why) {
    std::lock_guard lock(mutex_);
    refusal_ = std::move(why);
  }
  // A prompt that begins with this token hangs, for wires that carry no cache_salt.
  void hang_on(int32_t token) { hang_on_ = token; }
  int open() const { return open_; }
  // Until so many requests are open; false when it does not come to that in a minute.
  bool wait_open(int wanted) {
    std::unique_lock lock(mutex_);
    return open_changed_.wait_for(lock, std::chrono::minutes(1), [&] { return open_ == wanted; });
  }
  // Until nobody has taken anything for a while: neither spinning nor buffering without end.
  bool rests() const {
    const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    for (int before = -1; std::chrono::steady_clock::now() < until;) {
      if (before == polled) return true;
      before = polled;
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
    }
    return false;
  }
  size_t asked() {
    std::lock_guard lock(mutex_);
    return requests.size();
  }
  engine::Request last() {
    std::lock_guard lock(mutex_);
    return requests.back();
  }

  std::vector<engine::Request> requests;
  const std::shared_ptr<engine::CacheEvents> events = std::make_shared<engine::CacheEvents>(4);
  std::atomic<int> flushes{0}, polled{0};
  std::atomic<bool> floods{true};

 private:
  struct Script {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<engine::Event> events;
    std::function<void()> ready;
    bool flood = false, over = false;

    void cancel() {
      std::function<void()> call;
      {
        std::lock_guard lock(mutex);
        if (over) return;
        flood = false;
        events.push_back(engine::Finished{0, engine::FinishReason::cancelled, "", -1, true, {}});
        over = true;
        call = ready;
      }
      changed.notify_all();
      if (call) call();
    }
  };

  class FakeStream final : public engine::Stream {
   public:
    FakeStream(FakeEngine& engine, engine::Request request, std::shared_ptr<Script> script)
        : engine_(engine), request_(std::move(request)), script_(std::move(script)) {}
    ~FakeStream() override {
      {
        std::lock_guard lock(script_->mutex);
        script_->ready = nullptr;
      }
      std::lock_guard lock(engine_.mutex_);
      engine_.live_.erase({request_.tenant, request_.id});
      --engine_.open_;
      engine_.open_changed_.notify_all();
    }
    const std::string& id() const override { return request_.id; }
    std::optional<engine::Event> poll() override {
      std::lock_guard lock(script_->mutex);
      ++engine_.polled;
      if (script_->events.empty() && script_->flood)
        return engine::Tokens{0, {{'x', -1.0f, {}}}, std::string(1000, 'x')};
      if (script_->events.empty()) return std::nullopt;
      engine::Event e = std::move(script_->events.front());
      script_->events.pop_front();
      return e;
    }
    std::optional<engine::Event> next() override {
      std::unique_lock lock(script_->mutex);
      script_->changed.wait(lock, [&] { return !script_->events.empty() || script_->over; });
      lock.unlock();
      return poll();
    }
    void on_ready(std::function<void()> callback) override {
      {
        std::lock_guard lock(script_->mutex);
        script_->ready = callback;
      }
      callback();
    }
    void cancel() override { script_->cancel(); }

   private:
    FakeEngine& engine_;
    const engine::Request request_;
    const std::shared_ptr<Script> script_;
  };

  void write_script(const engine::Request& r, Script& script) {
    auto& out = script.events;
    engine::Started started{r.sampling.seed, 2, {}};
    if (r.prompt_logprobs >= 0)
      for (int32_t id : r.prompt) started.prompt_logprobs.push_back({id, -0.5f, {}});
    out.push_back(started);
    engine::Usage usage{int64_t(r.prompt.size()), 0, 2};
    script.flood = floods && r.cache_salt == "flood";
    if (script.flood || r.cache_salt == "hang" || r.prompt[0] == hang_on_) return;
    if (r.cache_salt == "fail") {
      out.push_back(engine::Tokens{0, {{r.prompt[0], -1.0f, {}}}, "!"});
      out.push_back(engine::Failed{internal_error("the script says so")});
      script.over = true;
      return;
    }
    if (r.pooled) {  // {3, 4} is its direction; scored tokens: their ids
      std::vector<float> values = {3.0f * float(r.prompt[0]), 4.0f * float(r.prompt[0]), 0, float(r.prompt.size())};
      if (!r.scored.empty()) values.assign(r.scored.begin(), r.scored.end());
      if (r.dimensions) values.resize(size_t(*r.dimensions));
      out.push_back(engine::Finished{0, engine::FinishReason::length, "", -1, true, {}, usage, {std::move(values)}});
      script.over = true;
      return;
    }
    for (int32_t choice = 0; choice < r.n; ++choice) {
      int64_t limit = r.max_tokens.value_or(int64_t(r.prompt.size()) + 1);
      engine::Finished end{choice, engine::FinishReason::length, "", -1, choice + 1 == r.n, {}};
      int64_t made = 0;
      for (; made < limit; ++made) {
        int32_t id = made < int64_t(r.prompt.size()) ? r.prompt[size_t(made)] : 256;
        bool stop = (id == 256 && !r.ignore_eos) ||
                    std::find(r.stop_tokens.begin(), r.stop_tokens.end(), id) != r.stop_tokens.end();
        engine::TokenOut token{id, -0.25f, {}};
        std::vector<int32_t> named = r.sampling.logprob_token_ids;
        if (!named.empty() && std::find(named.begin(), named.end(), id) == named.end()) named.push_back(id);
        for (int32_t t : named) token.top.push_back({t, -1.0f});
        for (int32_t k = 0; named.empty() && k < r.sampling.logprobs; ++k) token.top.push_back({k, -1.0f - float(k)});
        if (!stop || r.include_stop || r.every_token)
          out.push_back(engine::Tokens{choice, {token}, stop || id == 256 ? "" : std::string(1, char(id))});
        ++usage.completion_tokens;
        if (stop) {
          end.reason = engine::FinishReason::stop_token;
          end.stop_token = id;
          break;
        }
      }
      end.usage = usage;
      const bool hidden = end.reason == engine::FinishReason::stop_token && !r.include_stop && !r.every_token;
      if (auto* last = std::get_if<engine::Tokens>(&out.back())) last->last = !hidden;
      out.push_back(end);
    }
    script.over = true;
  }

  model::ModelInfo info_;
  std::shared_ptr<const text::ChatTemplate> chat_template_ =
      *text::ChatTemplate::compile(ByteTokenizer().chat_template(), ByteTokenizer());
  std::atomic<engine::State> state_{engine::State::serving};
  text::TokenizerPtr tokenizer_ = std::make_shared<ByteTokenizer>();
  mutable std::mutex mutex_;
  std::map<std::string, engine::AdapterInfo> adapters_;
  std::condition_variable open_changed_;
  Status refusal_;
  std::map<std::pair<std::string, std::string>, std::shared_ptr<Script>> live_;
  std::atomic<int> open_{0}, made_{0}, hang_on_{-1};
};

}  // namespace kvasir::server
