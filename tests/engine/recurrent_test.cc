// Models whose layers keep a state a sequence: the same tokens whichever way a request travels, each slot back at the
// end, and what such a model cannot have refused by its name.
#include "tests/engine/real_case.h"

namespace kvasir::engine::testing {
namespace {

using ::testing::HasSubstr;
using Ids = std::vector<int32_t>;

constexpr const char* kDense =
    "dummy:qwen3_5,layers=4,hidden=64,heads=4,kv_heads=2,head_dim=32,ffn=64,vocab=300,type=f32,step_ms=1";
constexpr const char* kExperts =
    "dummy:qwen3_next,layers=4,hidden=64,heads=4,kv_heads=2,head_dim=32,ffn=64,experts=4,experts_used=2,expert_ffn=32,"
    "shared_ffn=32,vocab=300,type=f32,step_ms=1";

std::unique_ptr<Engine> serve(const Case& c) {
  model::RunnerOptions m;
  m.model = c.model, m.threads = c.threads;
  auto engine = Engine::start(m, c.options);
  const Status ready = engine->wait_ready();
  EXPECT_TRUE(ready.ok()) << ready.message();
  return engine;
}

Request prompt_of(int32_t length, int64_t output, int32_t salt = 0) {
  Request r = ask(length, output, salt);
  for (int32_t& t : r.prompt) t = 4 + t % 250;
  return r;
}

TEST(Recurrent, TheSameTokensWhicheverWay) {
  for (const char* model : {kDense, kExperts}) {
    SCOPED_TRACE(model);
    const Case c(model);
    const Ran eight = c.run(8, 40, 60);
    ASSERT_EQ(eight.tokens.size(), 8u);
    EXPECT_EQ(eight.stats.preemptions, 0);
    EXPECT_NE(eight.tokens[0], eight.tokens[1]);
    EXPECT_EQ(c.run(1, 40, 60).tokens[0], eight.tokens[0]) << "alone";
    Case two = c;
    two.threads = 2, two.options.max_tokens_per_step = 24;
    EXPECT_EQ(two.run(8, 40, 60).tokens, eight.tokens) << "two threads, prompts in pieces of 8 to 24 tokens";
    Case table = c;
    table.options.kv_index = kvcache::IndexMode::token_table;
    EXPECT_EQ(table.run(8, 40, 60).tokens, eight.tokens) << "token table";
    Case offset = c;
    offset.options.kv_index = kvcache::IndexMode::offset, offset.options.prefix_cache = false;
    EXPECT_EQ(offset.run(8, 40, 60).tokens, eight.tokens) << "offset";
  }
}

// States have at most half of the memory, and pages what is left: here 19 for two sequences at a time that grow to 13.
TEST(Recurrent, TheSameTokensWhenPreempted) {
  const Case c("dummy:qwen3_5,layers=2,hidden=64,heads=4,kv_heads=2,head_dim=32,ffn=64,vocab=300,type=f32,step_ms=1");
  const Ran six = c.run(6, 40, 60);
  const int64_t state = serve(c)->info().state_bytes;
  ASSERT_GT(state, 0);
  Case few = c;
  few.options.max_running = 2, few.options.prefix_cache = false;
  few.options.kv_memory = 2 * state + 19 * six.bytes_per_token * c.options.page_size;
  ASSERT_GE(few.options.kv_memory, 4 * state) << "or one would run alone";
  const Ran again = few.run(6, 40, 60);
  EXPECT_GT(again.stats.preemptions, 0);
  EXPECT_EQ(again.tokens, six.tokens);
  few.options.prefix_cache = true, few.options.kv_memory += 2 * state;  // and a prompt's
  EXPECT_EQ(few.run(6, 40, 60).tokens, six.tokens);
}

// A state is kept at the end of a prompt, in whole pages of 8, and where two have parted.
TEST(Recurrent, APrefixIsOfUseWhereAStateWasKept) {
  auto engine = serve(Case(kDense));
  const Answer cold = run(*engine, prompt_of(50, 10)), again = run(*engine, prompt_of(50, 10));
  ASSERT_TRUE(cold.complete() && again.complete());
  EXPECT_EQ(cold.started->cached_tokens, 0);
  EXPECT_EQ(again.started->cached_tokens, 48);
  EXPECT_EQ(again.tokens, cold.tokens);
  Request next = prompt_of(50, 10);  // a conversation's next turn
  next.prompt.insert(next.prompt.end(), cold.tokens[0].begin(), cold.tokens[0].end());
  next.prompt.push_back(9);
  const Answer turn = run(*engine, next);
  EXPECT_EQ(turn.started->cached_tokens, 48);
  auto parting = [](int32_t with) {
    Request r = prompt_of(50, 10);
    for (size_t i = 37; i < r.prompt.size(); ++i) r.prompt[i] = 4 + (r.prompt[i] + with) % 250;
    return r;
  };
  EXPECT_EQ(run(*engine, parting(1)).started->cached_tokens, 0) << "no state is kept where it parts";
  const Answer second = run(*engine, parting(2));
  EXPECT_EQ(second.started->cached_tokens, 32) << "the one before has kept it";
  ASSERT_TRUE(engine->flush_prefix_cache().ok());
  const Answer fresh = run(*engine, parting(2)), whole = run(*engine, next);
  EXPECT_EQ(fresh.started->cached_tokens, 0);
  EXPECT_EQ(fresh.tokens, second.tokens);
  EXPECT_EQ(whole.tokens, turn.tokens);
  expect_all_pages_back(*engine);
}

TEST(Recurrent, WithoutAPrefixCacheNothingIsKept) {
  Case c(kDense);
  c.options.prefix_cache = false;
  auto engine = serve(c);
  const Answer cold = run(*engine, prompt_of(50, 10)), again = run(*engine, prompt_of(50, 10));
  ASSERT_TRUE(cold.complete() && again.complete());
  EXPECT_EQ(again.started->cached_tokens, 0);
  EXPECT_EQ(again.tokens, cold.tokens);
  expect_all_pages_back(*engine);
}

TEST(Recurrent, ChoicesGoOnFromTheStateOfTheirPrompt) {
  auto engine = serve(Case(kDense));
  const Answer one = run(*engine, prompt_of(43, 20));
  ASSERT_TRUE(one.complete());
  Request r = prompt_of(43, 20);
  r.n = 5;
  const Answer greedy = run(*engine, r);
  ASSERT_TRUE(greedy.complete()) << greedy.failed.message();
  ASSERT_EQ(greedy.tokens.size(), 5u);
  for (const Ids& tokens : greedy.tokens) EXPECT_EQ(tokens, one.tokens[0]);
  r.sampling.temperature = 1, r.sampling.seed = 3;
  const Answer drawn = run(*engine, r);
  ASSERT_TRUE(drawn.complete());
  EXPECT_NE(drawn.tokens[1], drawn.tokens[2]);
  // Each choice by itself: a prompt that goes on with what it drew first has the same greedy end.
  for (const Ids& tokens : drawn.tokens) {
    Request longer = prompt_of(43, 0);
    longer.prompt.insert(longer.prompt.end(), tokens.begin(), tokens.end());
    longer.max_tokens = 0, longer.prompt_logprobs = 0;
    const Answer scored = run(*engine, longer);
    ASSERT_TRUE(scored.complete()) << scored.failed.message();
    ASSERT_EQ(scored.started->prompt_logprobs.size(), 43 + tokens.size());
    for (size_t i = 0; i < tokens.size(); ++i)
      EXPECT_EQ(scored.started->prompt_logprobs[43 + i].logprob,
                drawn.logprobs[size_t(&tokens - drawn.tokens.data())][i]);
  }
  expect_all_pages_back(*engine);
}

// Beams take over one another's states. Greedy is a beam of one; of more, each answer scores as it says.
TEST(Recurrent, BeamsTakeOverStates) {
  auto engine = serve(Case(kDense));
  Request r = prompt_of(21, 12);
  r.n = 3;
  r.beams = BeamOptions{3, 0.0f, BeamOptions::Early::never};
  const Answer a = run(*engine, r), again = run(*engine, r);
  ASSERT_TRUE(a.complete()) << a.failed.message();
  EXPECT_EQ(a.tokens, again.tokens);
  for (const Finished& f : a.finished) {
    const Ids& tokens = a.tokens[size_t(f.choice)];
    Request longer = prompt_of(21, 0);
    longer.prompt.insert(longer.prompt.end(), tokens.begin(), tokens.end());
    longer.max_tokens = 0, longer.prompt_logprobs = 0;
    const Answer scored = run(*engine, longer);
    ASSERT_TRUE(scored.complete());
    double sum = 0;
    for (size_t i = 0; i < tokens.size(); ++i) sum += double(scored.started->prompt_logprobs[21 + i].logprob);
    ASSERT_TRUE(f.score.has_value());
    EXPECT_NEAR(*f.score, sum, 1e-3);
  }
  expect_all_pages_back(*engine);
}

TEST(Recurrent, WhoIsCancelledGivesItsStateBack) {
  Case c(kDense);
  c.options.max_running = 2;  // of more than two the slots would not go round
  auto engine = serve(c);
  const Answer alone = run(*engine, prompt_of(30, 20));
  ASSERT_TRUE(alone.complete());
  for (int round = 0; round < 4; ++round) {
    std::vector<std::unique_ptr<Stream>> streams;
    for (int32_t i = 0; i < 4; ++i) streams.push_back(std::move(*engine->submit(prompt_of(30, 200, i))));
    EXPECT_TRUE(eventually([&] { return engine->stats().running > 0; }));
    for (auto& stream : streams) stream->cancel();
    for (auto& stream : streams)
      for (const Finished& f : read(*stream).finished) EXPECT_EQ(f.reason, FinishReason::cancelled);
    expect_all_pages_back(*engine);
  }
  EXPECT_EQ(run(*engine, prompt_of(30, 20)).tokens, alone.tokens);
}

TEST(Recurrent, FewerRunWhereTheirStatesWouldHaveMostOfTheMemory) {
  Case c(kDense);
  auto engine = serve(c);
  const int64_t state = engine->info().state_bytes;
  engine.reset();
  const Ran eight = c.run(8, 20, 30);
  c.options.kv_memory = 7 * state;  // 3 of 16
  const Ran few = c.run(8, 20, 30);
  EXPECT_EQ(few.tokens, eight.tokens);
  EXPECT_LE(few.stats.batch_size.sum, 3.0 * double(few.stats.steps));
  c.options.kv_memory = state;
  model::RunnerOptions m;
  m.model = c.model, m.threads = 1;
  EXPECT_THAT(Engine::start(m, c.options)->wait_ready().message(), HasSubstr("the state of a sequence"));
}

// What serving this model with these options says.
std::string refusal(const std::function<void(model::RunnerOptions&, EngineOptions&)>& change) {
  Case c(kDense);
  model::RunnerOptions m;
  m.model = c.model, m.threads = 2;
  change(m, c.options);
  return Engine::start(m, c.options)->wait_ready().message();
}

TEST(Recurrent, WhatAStateCannotDoIsRefusedByName) {
  EXPECT_THAT(refusal([](auto&, EngineOptions& o) { o.host_kv_memory = 1 << 20; }), HasSubstr("host_kv_memory"));
  EXPECT_THAT(refusal([](auto&, EngineOptions& o) { o.max_draft = 4, o.draft_model = kDense; }),
              HasSubstr("draft_model is dummy:qwen3_5"));
  EXPECT_THAT(refusal([](model::RunnerOptions& m, EngineOptions& o) {
                m.model = "dummy:llama,vocab=300", o.max_draft = 4, o.draft_model = kDense;
              }),
              HasSubstr("it keeps a state a sequence"));
  EXPECT_THAT(refusal([](model::RunnerOptions& m, auto&) { m.attention_window = 64; }), HasSubstr("attention_window"));
  EXPECT_THAT(refusal([](model::RunnerOptions& m, auto&) { m.ranks = 2; }), HasSubstr("ranks is 2"));
}

}  // namespace
}  // namespace kvasir::engine::testing
