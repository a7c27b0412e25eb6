// Every way a request can end, one exit: the right last event, and all pages back.
#include "tests/engine/harness.h"

namespace kvasir::engine::testing {
namespace {

using std::chrono::milliseconds;

class Endings : public ::testing::TestWithParam<int> {
 protected:
  Endings() { h.script.depth = GetParam(); }
  void TearDown() override {
    if (h.engine && h.engine->state() != State::stopped) expect_all_pages_back(*h.engine);
  }
  Harness h;
};

TEST_P(Endings, AStopTokenIsNamedCountedAndNotShown) {
  Engine& e = h.start();
  Request r = ask(5, 20);
  auto all = expected(r);
  r.stop_tokens = {all[7]};
  size_t first = size_t(std::find(all.begin(), all.end(), all[7]) - all.begin());
  Answer a = run(e, r);
  EXPECT_EQ(a.tokens[0], std::vector<int32_t>(all.begin(), all.begin() + int64_t(first)));
  EXPECT_EQ(a.finished[0].reason, FinishReason::stop_token);
  EXPECT_EQ(a.finished[0].stop_token, all[7]);
  EXPECT_EQ(a.finished[0].usage.completion_tokens, int64_t(first) + 1);
  r.every_token = true;
  EXPECT_EQ(run(e, r).tokens[0].back(), all[7]);
  r.every_token = false, r.include_stop = true;
  EXPECT_EQ(run(e, r).tokens[0].back(), all[7]);
}

TEST_P(Endings, AnOperatorsContextIsThatOfEachRequest) {
  h.options.max_context = 30;
  Engine& e = h.start();
  EXPECT_EQ(e.info().context_length, 30);
  Request r = ask(10, 20);
  EXPECT_EQ(run(e, r).finished[0].usage.completion_tokens, 20);
  EXPECT_EQ(e.stats().longest, 30);
  r.max_tokens.reset();
  EXPECT_EQ(run(e, r).finished[0].usage.completion_tokens, 20);
  r.max_tokens = 21;
  EXPECT_EQ(run(e, r).failed.field(), "max_tokens");
}

TEST_P(Endings, MinTokensForbidsTheStopTokenUntilThen) {
  Engine& e = h.start();
  Request r = ask(5, 20);
  r.stop_tokens = {expected(r)[0]};
  r.min_tokens = 6;
  Answer a = run(e, r);
  ASSERT_TRUE(a.complete()) << a.failed.message();
  EXPECT_GE(a.finished[0].usage.completion_tokens, 6);
  for (int32_t t : a.tokens[0]) EXPECT_NE(t, r.stop_tokens[0]);
}

TEST_P(Endings, OnlyAllowedTokensAreDrawn) {
  Engine& e = h.start();
  Request r = ask(5, 20);
  r.allowed_tokens = {3, 40, 41};
  r.stop_tokens = {3};
  r.min_tokens = 6;
  r.sampling.logit_bias = {{50, 100.0f}};  // allows nothing by itself
  Answer a = run(e, r);
  ASSERT_TRUE(a.complete()) << a.failed.message();
  EXPECT_GE(a.finished[0].usage.completion_tokens, 6);
  for (int32_t t : a.tokens[0]) EXPECT_TRUE(t == 40 || t == 41) << t;
  r.stop_tokens.clear();
  r.ignore_eos = true;
  r.allowed_tokens = {40};
  EXPECT_EQ(run(e, r).tokens[0], std::vector<int32_t>(20, 40));  // nothing that ends it is allowed
  r.stop_tokens = {40};
  EXPECT_EQ(run(e, r).failed.field(), "allowed_token_ids");
  r.min_tokens = 0;
  EXPECT_EQ(run(e, r).finished[0].reason, FinishReason::stop_token);
}

TEST_P(Endings, CancelledWhileRunning) {
  h.script.step = std::chrono::microseconds(500);
  Engine& e = h.start();
  auto stream = std::move(*e.submit(ask(5, 3000)));
  Answer a;
  while (a.tokens.empty()) take(a, *stream->next());
  stream->cancel();
  while (auto event = stream->next()) take(a, std::move(*event));
  ASSERT_EQ(a.finished.size(), 1u);
  EXPECT_EQ(a.finished[0].reason, FinishReason::cancelled);
  EXPECT_TRUE(a.finished[0].last);
  EXPECT_EQ(e.stats().cancelled, 1);
}

TEST_P(Endings, CancelledByIdOnlyByItsTenant) {
  h.script.step = std::chrono::microseconds(500);
  Engine& e = h.start();
  Request r = ask(5, 3000);
  r.id = "mine";
  r.tenant = "a";
  auto stream = std::move(*e.submit(r));
  EXPECT_FALSE(e.cancel("b", "mine"));
  EXPECT_FALSE(e.cancel("a", "other"));
  EXPECT_TRUE(e.cancel("a", "mine"));
  Answer a = read(*stream);
  EXPECT_EQ(a.finished[0].reason, FinishReason::cancelled);
  EXPECT_TRUE(eventually([&] { return !e.cancel("a", "mine"); }));
}

TEST_P(Endings, AnIdInUseIsRefusedAndFreeAgainAfterwards) {
  h.script.step = std::chrono::microseconds(500);
  Engine& e = h.start();
  Request r = ask(5, 2000);
  r.id = "x";
  auto first = std::move(*e.submit(r));
  EXPECT_EQ(e.submit(r).status().code(), Code::already_exists);
  Request other = r;
  other.tenant = "t";
  other.max_tokens = 1;
  EXPECT_TRUE(run(e, other).complete());
  first->cancel();
  read(*first);
  r.max_tokens = 1;
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(run(e, r).complete()) << i;  // at once, with the last event just read
}

TEST_P(Endings, DroppingTheStreamCancels) {
  h.script.step = std::chrono::microseconds(500);
  Engine& e = h.start();
  e.submit(ask(5, 3000))->reset();
  EXPECT_TRUE(eventually([&] { return e.stats().cancelled == 1; }));
}

TEST_P(Endings, ADeadlineThatPassesWhileRunning) {
  h.script.step = std::chrono::microseconds(1000);
  Engine& e = h.start();
  Request r = ask(5, 4000);
  r.ignore_eos = false;  // it might end early, so that no estimate refuses it at once
  Answer a;
  // On a machine that sleeps through the whole time nothing runs: then with more of it.
  for (auto time = milliseconds(80); a.tokens.empty() && time < milliseconds(4000); time *= 2) {
    r.deadline = std::chrono::steady_clock::now() + time;
    a = run(e, r);
    EXPECT_EQ(a.failed.code(), Code::deadline_exceeded);
  }
  EXPECT_FALSE(a.tokens.empty());
}

TEST_P(Endings, ADeadlineInThePastOrWhileWaiting) {
  h.options.max_running = 1;
  h.script.step = std::chrono::microseconds(1000);
  Engine& e = h.start();
  auto busy = std::move(*e.submit(ask(5, 4000)));
  Request r = ask(5, 10);
  r.deadline = std::chrono::steady_clock::now() - milliseconds(1);
  EXPECT_EQ(run(e, r).failed.code(), Code::deadline_exceeded);
  r.deadline = std::chrono::steady_clock::now() + milliseconds(50);
  EXPECT_EQ(run(e, r).failed.code(), Code::deadline_exceeded);
}

TEST_P(Endings, BadLogitsFailThatRequestOnly) {
  h.script.poison = 777;
  Engine& e = h.start();
  Request good = ask(6, 30, 1), bad = ask(6, 30, 2);
  bad.prompt[3] = 777;
  auto s1 = std::move(*e.submit(good)), s2 = std::move(*e.submit(bad));
  Answer a1 = read(*s1), a2 = read(*s2);
  EXPECT_EQ(a1.tokens[0], expected(good));
  EXPECT_EQ(a2.failed.code(), Code::internal);
  EXPECT_EQ(e.stats().failed, 1);
  EXPECT_EQ(e.stats().errors.at("INTERNAL"), 1);
}

TEST_P(Endings, AStepThatBreaksFailsItsRequestsAndTheNextOnesRun) {
  Engine& e = h.start();
  for (auto* fault : {&h.script.break_launch, &h.script.break_wait}) {
    *fault = true;
    EXPECT_EQ(run(e, ask(6, 30)).failed.code(), Code::internal);
    Request r = ask(6, 30, 3);
    EXPECT_EQ(run(e, r).tokens[0], expected(r));
  }
}

TEST_P(Endings, MaxTokensZeroIsThePromptOnly) {
  Engine& e = h.start();
  Answer a = run(e, ask(9, 0));
  ASSERT_TRUE(a.complete()) << a.failed.message();
  EXPECT_TRUE(a.tokens.empty());
  EXPECT_EQ(a.finished[0].reason, FinishReason::length);
  EXPECT_EQ(a.finished[0].usage.completion_tokens, 0);
}

TEST_P(Endings, MaxTokensZeroEndsEachChoice) {
  Engine& e = h.start();
  Request r = ask(9, 0);
  r.n = 3;
  r.id = "alone";
  for (int round = 0; round < 2; ++round) {  // the id is free again
    Answer a = run(e, r);
    ASSERT_EQ(a.finished.size(), 3u) << a.failed.message();
    for (int32_t c = 0; c < 3; ++c) EXPECT_EQ(a.finished[size_t(c)].choice, c);
    EXPECT_TRUE(a.complete());
  }
  expect_all_pages_back(e);
}

TEST_P(Endings, UnsetMaxTokensGoesToTheContext) {
  h.script.context = 60;
  Engine& e = h.start();
  Request r = ask(9, 0);
  r.max_tokens.reset();
  EXPECT_EQ(run(e, r).tokens[0].size(), 51u);
}

TEST_P(Endings, AStormOfCancels) {
  h.script.step = std::chrono::microseconds(200);
  h.pages(200);
  Engine& e = h.start();
  std::vector<std::thread> clients;
  std::atomic<int> wrong{0};
  for (int c = 0; c < 6; ++c)
    clients.emplace_back([&, c] {
      for (int32_t i = 0; i < 60; ++i) {
        Request r = ask(1 + (i * 13 + c * 7) % 60, 1 + (i * 5) % 40, c * 100 + i % 9);
        r.n = 1 + i % 3;
        r.sampling.temperature = 1;
        r.sampling.seed = uint64_t(i);
        auto submitted = e.submit(r);
        if (!submitted.ok()) continue;
        auto stream = std::move(*submitted);
        if (i % 3 == 0) {
          stream.reset();  // a client that hangs up
          continue;
        }
        if (i % 3 == 1) stream->cancel();
        Answer a = read(*stream);
        if (a.finished.empty() || !a.finished.back().last) ++wrong;
        for (int32_t n = 0; n < r.n && i % 3 == 2; ++n)
          if (a.tokens[size_t(n)] != expected(r, n)) ++wrong;
      }
    });
  for (auto& t : clients) t.join();
  EXPECT_EQ(wrong, 0);
}

INSTANTIATE_TEST_SUITE_P(Depth, Endings, ::testing::Values(1, 2));

}  // namespace
}  // namespace kvasir::engine::testing
