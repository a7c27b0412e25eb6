// Slow readers, full queues, stuck steps, draining, and an idle engine that does nothing at all.
#include <gmock/gmock.h>
#include <sys/resource.h>

#include "tests/engine/harness.h"
#include "tests/scratch.h"

namespace kvasir::engine::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

double cpu_seconds() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

TEST(SlowReader, IsPausedThenGoesOnWhereItWas) {
  Harness h;
  h.options.event_buffer = 8;
  Engine& e = h.start();
  Request slow = ask(5, 400, 1), quick = ask(5, 400, 2);
  auto s = std::move(*e.submit(slow));
  EXPECT_TRUE(eventually([&] { return e.stats().paused == 1; }));
  int64_t tokens = e.stats().output_tokens;
  EXPECT_LT(tokens, 30);                                // the bound, and what was on its way
  EXPECT_EQ(run(e, quick).tokens[0], expected(quick));  // nobody else notices
  Answer a;
  while (auto event = s->next()) {
    take(a, std::move(*event));
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_EQ(a.tokens[0], expected(slow));
  EXPECT_TRUE(a.complete());
  expect_all_pages_back(e);
}

TEST(SlowReader, IsCutOffAfterTheLimit) {
  Harness h;
  h.options.event_buffer = 8;
  h.options.slow_reader_limit = milliseconds(100);
  Engine& e = h.start();
  auto s = std::move(*e.submit(ask(5, 4000)));
  EXPECT_TRUE(eventually([&] { return e.stats().failed == 1; }));
  expect_all_pages_back(e);
  EXPECT_EQ(read(*s).failed.code(), Code::resource_exhausted);
}

// On a machine of which nothing was known: 400 tokens of a prompt would hold up the one who decodes for 1.6 s. Steps so
// long that a busy machine's delays are little beside them: what is learned is what was slept.
TEST(StepTime, IsBoundedForThoseWhoDecode) {
  Harness h;
  h.script.step = std::chrono::milliseconds(4);
  h.script.token = std::chrono::milliseconds(4);
  h.options.max_tokens_per_step = 512;
  h.options.max_step_ms = 120;
  Engine& e = h.start();
  for (int32_t i = 10; i < 15; ++i) EXPECT_TRUE(run(e, ask(40, 5, i)).complete());  // what it learns from
  Request first = ask(8, 200, 2), second = ask(400, 4, 3);
  auto decoding = std::move(*e.submit(first));
  EXPECT_TRUE(eventually([&] { return e.stats().output_tokens > 27; }));
  EXPECT_EQ(run(e, second).tokens[0], expected(second));
  EXPECT_EQ(read(*decoding).tokens[0], expected(first));
  int64_t most = 0;
  for (const StepSample& s : e.recent_steps())
    if (s.decodes > 0) most = std::max(most, s.tokens);
  EXPECT_LE(most, 40);
  EXPECT_GE(e.stats().steps_cut, 4);
  expect_all_pages_back(e);
}

TEST(SlowReader, ThatAllAreSlowIsNotStuck) {
  Harness h;
  h.options.event_buffer = 8;
  h.options.watchdog = milliseconds(80);
  Engine& e = h.start();
  auto s = std::move(*e.submit(ask(5, 1000)));
  EXPECT_TRUE(eventually([&] { return e.stats().paused == 1; }));
  std::this_thread::sleep_for(milliseconds(300));
  EXPECT_EQ(e.state(), State::serving);
}

TEST(Queue, ARequestOverTheBoundIsRefusedAtOnceWithATimeToTryAgain) {
  Harness h;
  h.options.max_running = 1;
  h.options.max_waiting = 4;
  h.script.step = std::chrono::microseconds(2000);
  Engine& e = h.start();
  std::vector<std::unique_ptr<Stream>> streams;
  streams.push_back(std::move(*e.submit(ask(5, 1000))));
  EXPECT_TRUE(eventually([&] { return e.stats().running == 1; }));  // what comes now waits, and stays waiting
  Status refused;
  for (int i = 1; i < 10 && refused.ok(); ++i) {
    auto s = e.submit(ask(5, 1000, i));
    if (!s.ok()) {
      refused = s.status();
    } else {
      streams.push_back(std::move(*s));
    }
  }
  EXPECT_EQ(refused.code(), Code::resource_exhausted);
  EXPECT_EQ(streams.size(), 5u);
  EXPECT_TRUE(refused.retry_after().has_value());
  EXPECT_EQ(e.state(), State::degraded);
  streams.clear();
  EXPECT_TRUE(eventually([&] { return e.stats().waiting == 0 && e.state() == State::serving; }));
  expect_all_pages_back(e);
}

// Steps take 5 ms at least, so what a deadline leaves room for is known on any machine.
class Deadlines : public ::testing::Test {
 protected:
  Engine& start() {
    h.options.max_tokens_per_step = 64;
    h.options.max_running = 1;
    h.script.step = std::chrono::microseconds(5000);
    Engine& e = h.start();
    EXPECT_TRUE(run(e, ask(5, 40, 7)).failed.ok());  // some steps to judge by
    EXPECT_TRUE(eventually([&] { return e.recent_steps().size() >= 40; }));
    return e;
  }
  static Request in(milliseconds left, Request r) {
    r.deadline = std::chrono::steady_clock::now() + left;
    return r;
  }
  static Status refusal(Engine& e, Request r) {
    auto s = e.submit(std::move(r));
    return s.ok() ? Status() : s.status();
  }
  Harness h;
};

TEST_F(Deadlines, AnAnswerThatIsTooLongForItIsRefusedAtOnce) {
  Engine& e = start();
  int64_t before = e.stats().requests;
  Status s = refusal(e, in(milliseconds(2000), ask(5, 1000)));
  EXPECT_EQ(s.code(), Code::deadline_exceeded);
  EXPECT_THAT(s.message(), ::testing::HasSubstr("takes at least"));
  EXPECT_THAT(s.message(), ::testing::HasSubstr("after 1000 tokens"));
  EXPECT_EQ(e.stats().requests, before);
  Request may_stop = in(milliseconds(2000), ask(5, 1000));
  may_stop.ignore_eos = false;
  EXPECT_TRUE(refusal(e, may_stop).ok());
  may_stop.min_tokens = 1000;
  EXPECT_EQ(refusal(e, may_stop).code(), Code::deadline_exceeded);
  EXPECT_TRUE(refusal(e, in(std::chrono::minutes(5), ask(5, 1000))).ok());
  EXPECT_TRUE(refusal(e, ask(5, 1000)).ok());
}

// Computed, the prompt would take a quarter of a second: but it may be cached, and here it is.
TEST_F(Deadlines, APromptThatMayBeCachedIsNotRefusedForItsLength) {
  Engine& e = start();
  EXPECT_TRUE(run(e, ask(3200, 1, 3)).failed.ok());
  EXPECT_TRUE(refusal(e, in(milliseconds(150), ask(3200, 1, 3))).ok());
  Request scored = ask(3200, 1, 3);  // each of its positions is computed
  scored.prompt_logprobs = 0;
  EXPECT_EQ(refusal(e, in(milliseconds(150), scored)).code(), Code::deadline_exceeded);
}

TEST_F(Deadlines, AQueueThatIsTooLongForItIsSaidAtOnce) {
  Engine& e = start();
  std::vector<std::unique_ptr<Stream>> waiting;
  for (int i = 0; i < 40; ++i) waiting.push_back(std::move(*e.submit(ask(320, 1000, i))));
  // 39 of them wait: 12480 tokens in steps of 64 take a second at least.
  Status s = refusal(e, in(milliseconds(500), ask(5, 1, 99)));
  EXPECT_EQ(s.code(), Code::deadline_exceeded);
  EXPECT_THAT(s.message(), ::testing::HasSubstr("prompt tokens wait before its 5"));
  EXPECT_TRUE(refusal(e, in(std::chrono::minutes(5), ask(5, 1, 99))).ok());
}

TEST(Queue, TooManyPromptTokensAreRefused) {
  Harness h;
  h.options.max_running = 1;
  h.options.max_waiting_tokens = 100;
  h.script.step = std::chrono::microseconds(2000);
  Engine& e = h.start();
  auto running = std::move(*e.submit(ask(5, 1000)));
  EXPECT_TRUE(eventually([&] { return e.stats().running == 1; }));
  auto waiting = e.submit(ask(80, 10));
  ASSERT_TRUE(waiting.ok());
  EXPECT_EQ(e.submit(ask(30, 10)).status().code(), Code::resource_exhausted);
}

TEST(Queue, APromptLargerThanThePoolIsRefusedByName) {
  Harness h;
  h.pages(8);
  Engine& e = h.start();
  Answer a = run(e, ask(100, 10));
  EXPECT_FALSE(a.failed.ok());
  EXPECT_NE(a.failed.code(), Code::internal) << a.failed.message();
  expect_all_pages_back(e);
}

TEST(Watchdog, AStuckStepIsReportedInTimeAndForgottenWhenItMoves) {
  Harness h;
  std::atomic<bool> hang{false};
  h.script.before = [&](uint64_t) {
    while (hang) std::this_thread::sleep_for(milliseconds(5));
  };
  h.options.watchdog = milliseconds(2000);
  Engine& e = h.start();
  hang = true;
  auto began = steady_clock::now();
  auto s = std::move(*e.submit(ask(5, 50)));
  EXPECT_TRUE(eventually([&] { return e.state() == State::stuck; }));
  EXPECT_GE(steady_clock::now() - began, milliseconds(1700));  // seven of eight looks
  EXPECT_LE(steady_clock::now() - began, milliseconds(4000));  // nine, and a machine that is late by most of a second
  EXPECT_THAT(e.stats().message, ::testing::HasSubstr("no step has finished for 2 s"));
  hang = false;
  EXPECT_TRUE(eventually([&] { return e.state() == State::serving; }));
  EXPECT_TRUE(read(*s).complete());
}

TEST(Idle, TakesNoProcessorTimeAndWakesNobody) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer has a thread of its own that wakes up";
#endif
  Harness h;
  Engine& e = h.start();
  EXPECT_TRUE(run(e, ask(5, 50)).complete());
  expect_all_pages_back(e);
  std::this_thread::sleep_for(milliseconds(50));
  // The least of a few seconds: what the system itself does on a crowded machine may be counted in one of them.
  double least = 1;
  long wakes = 1000;
  for (int second = 0; second < 4 && (least >= 0.001 || wakes > 2); ++second) {
    rusage before, after;
    getrusage(RUSAGE_SELF, &before);
    const double cpu = cpu_seconds();
    std::this_thread::sleep_for(milliseconds(1000));
    least = std::min(least, cpu_seconds() - cpu);
    getrusage(RUSAGE_SELF, &after);
    wakes = std::min(wakes, after.ru_nvcsw - before.ru_nvcsw);
  }
  EXPECT_LT(least, 0.001);
  EXPECT_LE(wakes, 2);  // this thread's own sleep
}

