// Grammars in the flow of steps, with one made up here whose masks come when the test says so.
#include <pthread.h>

#include <condition_variable>
#include <map>
#include <mutex>

#include "model/text/stoppable.h"
#include "tests/engine/harness.h"

namespace kvasir::engine::testing {
namespace {

// Masks wait while it is closed.
class Gate {
 public:
  void close() { set(false); }
  void open() { set(true); }
  void pass() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return open_; });
    --waiting_;
    ++passed_;
  }
  void wait_for_somebody() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_ > 0; });
  }
  int passed() {
    std::lock_guard lock(mutex_);
    return passed_;
  }

 private:
  void set(bool open) {
    std::lock_guard lock(mutex_);
    open_ = open;
    changed_.notify_all();
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true;
  int waiting_ = 0, passed_ = 0;
};

// The k-th token must be k more than a multiple of five. "broken": no mask after the first.
class EveryFifth final : public text::Matcher {
 public:
  EveryFifth(Gate& gate, bool broken) : gate_(gate), broken_(broken) {}
  static bool allows(int64_t k, int32_t token) { return token % 5 == k % 5; }
  Status mask(std::span<uint32_t> bits) override {
    if (taken_ > 0) gate_.pass();
    if (taken_ > 0 && broken_) return internal_error("the grammar stopped: made up");
    for (int32_t t = 0; t < kVocab; ++t)
      if (allows(taken_, t)) bits[size_t(t) / 32] |= 1u << (t % 32);
    return {};
  }
  Status consume(int32_t token) override {
    if (!allows(taken_, token)) return invalid_argument("not this one");
    ++taken_;
    return {};
  }
  bool finished() const override { return false; }
  std::unique_ptr<text::Matcher> clone() const override {
    return may_copy ? std::make_unique<EveryFifth>(*this) : nullptr;
  }
  bool may_copy = true;

 private:
  Gate& gate_;
  const bool broken_;
  int64_t taken_ = 0;
};

// Its token behind each four of the model's own choice is one more than the last of them, and so are the three after
// it.
class EveryOtherFour final : public text::Matcher {
 public:
  explicit EveryOtherFour(std::atomic<int64_t>& asked) : asked_(asked) {}
  static bool is_forced(int64_t k) { return k % 8 >= 4; }
  Status mask(std::span<uint32_t> bits) override {
    for (int32_t t = 0; t < kVocab; ++t)
      if (allows(t)) bits[size_t(t) / 32] |= 1u << (t % 32);
    return {};
  }
  Status consume(int32_t token) override {
    if (!allows(token)) return invalid_argument("not this one");
    last_ = token, ++taken_;
    return {};
  }
  Result<std::vector<int32_t>> forced() override {
    ++asked_;
    std::vector<int32_t> out;
    for (int64_t k = taken_; is_forced(k); ++k) out.push_back((out.empty() ? last_ : out.back()) % (kVocab - 1) + 1);
    return out;
  }
  bool finished() const override { return false; }
  std::unique_ptr<text::Matcher> clone() const override { return std::make_unique<EveryOtherFour>(*this); }

 private:
  bool allows(int32_t token) const { return !is_forced(taken_) || token == last_ % (kVocab - 1) + 1; }
  std::atomic<int64_t>& asked_;
  int64_t taken_ = 0;
  int32_t last_ = 0;
};

class Compiler final : public text::StoppableCompiler {
 public:
  Result<std::unique_ptr<text::Matcher>> compile_unless(const Stopped& stopped,
                                                        const text::GrammarSpec& spec) override {
    ++compiled;
    {
      std::lock_guard lock(mutex_);
      order.push_back(spec.text);
    }
    if (spec.text == "slow to compile") gate_of(spec.text).pass();
    if (spec.text == "never compiled") {
      begun = true;
      while (!stopped()) std::this_thread::yield();
      return Status(Code::cancelled, "stopped");
    }
    if (spec.text == "every other four") return std::unique_ptr<text::Matcher>(new EveryOtherFour(asked));
    auto matcher = std::make_unique<EveryFifth>(gate_of(spec.text), spec.text == "broken");
    matcher->may_copy = spec.text != "no copies";
    return std::unique_ptr<text::Matcher>(std::move(matcher));
  }
  Gate& gate_of(const std::string& name) {
    std::lock_guard lock(mutex_);
    return gates_[name];
  }
  std::atomic<int> compiled{0};
  std::atomic<bool> begun{false};
  std::atomic<int64_t> asked{0};  // what must come next
  std::vector<std::string> order;

