// Models whose layers keep a state a sequence, served from a GPU: two steps in flight, decodes as graphs. The same
// answers alone and beside others, in pieces, computed again, and from where a state was kept.
#include "tests/engine/near_lines.h"
#include "tests/model/architectures.h"
#include "tests/model/cuda_case.h"

namespace kvasir::engine::testing {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using RecurrentCuda = model::NeedsDevice;

constexpr double kNear = 0.1;  // what rounding to bfloat16 does to the stored networks' log-probabilities
constexpr int32_t kPrompt = 50, kAnswer = 40;

EngineOptions plenty() {
  EngineOptions o;
  o.page_size = 8;
  o.max_running = 16;
  o.max_tokens_per_step = 256;
  o.kv_memory = 64 << 20;
  o.max_draft = 0, o.max_step_ms = 0;
  return o;
}

std::unique_ptr<Engine> serve(const std::string& model, const EngineOptions& options) {
  model::RunnerOptions m;
  m.model = model, m.device = "cuda";
  auto engine = Engine::start(m, options);
  EXPECT_TRUE(engine->wait_ready().ok()) << engine->wait_ready().message();
  return engine;
}

Request prompt_of(int32_t salt, int32_t length = kPrompt) {
  Request r = ask(length, kAnswer, salt);
  for (int32_t& t : r.prompt) t = 4 + t % 250;
  r.sampling.logprobs = 2;
  return r;
}

std::vector<Line> at_once(Engine& engine, int32_t requests) {
  std::vector<std::unique_ptr<Stream>> streams;
  for (int32_t i = 0; i < requests; ++i) streams.push_back(std::move(*engine.submit(prompt_of(i))));
  std::vector<Line> out;
  for (auto& stream : streams) out.push_back(line(*stream));
  return out;
}

// f(folder) for each stored network that has states.
void each_network(const std::function<void(const std::string& folder)>& f) {
  const json all = model::fixture("architectures.json");
  int served = 0;
  for (const json& one : all["cases"]) {
    if (!one["configs"][0].contains("linear_num_key_heads")) continue;
    SCOPED_TRACE(one["name"].get<std::string>());
    const model::Folder folder("recurrent-cuda");
    model::StoredNetwork(one).write_folder(folder);
    f(folder.path.string()), ++served;
  }
  EXPECT_GE(served, 4);
}

TEST_F(RecurrentCuda, TheSameTokensWhicheverWay) {
  each_network([](const std::string& model) {
    std::vector<Line> alone;
    EngineOptions o = plenty();
    o.prefix_cache = false;
    {
      auto engine = serve(model, o);
      for (int32_t i = 0; i < 6; ++i) alone.push_back(line(**engine->submit(prompt_of(i))));
      EXPECT_NE(alone[0].tokens, alone[1].tokens);
    }
    size_t same = 0, tokens = 0;
    auto expect_same = [&](const EngineOptions& options, bool preempts) {
      auto engine = serve(model, options);
      const std::vector<Line> six = at_once(*engine, 6);
      for (size_t i = 0; i < six.size(); ++i) same += compare(six[i], alone[i].tokens, kNear), tokens += kAnswer;
      EXPECT_EQ(engine->stats().preemptions > 0, preempts);
      expect_all_pages_back(*engine);
    };
    expect_same(o, false);
    EngineOptions pieces = o;
    pieces.max_tokens_per_step = 24;
    expect_same(pieces, false);
    pieces.kv_index = kvcache::IndexMode::token_table;
    expect_same(pieces, false);
    EngineOptions few = o;  // two at a time, and pages for one and a half
    few.max_running = 2;
    {
      auto engine = serve(model, o);
      const auto& info = engine->info();
      few.kv_memory = 2 * info.state_bytes + 19 * info.kv_bytes_per_token * few.page_size;
      if (few.kv_memory < 4 * info.state_bytes) few.kv_memory = 0;
    }
    if (few.kv_memory > 0) expect_same(few, true);
    printf("%zu of %zu tokens are the same\n", same, tokens);
    EXPECT_GT(same, tokens / 2);
  });
}

// With two steps in flight a state is kept, too, before the sequence goes on.
TEST_F(RecurrentCuda, APrefixIsOfUseWhereAStateWasKept) {
  each_network([](const std::string& model) {
    auto engine = serve(model, plenty());
    auto cached = [&](const Request& r, Line* out) {
      auto stream = std::move(*engine->submit(r));
      int64_t cached = -1;
      while (auto event = stream->next()) {
        if (auto* started = std::get_if<Started>(&*event)) cached = started->cached_tokens;
        auto* tokens = std::get_if<Tokens>(&*event);
        for (size_t i = 0; tokens && i < tokens->tokens.size(); ++i) {
          const TokenOut& t = tokens->tokens[i];
          out->tokens.push_back(t.id), out->margins.push_back(t.top[0].logprob - t.top[1].logprob);
        }
      }
      return cached;
    };
    Line cold, again, turn, fresh;
    EXPECT_EQ(cached(prompt_of(0), &cold), 0);
    EXPECT_EQ(cached(prompt_of(0), &again), 48);
    compare(again, cold.tokens, kNear);
    Request next = prompt_of(0);
    next.prompt.insert(next.prompt.end(), {9, 8, 7, 6, 5});
    EXPECT_EQ(cached(next, &turn), 48);
    ASSERT_TRUE(engine->flush_prefix_cache().ok());
    EXPECT_EQ(cached(next, &fresh), 0);
    compare(turn, fresh.tokens, kNear);
    expect_all_pages_back(*engine);
  });
}

TEST_F(RecurrentCuda, ChoicesAndBeamsGoOnFromTheStateOfTheirPrompt) {
  each_network([](const std::string& model) {
    auto engine = serve(model, plenty());
    const Line one = line(**engine->submit(prompt_of(3)));
    Request r = prompt_of(3);
    r.n = 5;
    const Answer greedy = run(*engine, r);
    ASSERT_TRUE(greedy.complete()) << greedy.failed.message();
    ASSERT_EQ(greedy.tokens.size(), 5u);
    for (const auto& tokens : greedy.tokens) compare(one, tokens, kNear);
    r.n = 3;
    r.beams = BeamOptions{3, 0.0f, BeamOptions::Early::never};
    const Answer beams = run(*engine, r);
    ASSERT_TRUE(beams.complete()) << beams.failed.message();
    for (const Finished& f : beams.finished) {
      const auto& tokens = beams.tokens[size_t(f.choice)];
      Request longer = prompt_of(3);
      longer.prompt.insert(longer.prompt.end(), tokens.begin(), tokens.end());
      longer.max_tokens = 0, longer.prompt_logprobs = 0;
      const Answer scored = run(*engine, longer);
      ASSERT_TRUE(scored.complete()) << scored.failed.message();
      double sum = 0;
      for (size_t i = 0; i < tokens.size(); ++i)
        sum += double(scored.started->prompt_logprobs[size_t(kPrompt) + i].logprob);
      ASSERT_TRUE(f.score.has_value());
      EXPECT_NEAR(*f.score, sum, kNear / 2 * double(tokens.size()));  // experts that are nearly as good may change
    }
    expect_all_pages_back(*engine);
  });
}

TEST_F(RecurrentCuda, WhatAStateCannotDoIsRefusedByName) {
  const std::string model = "dummy:qwen3_5,layers=4,hidden=64,heads=4,kv_heads=2,head_dim=32,ffn=64,vocab=300";
  auto refusal = [&](const std::function<void(model::RunnerOptions&, EngineOptions&)>& change) {
    model::RunnerOptions m;
    m.model = model, m.device = "cuda";
    EngineOptions o = plenty();
    change(m, o);
    return Engine::start(m, o)->wait_ready().message();
  };
  EXPECT_THAT(refusal([](auto&, EngineOptions& o) { o.host_kv_memory = 1 << 20; }), HasSubstr("host_kv_memory"));
  EXPECT_THAT(refusal([&](auto&, EngineOptions& o) { o.max_draft = 4, o.draft_model = model; }),
              HasSubstr("draft_model is dummy:qwen3_5"));
  EXPECT_THAT(refusal([](model::RunnerOptions& m, auto&) { m.attention_window = 64; }), HasSubstr("attention_window"));
  if (model::devices() > 1) {
    EXPECT_THAT(refusal([](model::RunnerOptions& m, auto&) { m.ranks = 2; }), HasSubstr("ranks is 2"));
  }
}

}  // namespace
}  // namespace kvasir::engine::testing