TEST(Drain, FinishesWhatRunsAndTakesNothingNew) {
  Harness h;
  h.script.step = std::chrono::microseconds(500);
  Engine& e = h.start();
  Request r = ask(5, 300);
  auto s = std::move(*e.submit(r));
  std::thread draining([&] { e.drain(milliseconds(20000)); });
  EXPECT_TRUE(eventually([&] { return e.state() == State::draining; }));
  EXPECT_EQ(e.submit(r).status().code(), Code::unavailable);
  EXPECT_EQ(read(*s).tokens[0], expected(r));
  draining.join();
  EXPECT_EQ(e.state(), State::stopped);
}

TEST(Drain, ThatIsCutShortFailsWhatRunsAndAnswersAll) {
  Harness h;
  h.options.max_running = 2;
  h.script.step = std::chrono::microseconds(1000);
  Engine& e = h.start();
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < 5; ++i) streams.push_back(std::move(*e.submit(ask(5, 4000, i))));
  std::thread draining([&] { e.drain(milliseconds(60000)); });
  EXPECT_TRUE(eventually([&] { return e.state() == State::draining; }));
  auto began = steady_clock::now();
  e.drain(milliseconds(0));
  EXPECT_LT(steady_clock::now() - began, milliseconds(1000));
  draining.join();
  for (auto& s : streams) EXPECT_EQ(read(*s).failed.code(), Code::unavailable);
}

