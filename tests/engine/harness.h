// An engine over a FakeRunner, and the answers it must give.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/engine.h"
#include "tests/engine/fake_runner.h"

namespace kvasir::engine::testing {

inline constexpr int32_t kPage = 4;

struct Harness {
  FakeRunner::Script script, draft_script;
  bool with_draft = false;
  EngineOptions options;
  std::shared_ptr<text::GrammarCompiler> grammars;  // null: none
  std::unique_ptr<Engine> engine;

  Harness() {
    options.page_size = kPage;
    options.kv_memory = 4096 * 64;  // 4096 tokens
    options.max_tokens_per_step = 64;
    options.max_running = 16;
  }
  ~Harness() { engine.reset(); }
  void pages(int64_t n) { options.kv_memory = n * kPage * 64; }
  Engine& start() {
    engine = Engine::start(
        [this](const LoadProgress& progress) -> Result<Loaded> {
          progress("making it up", 0.5);
          Loaded loaded;
          loaded.runner = std::make_unique<FakeRunner>(script, kPage, options.kv_index);
          loaded.grammars = grammars;
          if (with_draft) loaded.draft = std::make_unique<FakeRunner>(draft_script, kPage);
          return loaded;
        },
        options);
    Status ready = engine->wait_ready();
    EXPECT_TRUE(ready.ok()) << ready.message();
    return *engine;
  }
};

// A request without text; the prompt is `length` tokens that depend on `salt`.
inline Request ask(int32_t length, int64_t max_tokens, int32_t salt = 0) {
  Request r;
  for (int32_t i = 0; i < length; ++i) r.prompt.push_back((i * 7 + salt * 131 + 3) % kVocab);
  r.max_tokens = max_tokens;
  r.detokenize = false;
  r.ignore_eos = true;
  r.sampling.temperature = 0;
  return r;
}

inline std::vector<int32_t> expected(const Request& r, int32_t choice = 0) {
  std::vector<int32_t> tokens = r.prompt;
  for (int64_t i = 0; i < r.max_tokens.value_or(0); ++i) tokens.push_back(draw_from(tokens, r.sampling, choice));
  return {tokens.begin() + int64_t(r.prompt.size()), tokens.end()};
}

struct Answer {
  std::optional<Started> started;
  std::vector<std::vector<int32_t>> tokens;  // by choice
  std::vector<std::vector<float>> logprobs;  // of the tokens
  std::vector<Finished> finished;
  Status failed;
  bool complete() const { return failed.ok() && !finished.empty() && finished.back().last; }
};

inline void take(Answer& a, Event event) {
  if (auto* started = std::get_if<Started>(&event)) a.started = std::move(*started);
  if (auto* tokens = std::get_if<Tokens>(&event)) {
    const auto c = size_t(tokens->choice);
    if (a.tokens.size() <= c) a.tokens.resize(c + 1), a.logprobs.resize(c + 1);
    for (const TokenOut& t : tokens->tokens) a.tokens[c].push_back(t.id), a.logprobs[c].push_back(t.logprob);
  }
  if (auto* finished = std::get_if<Finished>(&event)) a.finished.push_back(std::move(*finished));
  if (auto* failed = std::get_if<Failed>(&event)) a.failed = failed->status;
}

inline Answer read(Stream& stream) {
  Answer a;
  while (auto event = stream.next()) take(a, std::move(*event));
  return a;
}

inline Answer run(Engine& engine, Request request) {
  auto stream = engine.submit(std::move(request));
  if (!stream.ok()) {
    Answer a;
    a.failed = stream.status();
    return a;
  }
  return read(**stream);
}

// Waits for something that other threads bring about; false when it does not come.
template <class F>
bool eventually(F condition, std::chrono::milliseconds limit = std::chrono::seconds(60)) {
  for (auto until = std::chrono::steady_clock::now() + limit; std::chrono::steady_clock::now() < until;) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return condition();
}

inline void expect_all_pages_back(Engine& engine) {
  EXPECT_TRUE(eventually([&] {
    Stats s = engine.stats();
    return s.running == 0 && s.waiting == 0 && s.pages_free + s.pages_cached == s.pages_total;
  }));
}

}  // namespace kvasir::engine::testing
