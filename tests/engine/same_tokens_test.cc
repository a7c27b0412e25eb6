// The same tokens whichever way a request travels: alone, batched, chunked, cached, preempted, two deep.
#include "tests/engine/harness.h"

namespace kvasir::engine::testing {
namespace {

class SameTokens : public ::testing::TestWithParam<int> {
 protected:
  SameTokens() { h.script.depth = GetParam(); }
  Harness h;
};

TEST_P(SameTokens, Alone) {
  Engine& e = h.start();
  Request r = ask(5, 20);
  Answer a = run(e, r);
  ASSERT_TRUE(a.complete()) << a.failed.message();
  EXPECT_EQ(a.tokens[0], expected(r));
  EXPECT_EQ(a.finished[0].reason, FinishReason::length);
  EXPECT_EQ(a.finished[0].usage.prompt_tokens, 5);
  EXPECT_EQ(a.finished[0].usage.completion_tokens, 20);
  expect_all_pages_back(e);
}

TEST_P(SameTokens, ManyAtOnceWithPromptsInChunks) {
  Engine& e = h.start();
  std::vector<Request> requests;
  std::vector<std::unique_ptr<Stream>> streams;
  for (int32_t i = 0; i < 40; ++i) {
    requests.push_back(ask(1 + i * 5, 1 + i % 13, i));  // up to 196 tokens: four chunks of 64
    auto stream = e.submit(requests.back());
    ASSERT_TRUE(stream.ok()) << stream.status().message();
    streams.push_back(std::move(*stream));
  }
  for (size_t i = 0; i < streams.size(); ++i) {
    Answer a = read(*streams[i]);
    ASSERT_TRUE(a.complete()) << i << ": " << a.failed.message();
    EXPECT_EQ(a.tokens[0], expected(requests[i])) << i;
  }
  expect_all_pages_back(e);
}

TEST_P(SameTokens, WithAPrefixHit) {
  Engine& e = h.start();
  Request r = ask(50, 10);
  Answer cold = run(e, r), warm = run(e, r);
  EXPECT_EQ(cold.started->cached_tokens, 0);
  EXPECT_GE(warm.started->cached_tokens, 44);
  EXPECT_LT(warm.started->cached_tokens, 50);
  EXPECT_EQ(cold.tokens[0], expected(r));
  EXPECT_EQ(warm.tokens[0], expected(r));
  EXPECT_EQ(warm.finished[0].usage.cached_tokens, warm.started->cached_tokens);

  Request longer = r;  // a conversation's next turn
  longer.prompt.insert(longer.prompt.end(), cold.tokens[0].begin(), cold.tokens[0].end());
  longer.prompt.push_back(9);
  Answer next = run(e, longer);
  EXPECT_GE(next.started->cached_tokens, 52);
  EXPECT_EQ(next.tokens[0], expected(longer));
  expect_all_pages_back(e);
  const Stats stats = e.stats();
  EXPECT_EQ(stats.handled_tokens.sum, double(stats.prompt_tokens) + stats.output_length.sum);
  EXPECT_EQ(stats.handled_tokens.count, stats.step_tokens.count);
  EXPECT_GT(stats.cached_tokens, 0);
}

TEST_P(SameTokens, AnotherTenantHasNoPrefixHit) {
  Engine& e = h.start();
  Request r = ask(50, 4);
  run(e, r);
  r.tenant = "another";
  Answer a = run(e, r);
  EXPECT_EQ(a.started->cached_tokens, 0);
  EXPECT_EQ(a.tokens[0], expected(r));
}

TEST_P(SameTokens, WhenPreempted) {
  h.pages(40);  // 160 tokens for 8 sequences that grow to 60 each
  h.options.prefix_cache = false;
  std::atomic<bool> all_here{false};  // no step before: or the first would be done when the last comes
  h.script.before = [&](uint64_t) {
    while (!all_here) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  Engine& e = h.start();
  std::vector<Request> requests;
  std::vector<std::unique_ptr<Stream>> streams;
  for (int32_t i = 0; i < 8; ++i) {
    requests.push_back(ask(10, 50, i));
    streams.push_back(std::move(*e.submit(requests.back())));
  }
  all_here = true;
  for (size_t i = 0; i < streams.size(); ++i) {
    Answer a = read(*streams[i]);
    ASSERT_TRUE(a.complete()) << i << ": " << a.failed.message();
    EXPECT_EQ(a.tokens[0], expected(requests[i])) << i;
  }
  EXPECT_GT(e.stats().preemptions, 0);
  EXPECT_EQ(e.stats().preempted.sum, double(e.stats().preemptions)) << "each is some request's";
  EXPECT_EQ(e.stats().preempted.count, 8);
  expect_all_pages_back(e);
}

TEST_P(SameTokens, WhenPreemptedByMovingPagesToTheHost) {
  h.pages(40);
  h.options.host_kv_memory = 200 * kPage * 64;
  std::atomic<bool> all_here{false};
  h.script.before = [&](uint64_t step) {  // step 0 is the engine's own, that times a move
    while (step > 0 && !all_here) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  Engine& e = h.start();
  const int64_t timed = h.script.moves;
  EXPECT_GT(timed, 0);
  std::vector<Request> requests;
  std::vector<std::unique_ptr<Stream>> streams;
  for (int32_t i = 0; i < 8; ++i) {
    requests.push_back(ask(10, 50, i));
    streams.push_back(std::move(*e.submit(requests.back())));
  }
  all_here = true;
  for (size_t i = 0; i < streams.size(); ++i) {
    Answer a = read(*streams[i]);
    ASSERT_TRUE(a.complete()) << i << ": " << a.failed.message();
    EXPECT_EQ(a.tokens[0], expected(requests[i])) << i;
  }
  EXPECT_GT(e.stats().preemptions, 0);
  EXPECT_EQ(e.stats().preempted.sum, double(e.stats().preemptions)) << "each is some request's";
  EXPECT_EQ(e.stats().preempted.count, 8);
  EXPECT_GT(h.script.moves, timed);
  expect_all_pages_back(e);
}

TEST_P(SameTokens, WhicheverWayTheCacheIsIndexed) {
  for (auto mode : {kvcache::IndexMode::token_table, kvcache::IndexMode::offset}) {
    h.engine.reset();
    h.options.kv_index = mode;
    h.options.prefix_cache = mode != kvcache::IndexMode::offset;
    Engine& e = h.start();
    std::vector<Request> requests;
    std::vector<std::unique_ptr<Stream>> streams;
    for (int32_t i = 0; i < 20; ++i) {
      requests.push_back(ask(1 + i * 5, 1 + i % 13, i / 2));
      requests.back().n = 1 + i % 3;
      auto stream = e.submit(requests.back());
      ASSERT_TRUE(stream.ok()) << stream.status().message();
      streams.push_back(std::move(*stream));
    }
    for (size_t i = 0; i < streams.size(); ++i) {
      Answer a = read(*streams[i]);
      ASSERT_TRUE(a.complete()) << i << ": " << a.failed.message();
      for (int32_t c = 0; c < requests[i].n; ++c) EXPECT_EQ(a.tokens[size_t(c)], expected(requests[i], c)) << i;
    }
    expect_all_pages_back(e);
  }
}

TEST_P(SameTokens, SeveralChoicesOfOnePrompt) {
  Engine& e = h.start();
  Request r = ask(11, 15);
  r.n = 4;
  r.sampling.temperature = 1;
  r.sampling.seed = 42;
  Answer a = run(e, r);
  ASSERT_TRUE(a.complete()) << a.failed.message();
  ASSERT_EQ(a.tokens.size(), 4u);
  ASSERT_EQ(a.finished.size(), 4u);
  for (int32_t c = 0; c < 4; ++c) EXPECT_EQ(a.tokens[size_t(c)], expected(r, c)) << c;
  EXPECT_EQ(a.finished.back().usage.completion_tokens, 60);
  EXPECT_EQ(a.started->seed, 42u);
  expect_all_pages_back(e);
}

TEST_P(SameTokens, PenaltiesSeeTheHistory) {  // the runner checks what it is shown
  Engine& e = h.start();
  Request r = ask(6, 12);
  r.sampling.repetition_penalty = 1.5f;
  Answer a = run(e, r);
  EXPECT_EQ(a.tokens[0], expected(r));
}

TEST_P(SameTokens, PromptLogprobsAcrossChunksAndAfterACachedRun) {
  Engine& e = h.start();
  Request r = ask(150, 3);
  run(e, r);
  r.prompt_logprobs = 2;
  Answer a = run(e, r);
  ASSERT_TRUE(a.complete()) << a.failed.message();
  ASSERT_EQ(a.started->prompt_logprobs.size(), 150u);
  for (int32_t i = 0; i < 150; ++i) {
    const TokenOut& t = a.started->prompt_logprobs[size_t(i)];
    EXPECT_EQ(t.id, r.prompt[size_t(i)]);
    EXPECT_EQ(t.logprob, i == 0 ? 0.0f : -float(i));
    EXPECT_EQ(t.top.size(), i == 0 ? 0u : 2u);
  }
  EXPECT_EQ(a.tokens[0], expected(r));
  r.max_tokens = 0;  // scoring only
  Answer scored = run(e, r);
  ASSERT_TRUE(scored.complete()) << scored.failed.message();
  EXPECT_EQ(scored.started->prompt_logprobs.size(), 150u);
  EXPECT_TRUE(scored.tokens.empty());
  EXPECT_EQ(scored.finished[0].reason, FinishReason::length);
}

INSTANTIATE_TEST_SUITE_P(Depth, SameTokens, ::testing::Values(1, 2));

}  // namespace
}  // namespace kvasir::engine::testing