TEST(Loading, TheStateSaysHowFarAndRequestsAreToldToComeBack) {
  Harness h;
  std::atomic<bool> go{false};
  h.engine = Engine::start(
      [&](const LoadProgress& progress) -> Result<Loaded> {
        progress("reading", 0.25);
        while (!go) std::this_thread::sleep_for(milliseconds(1));
        Loaded loaded;
        loaded.runner = std::make_unique<FakeRunner>(h.script, kPage);
        return loaded;
      },
      h.options);
  EXPECT_EQ(h.engine->state(), State::starting);
  EXPECT_TRUE(eventually([&] { return h.engine->stats().message == "reading 25%"; }));
  auto refused = h.engine->submit(ask(5, 5)).status();
  EXPECT_EQ(refused.code(), Code::unavailable);
  EXPECT_TRUE(refused.retry_after().has_value());
  go = true;
  EXPECT_TRUE(h.engine->wait_ready().ok());
  EXPECT_TRUE(run(*h.engine, ask(5, 5)).complete());
}

TEST(Loading, AModelThatDoesNotLoadSaysWhy) {
  auto engine = Engine::start([](const LoadProgress&) -> Result<Loaded> { return not_found("no such file"); }, {});
  EXPECT_EQ(engine->wait_ready().code(), Code::not_found);
  EXPECT_EQ(engine->state(), State::stopped);
  EXPECT_EQ(engine->submit(ask(5, 5)).status().code(), Code::unavailable);
}