 private:
  std::mutex mutex_;
  std::map<std::string, Gate> gates_;
};

std::vector<int32_t> expected_under_grammar(const Request& r, int32_t choice = 0) {
  std::vector<int32_t> tokens = r.prompt;
  for (int64_t k = 0; k < *r.max_tokens; ++k) {
    std::vector<uint32_t> bits((kVocab + 31) / 32, 0);
    for (int32_t t = 0; t < kVocab; ++t)
      if (EveryFifth::allows(k, t)) bits[size_t(t) / 32] |= 1u << (t % 32);
    tokens.push_back(draw_from(tokens, r.sampling, choice, bits.data()));
  }
  return {tokens.begin() + int64_t(r.prompt.size()), tokens.end()};
}

class GrammarFlow : public ::testing::TestWithParam<int> {
 protected:
  GrammarFlow() {
    h.script.depth = GetParam();
    h.grammars = compiler;
  }
  static Request under(const char* grammar, int32_t length, int64_t max_tokens, int32_t salt = 0) {
    Request r = ask(length, max_tokens, salt);
    r.grammar = {text::GrammarSpec::Kind::regex, grammar, {}};
    return r;
  }
  std::shared_ptr<Compiler> compiler = std::make_shared<Compiler>();
  Harness h;
};

TEST_P(GrammarFlow, ManyWithAndWithoutInOneBatch) {
  Engine& e = h.start();
  std::vector<Request> requests;
  std::vector<std::unique_ptr<Stream>> streams;
  for (int32_t i = 0; i < 24; ++i) {
    requests.push_back(i % 3 ? under("quick", 3 + i, 20, i) : ask(3 + i, 20, i));
    if (i % 4 == 1) requests.back().n = 3, requests.back().sampling.temperature = 1;
    auto stream = e.submit(requests.back());
    ASSERT_TRUE(stream.ok()) << stream.status().message();
    streams.push_back(std::move(*stream));
  }
  for (size_t i = 0; i < streams.size(); ++i) {
    Answer a = read(*streams[i]);
    ASSERT_TRUE(a.complete()) << a.failed.message();
    for (int32_t c = 0; c < requests[i].n; ++c) {
      const auto want = i % 3 ? expected_under_grammar(requests[i], c) : expected(requests[i], c);
      EXPECT_EQ(a.tokens[size_t(c)], want) << i << '.' << c;
    }
  }
  EXPECT_GT(compiler->gate_of("quick").passed(), 100);
  expect_all_pages_back(e);
}

// Predictions, some of them wrong half-way: each of their tokens is drawn under the grammar, and it follows what was
// drawn.
// What drafts save is learned from the time that steps take: on a crowded machine it may seem nothing at first, so in
// as many rounds as it takes.
TEST_P(GrammarFlow, DraftsAreVerifiedUnderIt) {
  h.options.max_step_ms = 100;
  h.script.step = std::chrono::milliseconds(2);
  Engine& e = h.start();
  std::vector<Request> requests;
  for (int32_t i = 0; i < 8; ++i) {
    requests.push_back(under("quick", 5 + i, 50, i));
    Request& r = requests.back();
    if (i % 4 == 1) r.sampling.temperature = 1, r.sampling.seed = uint64_t(i), r.n = 2;
    if (i % 4 == 2) r.sampling.repetition_penalty = 1.1f;
    r.prediction = expected_under_grammar(r);
    if (i >= 4) r.prediction[20] += 5;  // allowed, and not what is drawn
    if (i >= 6) r.prediction[35] += 1;  // not allowed
  }
  int64_t accepted = 0, steps = 1000;
  for (int round = 0; round < 8 && (accepted <= 8 * 25 || steps >= 60); ++round) {
    const Stats before = e.stats();
    std::vector<std::unique_ptr<Stream>> streams;
    for (const Request& r : requests) streams.push_back(std::move(*e.submit(r)));
    for (size_t i = 0; i < streams.size(); ++i) {
      const Answer a = read(*streams[i]);
      ASSERT_TRUE(a.complete()) << a.failed.message();
      for (int32_t c = 0; c < requests[i].n; ++c)
        EXPECT_EQ(a.tokens[size_t(c)], expected_under_grammar(requests[i], c)) << i << '.' << c;
    }
    expect_all_pages_back(e);
    const Stats after = e.stats();
    const auto source = size_t(DraftSource::prediction);
    accepted = after.drafts[source].accepted - before.drafts[source].accepted;
    steps = after.steps - before.steps;
  }
  EXPECT_GT(accepted, 8 * 25);
  EXPECT_LT(steps, 60);
}

// Its mask is late in the middle of a draft: what came before it stands, and the rest comes when the mask is there.
TEST_P(GrammarFlow, ALateMaskEndsADraftThere) {
  h.options.max_step_ms = 100;
  h.script.step = std::chrono::milliseconds(1);
  Engine& e = h.start();
  Gate& gate = compiler->gate_of("slow");
  Request r = under("slow", 7, 40), left = under("slow", 6, 40, 1);
  r.prediction = expected_under_grammar(r);
  left.prediction = expected_under_grammar(left);
  gate.close();
  auto stream = std::move(*e.submit(r)), gone = std::move(*e.submit(left));
  for (int i = 0; i < 6; ++i) {
    gate.wait_for_somebody();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    gate.open();
    if (i == 2) gone.reset();
    gate.close();
  }
  gate.open();
  EXPECT_EQ(read(*stream).tokens.at(0), expected_under_grammar(r));
  EXPECT_GT(e.stats().all_drafts().accepted, 0);
  expect_all_pages_back(e);
}

// A position is computed once where there are states, so a step waits for its masks: as long as a request may keep
// others waiting in all, and then that one alone fails.
TEST_P(GrammarFlow, StatesWaitForAMaskAndNotForLong) {
  h.script.state_bytes = 64;
  h.options.max_draft = 0;
  Engine& e = h.start();
  Request short_wait = under("slow", 7, 12), endless = under("endless", 6, 12, 1), beside = ask(5, 40, 2);
  Gate &slow = compiler->gate_of("slow"), &never = compiler->gate_of("endless");
  slow.close();
  auto stream = std::move(*e.submit(short_wait));
  for (int i = 0; i < 3; ++i) {
    slow.wait_for_somebody();
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    slow.open();
    if (i < 2) slow.close();
  }
  EXPECT_EQ(read(*stream).tokens.at(0), expected_under_grammar(short_wait));
  never.close();
  const Time began = std::chrono::steady_clock::now();
  Request neighbour = under("quick", 9, 24, 3);  // whose masks come at once, while others' do not
  auto failing = std::move(*e.submit(endless)), unharmed = std::move(*e.submit(beside));
  auto masked = std::move(*e.submit(neighbour));
  const auto ended = read(*failing);
  EXPECT_EQ(ended.failed.code(), Code::resource_exhausted);
  EXPECT_THAT(ended.failed.message(), ::testing::HasSubstr("ask for a simpler schema or grammar"));
  EXPECT_EQ(read(*unharmed).tokens.at(0), expected(beside));
  EXPECT_EQ(read(*masked).tokens.at(0), expected_under_grammar(neighbour));
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(8)) << "a second, on whatever machine";
  never.open();
  expect_all_pages_back(e);
}