TEST(Loading, ACacheTooSmallForAPageSaysHowMuchIsNeeded) {
  Harness h;
  h.options.kv_memory = 10;
  h.engine = Engine::start(
      [&](const LoadProgress&) -> Result<Loaded> {
        Loaded loaded;
        loaded.runner = std::make_unique<FakeRunner>(h.script, kPage);
        return loaded;
      },
      h.options);
  EXPECT_THAT(h.engine->wait_ready().message(), ::testing::HasSubstr("at least 512"));
}

TEST(Loading, AStepTraceThatCannotBeWrittenIsAnError) {
  EngineOptions options;
  options.step_trace = "/nonexistent/steps.json";
  auto engine =
      Engine::start([](const LoadProgress&) -> Result<Loaded> { return not_found("not looked for"); }, options);
  Status s = engine->wait_ready();
  EXPECT_EQ(s.code(), Code::failed_precondition);
  EXPECT_EQ(s.field(), "step_trace");
  EXPECT_THAT(s.message(), ::testing::HasSubstr("/nonexistent/steps.json"));
}

TEST(Requests, EachBadValueIsNamed) {
  Harness h;
  Engine& e = h.start();
  auto field = [&](auto change) {
    Request r = ask(5, 5);
    change(r);
    auto refused = e.submit(std::move(r)).status();
    EXPECT_EQ(refused.code(), Code::invalid_argument) << refused.message();
    return refused.field();
  };
  EXPECT_EQ(field([](Request& r) { r.prompt.clear(); }), "prompt");
  EXPECT_EQ(field([](Request& r) { r.prompt[2] = kVocab; }), "prompt");
  EXPECT_EQ(field([](Request& r) { r.prompt[2] = -1; }), "prompt");
  EXPECT_EQ(field([](Request& r) { r.prompt.resize(5000); }), "prompt");
  EXPECT_EQ(field([](Request& r) { r.max_tokens = 5000; }), "max_tokens");
  EXPECT_EQ(field([](Request& r) { r.max_tokens = -1; }), "max_tokens");
  EXPECT_EQ(field([](Request& r) { r.min_tokens = 6; }), "min_tokens");
  EXPECT_EQ(field([](Request& r) { r.n = 0; }), "n");
  EXPECT_EQ(field([](Request& r) { r.n = 1000; }), "n");
  EXPECT_EQ(field([](Request& r) { r.stop_tokens = {kVocab}; }), "stop_token_ids");
  EXPECT_EQ(field([](Request& r) { r.allowed_tokens = {kVocab}; }), "allowed_token_ids");
  EXPECT_EQ(field([](Request& r) { r.stop_strings = {"x"}; }), "stop");
  EXPECT_EQ(field([](Request& r) { r.detokenize = true; }), "detokenize");
  EXPECT_EQ(field([](Request& r) { r.grammar.kind = text::GrammarSpec::Kind::json_object; }), "grammar");
  EXPECT_EQ(e.stats().requests, 0);
}

TEST(Steps, AreTracedAndCounted) {
  const ScratchFolder folder;
  Harness h;
  h.options.step_trace = folder.path("steps.json");
  Engine& e = h.start();
  run(e, ask(100, 10));
  expect_all_pages_back(e);
  Stats s = e.stats();
  EXPECT_EQ(s.requests, 1);
  EXPECT_EQ(s.finished, 1);
  EXPECT_EQ(s.output_tokens, 10);
  EXPECT_EQ(s.first_token.count, 1);
  EXPECT_EQ(s.between_tokens.count, 9);
  EXPECT_GE(s.step_time.count, 11);  // two chunks, nine decodes
  auto recent = e.recent_steps();
  ASSERT_GE(recent.size(), 11u);
  EXPECT_EQ(recent[0].tokens, 64);
  EXPECT_EQ(recent[1].tokens, 36);
  EXPECT_EQ(recent.back().decodes, 1);
  h.engine.reset();
  FILE* f = fopen(h.options.step_trace.c_str(), "r");
  ASSERT_NE(f, nullptr);
  std::string text(1 << 16, '\0');
  text.resize(fread(text.data(), 1, text.size(), f));
  fclose(f);
  EXPECT_EQ(text.substr(0, 2), "[\n");
  EXPECT_EQ(text.substr(text.size() - 3), "\n]\n");
  EXPECT_THAT(text, ::testing::HasSubstr("\"prefills\":1,\"tokens\":64"));
}

}  // namespace
}  // namespace kvasir::engine::testing