TEST_P(GrammarFlow, WhatMustComeIsDrafted) {
  h.options.max_step_ms = 100;
  h.script.step = std::chrono::milliseconds(2);
  Engine& e = h.start();
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<Request> requests;
  for (int32_t i = 0; i < 4; ++i) {
    requests.push_back(under("every other four", 6 + i, 80, i));
    streams.push_back(std::move(*e.submit(requests.back())));
  }
  for (size_t i = 0; i < streams.size(); ++i) {
    std::vector<int32_t> tokens = requests[i].prompt;
    int32_t last = 0;
    for (int64_t k = 0; k < 80; ++k) {
      last = EveryOtherFour::is_forced(k) ? last % (kVocab - 1) + 1 : draw_from(tokens, requests[i].sampling, 0);
      tokens.push_back(last);
    }
    const Answer a = read(*streams[i]);
    EXPECT_EQ(a.tokens.at(0), std::vector<int32_t>(tokens.begin() + int64_t(requests[i].prompt.size()), tokens.end()));
  }
  const Stats stats = e.stats();
  EXPECT_GT(stats.drafts[size_t(DraftSource::grammar)].accepted, 4 * 30);
  EXPECT_EQ(stats.drafts[size_t(DraftSource::grammar)].accepted, stats.drafts[size_t(DraftSource::grammar)].drafted);
  EXPECT_LT(stats.steps, 80);
  expect_all_pages_back(e);
}

// A fault ends the requests of its step; whoever comes after finds nothing of them.
TEST_P(GrammarFlow, AFaultInAVerificationLeavesNothing) {
  h.options.max_step_ms = 100;
  h.script.step = std::chrono::milliseconds(1);
  Engine& e = h.start();
  Request r = under("every other four", 6, 400), again = under("quick", 9, 30, 3);
  auto stream = std::move(*e.submit(r));
  ASSERT_TRUE(eventually([&] { return e.stats().all_drafts().accepted > 4; }));
  h.script.break_wait = true;
  EXPECT_FALSE(read(*stream).failed.ok());
  again.prediction = expected_under_grammar(again);
  EXPECT_EQ(run(e, again).tokens.at(0), expected_under_grammar(again));
  expect_all_pages_back(e);
}

TEST_P(GrammarFlow, OneWhoseMaskDoesNotComeHoldsUpNobodyAndIsRightInTheEnd) {
  Engine& e = h.start();
  Gate& gate = compiler->gate_of("slow");
  gate.close();
  Request slow = under("slow", 7, 12), quick = under("quick", 5, 40, 1), plain = ask(9, 40, 2);
  auto waits = std::move(*e.submit(slow));
  gate.wait_for_somebody();
  auto other = std::move(*e.submit(quick));
  EXPECT_EQ(run(e, plain).tokens.at(0), expected(plain));  // whole answers while the mask is awaited
  EXPECT_EQ(read(*other).tokens.at(0), expected_under_grammar(quick));
  // Who waits is not tried again and again: a token under a grammar costs two steps at most, the others one.
  EXPECT_LE(e.stats().steps, 2 * 40 + 40 + 5);
  gate.open();
  EXPECT_EQ(read(*waits).tokens.at(0), expected_under_grammar(slow));
  expect_all_pages_back(e);
}

TEST_P(GrammarFlow, CancelledPreemptedAndStoppedWhileAMaskIsAwaited) {
  h.pages(24);
  h.script.step = std::chrono::microseconds(200);
  Engine& e = h.start();
  Gate& gate = compiler->gate_of("slow");
  gate.close();
  Request big = ask(30, 60, 3);  // comes to need the pages of those that wait
  Request kept = under("slow", 20, 30), stopped = under("slow", 8, 30, 2);
  stopped.stop_tokens = {expected_under_grammar(stopped)[1]};
  auto first = std::move(*e.submit(big)), a = std::move(*e.submit(kept)), b = std::move(*e.submit(under("slow", 5, 9))),
       c = std::move(*e.submit(stopped));
  gate.wait_for_somebody();
  b->cancel();
  EXPECT_EQ(read(*first).tokens.at(0), expected(big));
  gate.open();
  EXPECT_EQ(read(*a).tokens.at(0), expected_under_grammar(kept));
  const Answer cancelled = read(*b), short_one = read(*c);
  ASSERT_EQ(cancelled.finished.size(), 1u);
  EXPECT_EQ(cancelled.finished[0].reason, FinishReason::cancelled);
  EXPECT_EQ(short_one.finished.at(0).reason, FinishReason::stop_token);
  EXPECT_EQ(short_one.tokens.at(0).size(), 1u);
  expect_all_pages_back(e);
}

TEST_P(GrammarFlow, PreemptedOnesGoOnAsIfNothingHadBeen) {
  h.pages(30);
  std::atomic<bool> all_here{false};  // no step before: or the first would be done when the last comes
  h.script.before = [&](uint64_t) {
    while (!all_here) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  Engine& e = h.start();
  std::vector<Request> requests;
  std::vector<std::unique_ptr<Stream>> streams;
  for (int32_t i = 0; i < 6; ++i) {
    requests.push_back(under("quick", 4, 80, i));
    streams.push_back(std::move(*e.submit(requests.back())));
  }
  EXPECT_TRUE(eventually([&] { return compiler->compiled == 6; }));  // on a thread of their own, in turn
  all_here = true;
  for (size_t i = 0; i < streams.size(); ++i)
    EXPECT_EQ(read(*streams[i]).tokens.at(0), expected_under_grammar(requests[i])) << i;
  EXPECT_GT(e.stats().preemptions, 0);
  expect_all_pages_back(e);
}

TEST_P(GrammarFlow, OneThatBreaksFailsAlone) {
  Engine& e = h.start();
  Request mate = under("quick", 5, 30, 1);
  auto other = std::move(*e.submit(mate));
  Answer a = run(e, under("broken", 6, 30));
  EXPECT_EQ(a.failed.code(), Code::internal);
  EXPECT_THAT(a.failed.message(), ::testing::HasSubstr("made up"));
  EXPECT_EQ(read(*other).tokens.at(0), expected_under_grammar(mate));
  expect_all_pages_back(e);
}

TEST_P(GrammarFlow, OneThatCannotBeCopiedFailsAlone) {
  Engine& e = h.start();
  Request two = under("no copies", 5, 3);
  two.n = 2;
  EXPECT_EQ(run(e, two).failed.code(), Code::resource_exhausted);  // a copy fails where memory does
  EXPECT_TRUE(run(e, under("no copies", 5, 3)).complete());
  expect_all_pages_back(e);
}

// While this lives no thread can be had: no address space holds such a stack.
class NoThreads {
 public:
  NoThreads() {
    pthread_getattr_default_np(&usual_);
    pthread_attr_t none;
    pthread_attr_init(&none);
    pthread_attr_setstacksize(&none, size_t(1) << 48);
    pthread_setattr_default_np(&none);
    pthread_attr_destroy(&none);
  }
  ~NoThreads() {
    pthread_setattr_default_np(&usual_);
    pthread_attr_destroy(&usual_);
  }

 private:
  pthread_attr_t usual_;
};

TEST_P(GrammarFlow, OneWithoutAThreadFailsAloneAndTheNextDoesNot) {
  Engine& e = h.start();
  {
    NoThreads none;
    Answer a = run(e, under("quick", 5, 8));
    EXPECT_EQ(a.failed.code(), Code::resource_exhausted);
    EXPECT_THAT(a.failed.message(), ::testing::HasSubstr("no thread"));
    EXPECT_TRUE(run(e, ask(5, 8)).complete());
  }
  EXPECT_TRUE(run(e, under("quick", 5, 8)).complete());
  expect_all_pages_back(e);
}

TEST_P(GrammarFlow, NoStopBeforeMinTokens) {
  Engine& e = h.start();
  Request r = under("quick", 5, 12);
  const std::vector<int32_t> free = expected_under_grammar(r);
  r.stop_tokens = {free[3], free[8]};
  r.min_tokens = 6;
  Answer a = run(e, r);
  ASSERT_EQ(a.finished.size(), 1u) << a.failed.message();
  std::vector<int32_t> tokens = r.prompt;
  for (int64_t k = 0; k < 6; ++k) {
    std::vector<uint32_t> bits((kVocab + 31) / 32, 0);
    for (int32_t t = 0; t < kVocab; ++t)
      if (EveryFifth::allows(k, t) && t != free[3] && t != free[8]) bits[size_t(t) / 32] |= 1u << (t % 32);
    tokens.push_back(draw_from(tokens, r.sampling, 0, bits.data()));
    EXPECT_EQ(a.tokens[0][size_t(k)], tokens.back()) << k;
  }
}

// Nor does one tenant's pile of grammars keep another's waiting until all of them are done.
TEST_P(GrammarFlow, TenantsCompileInTurn) {
  Engine& e = h.start();
  Gate& gate = compiler->gate_of("slow to compile");
  gate.close();
  std::vector<std::unique_ptr<Stream>> streams;
  for (int32_t i = 0; i < 5; ++i) {
    Request r = under(i < 4 ? "slow to compile" : "quick", 5, 3, i);
    r.tenant = i < 4 ? "many" : "one";
    streams.push_back(std::move(*e.submit(std::move(r))));
    if (i == 0) gate.wait_for_somebody();
  }
  EXPECT_TRUE(read(*streams[4]).complete());                                         // whatever the other's do
  EXPECT_THAT(compiler->order, ::testing::ElementsAre("slow to compile", "quick"));  // one a tenant at a time
  gate.open();
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(read(*streams[i]).complete());
}

// What would compile for ever ends with its request, however that ends, and with the engine.
TEST_P(GrammarFlow, ACompilationEndsWithItsRequest) {
  Engine& e = h.start();
  auto begin = [&](Request r) {
    compiler->begun = false;
    auto stream = std::move(*e.submit(std::move(r)));
    while (!compiler->begun) std::this_thread::yield();
    return stream;
  };
  auto cancelled = begin(under("never compiled", 5, 3));
  cancelled->cancel();
  EXPECT_EQ(read(*cancelled).finished.at(0).reason, FinishReason::cancelled);
  Request late = under("never compiled", 5, 3, 1);
  late.deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
  EXPECT_EQ(read(*begin(std::move(late))).failed.code(), Code::deadline_exceeded);
  begin(under("never compiled", 5, 3, 2)).reset();  // the client has left
  EXPECT_TRUE(read(**e.submit(under("quick", 5, 3, 3))).complete());
  auto last = begin(under("never compiled", 5, 3, 4));
  e.drain(std::chrono::milliseconds(0));
  EXPECT_EQ(read(*last).failed.code(), Code::unavailable);
}

// Each may take long: nobody waits for answers that nobody will be given.
TEST_P(GrammarFlow, WhatIsOverIsNotCompiled) {
  Engine& e = h.start();
  Gate& gate = compiler->gate_of("slow to compile");
  gate.close();
  std::vector<std::unique_ptr<Stream>> streams;
  streams.push_back(std::move(*e.submit(under("slow to compile", 5, 12))));
  gate.wait_for_somebody();
  Request late = under("quick", 5, 12, 1);
  late.deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(5);
  auto expired = std::move(*e.submit(late));
  while (std::chrono::steady_clock::now() < *late.deadline) std::this_thread::yield();
  gate.open();
  EXPECT_EQ(read(*expired).failed.code(), Code::deadline_exceeded);
  EXPECT_EQ(compiler->compiled, 1);
  EXPECT_TRUE(read(*streams[0]).complete());

  gate.close();
  for (int32_t i = 2; i < 6; ++i) streams.push_back(std::move(*e.submit(under("slow to compile", 5, 12, i))));
  gate.wait_for_somebody();
  e.drain(std::chrono::milliseconds(0));
  gate.open();
  for (size_t i = 1; i < streams.size(); ++i) EXPECT_EQ(read(*streams[i]).failed.code(), Code::unavailable) << i;
  EXPECT_EQ(compiler->compiled, 2);
}

INSTANTIATE_TEST_SUITE_P(Depth, GrammarFlow, ::testing::Values(1, 2));

}  // namespace
}  // namespace kvasir::engine::testing
