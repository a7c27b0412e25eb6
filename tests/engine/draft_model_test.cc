// A draft model changes when an answer comes, and nothing of what it says. The network of the harness says what follows
// all the tokens that its cache holds: if its drafts are right, the draft model has seen every token.
#include "engine/draft_model.h"

#include "core/cat.h"
#include "engine/kv_memory.h"
#include "tests/engine/real_case.h"
#include "tests/text/small_vocab.h"

namespace kvasir::engine::testing {
namespace {

using std::chrono::milliseconds;

class WithDraftModel : public ::testing::TestWithParam<int> {
 protected:
  WithDraftModel() {
    h.script.depth = h.draft_script.depth = GetParam();
    h.script.step = milliseconds(2);
    h.script.waits = true;
    h.with_draft = true;
    h.options.max_step_ms = 100;
  }
  static DraftCount by_model(const Engine& e) { return e.stats().drafts[size_t(DraftSource::model)]; }
  static std::vector<std::unique_ptr<Stream>> submit(Engine& e, const std::vector<Request>& requests) {
    std::vector<std::unique_ptr<Stream>> out;
    for (const Request& r : requests) out.push_back(std::move(*e.submit(r)));
    return out;
  }
  static void expect_right(Stream& stream, const Request& r) {
    const Answer a = read(stream);
    ASSERT_TRUE(a.complete()) << a.failed.message();
    for (int32_t c = 0; c < r.n; ++c) EXPECT_EQ(a.tokens.at(size_t(c)), expected(r, c));
  }
  // Again and again, until so many tokens were drafted: on a busy machine it may take a while until drafts seem to pay.
  static void expect_right(Engine& e, const std::vector<Request>& requests, int64_t drafted) {
    for (int round = 0; round < 30 && by_model(e).drafted <= drafted; ++round) {
      auto streams = submit(e, requests);
      for (size_t i = 0; i < requests.size(); ++i) expect_right(*streams[i], requests[i]);
    }
    EXPECT_GT(by_model(e).drafted, drafted);
  }
  // Nothing of any request is left in either cache.
  static void expect_nothing_left(Engine& e) {
    expect_all_pages_back(e);
    EXPECT_TRUE(eventually([&] {
      const Stats s = e.stats();
      return s.draft_model.pages_free == s.draft_model.pages_total;
    }));
  }
  Harness h;
};

TEST_P(WithDraftModel, TheModelItselfIsAlwaysRight) {
  Engine& e = h.start();
  std::vector<Request> requests;
  for (int32_t i = 0; i < 6; ++i) requests.push_back(ask(5 + 9 * i, 60 + i, i));
  expect_right(e, requests, 200);
  EXPECT_EQ(by_model(e).accepted, by_model(e).drafted) << "it has missed a token, or seen one too many";
  EXPECT_EQ(e.stats().draft_model.name, "fake");
  EXPECT_GT(e.stats().draft_model.seconds, 0);
  expect_nothing_left(e);
}

// Sampled, forked, penalized and predicted ones; some are taken from the prefix cache.
TEST_P(WithDraftModel, TheSameAnswersHoweverTheyAreDrawn) {
  Engine& e = h.start();
  for (int round = 0; round < 2; ++round) {
    std::vector<Request> requests;
    for (int32_t i = 0; i < 8; ++i) {
      Request r = ask(20 + i, 40, i);
      if (i % 4 == 1) r.sampling.temperature = 1, r.sampling.seed = uint64_t(i), r.n = 3;
      if (i % 4 == 2) r.sampling.repetition_penalty = 1.1f;
      if (i % 4 == 3) r.prediction = expected(r), r.prediction.resize(20);
      requests.push_back(std::move(r));
    }
    auto streams = submit(e, requests);
    for (size_t i = 0; i < requests.size(); ++i) expect_right(*streams[i], requests[i]);
  }
  EXPECT_GT(e.stats().cached_tokens, 0);
  EXPECT_GT(e.stats().drafts[size_t(DraftSource::prediction)].accepted, 0);
  expect_nothing_left(e);
}

TEST_P(WithDraftModel, OneThatIsAlwaysWrongIsSoonLeftAlone) {
  h.draft_script.off_by = 1;
  Engine& e = h.start();
  std::vector<Request> requests;
  for (int32_t i = 0; i < 3; ++i) requests.push_back(ask(9, 300, i));
  auto streams = submit(e, requests);
  for (size_t i = 0; i < requests.size(); ++i) expect_right(*streams[i], requests[i]);
  EXPECT_GT(by_model(e).drafted, 0);
  EXPECT_EQ(by_model(e).accepted, 0);
  EXPECT_LT(by_model(e).drafted, 3 * 300 / 2);
  expect_nothing_left(e);
}

// Both caches are too small for all: sequences lose their pages in either, and what they lacked is taken up again.
TEST_P(WithDraftModel, PagesTakenAwayInEitherCache) {
  h.pages(120);  // half of them the draft model's
  Engine& e = h.start();
  std::vector<Request> requests;
  for (int32_t i = 0; i < 8; ++i) requests.push_back(ask(12 + i, 110, i));
  expect_right(e, requests, 30);
  EXPECT_EQ(e.stats().draft_model.pages_total, 60);
  EXPECT_GT(e.stats().preemptions, 0);
  EXPECT_EQ(by_model(e).accepted, by_model(e).drafted);
  expect_nothing_left(e);
}

// What a long prompt needs is taken up beside many steps of a bounded time, and then it is right.
TEST_P(WithDraftModel, ALongPromptIsTakenUpInParts) {
  h.options.max_step_ms = 8;
  h.draft_script.token = std::chrono::microseconds(100);
  Engine& e = h.start();
  expect_right(e, {ask(200, 300)}, 20);
  EXPECT_EQ(by_model(e).accepted, by_model(e).drafted);
  expect_nothing_left(e);
}

TEST_P(WithDraftModel, CancelledAndLateRequestsLeaveNothing) {
  Engine& e = h.start();
  Request kept = ask(9, 120), late = ask(8, 2000, 2);
  late.deadline = std::chrono::steady_clock::now() + milliseconds(60);
  auto one = std::move(*e.submit(kept)), gone = std::move(*e.submit(ask(7, 2000, 1))),
       slow = std::move(*e.submit(late));
  EXPECT_TRUE(eventually([&] { return by_model(e).drafted > 10; }, milliseconds(5000)));
  gone.reset();
  EXPECT_EQ(read(*slow).failed.code(), Code::deadline_exceeded);
  expect_right(*one, kept);
  expect_nothing_left(e);
}

TEST_P(WithDraftModel, AFaultOfItsEndsDraftingAndNoAnswer) {
  for (bool in_wait : {false, true}) {
    SCOPED_TRACE(in_wait);
    Harness own;
    own.script.depth = GetParam();
    own.script.step = milliseconds(2);
    own.script.waits = true;
    own.with_draft = true;
    own.options.max_step_ms = 100;
    Engine& e = own.start();
    const Request r = ask(9, 600);
    auto stream = std::move(*e.submit(r));
    EXPECT_TRUE(eventually([&] { return by_model(e).drafted > 4; }, milliseconds(8000)));
    (in_wait ? own.draft_script.break_wait : own.draft_script.break_launch) = true;
    expect_right(*stream, r);
    const Stats s = e.stats();
    EXPECT_EQ(s.state, State::serving);
    EXPECT_THAT(s.message, ::testing::HasSubstr("the draft model drafts no more"));
    EXPECT_FALSE(s.draft_model.fault.empty());
    EXPECT_TRUE(run(e, ask(5, 40, 3)).complete());
    expect_nothing_left(e);
  }
}

TEST_P(WithDraftModel, LogitsThatAreNoNumbersEndItForThatRequestAlone) {
  Engine& e = h.start();
  Request bad = ask(9, 60, 1);
  const Request good = ask(9, 60, 2);
  h.draft_script.poison = bad.prompt[4];
  expect_right(e, {bad, good}, 20);
  EXPECT_TRUE(e.stats().draft_model.fault.empty());
  EXPECT_EQ(by_model(e).accepted, by_model(e).drafted);
  expect_nothing_left(e);
}

// Where its context ends it drafts no more.
TEST_P(WithDraftModel, AShorterContext) {
  h.draft_script.context = 50;
  Engine& e = h.start();
  expect_right(e, {ask(20, 100)}, 10);
  EXPECT_EQ(by_model(e).accepted, by_model(e).drafted);
  expect_nothing_left(e);
}

INSTANTIATE_TEST_SUITE_P(Depth, WithDraftModel, ::testing::Values(1, 2));

constexpr const char* kModel =
    "dummy:llama,layers=2,hidden=64,heads=4,kv_heads=2,head_dim=16,ffn=128,vocab=260,type=f32,step_ms=2";
constexpr const char* kSame =
    "dummy:llama,layers=2,hidden=64,heads=4,kv_heads=2,head_dim=16,ffn=128,vocab=260,type=f32";
constexpr const char* kOther =
    "dummy:llama,layers=1,hidden=32,heads=2,kv_heads=1,head_dim=16,ffn=64,vocab=260,type=f32,seed=9";

struct Said {
  std::vector<Answer> answers;
  Stats stats;
};

Said said(const std::string& draft, model::RunnerOptions m = {}, bool greedy = false) {
  if (m.model.empty()) m.model = kModel;
  m.threads = 1;
  EngineOptions options;
  options.page_size = 8, options.max_running = 8, options.kv_memory = 16 << 20, options.max_tokens_per_step = 128;
  options.max_draft = draft.empty() ? 0 : 6;
  options.draft_model = draft;
  auto engine = Engine::start(m, options);
  const Status ready = engine->wait_ready();
  EXPECT_TRUE(ready.ok()) << ready.message();
  std::vector<std::unique_ptr<Stream>> streams;
  for (int32_t i = 0; i < 6; ++i) {
    Request r = ask(10 + 7 * i, 50, i);
    for (int32_t& t : r.prompt) t = 4 + t % 250;
    if (i == 1 && !greedy) r.sampling.temperature = 0.8f, r.sampling.seed = 4;
    if (i == 2 && !greedy) r.sampling.frequency_penalty = 0.5f;
    if (i == 3) r.sampling.logprobs = 2;
    if (i == 4 && !greedy) r.grammar = {text::GrammarSpec::Kind::regex, "([a-f]{3,9} )+", {}};
    streams.push_back(std::move(*engine->submit(r)));
  }
  Said out;
  for (auto& s : streams) out.answers.push_back(read(*s));
  expect_all_pages_back(*engine);
  out.stats = engine->stats();
  return out;
}

void expect_same(const Said& a, const Said& b) {
  for (size_t i = 0; i < a.answers.size(); ++i) {
    EXPECT_TRUE(a.answers[i].complete() && b.answers[i].complete());
    EXPECT_EQ(a.answers[i].tokens, b.answers[i].tokens) << "request " << i;
    EXPECT_EQ(a.answers[i].logprobs, b.answers[i].logprobs) << "request " << i;
  }
}

// How much is drafted in one run is a matter of time: on a machine that others use, of some runs.
void expect_right_drafts(const Said& plain, const Said& ahead, const std::string& draft, const model::RunnerOptions& m,
                         int64_t more_than) {
  int64_t right = ahead.stats.drafts[size_t(DraftSource::model)].accepted;
  for (int run = 1; run < 8 && right <= more_than; ++run) {
    const Said again = said(draft, m);
    expect_same(plain, again);
    right += again.stats.drafts[size_t(DraftSource::model)].accepted;
  }
  EXPECT_GT(right, more_than);
}

TEST(DraftModelOnACpu, TheModelItselfAndAnother) {
  const Said plain = said(""), itself = said(kSame), other = said(kOther);
  expect_same(plain, itself);
  expect_same(plain, other);
  const DraftCount its = other.stats.drafts[size_t(DraftSource::model)];
  expect_right_drafts(plain, itself, kSame, {}, 40);
  EXPECT_GT(its.drafted, 0);
  EXPECT_LT(double(its.accepted) / double(its.drafted), 0.5);
}

// Counted by source: lookups in the text, which are wrong more often, stand in for the model where it is too slow.
TEST(DraftModelOnACpu, TheModelItselfIsRightWhereTheLikeliestTokenIsTaken) {
  DraftCount all;
  for (int run = 0; run < 8 && all.drafted < 100; ++run) {
    const DraftCount its = said(kSame, {}, true).stats.drafts[size_t(DraftSource::model)];
    all.drafted += its.drafted, all.accepted += its.accepted;
  }
  EXPECT_GT(all.drafted, 0);
  EXPECT_GT(double(all.accepted), 0.9 * double(all.drafted)) << all.accepted << " of " << all.drafted;
}

TEST(DraftModelOnACpu, WindowsAndQuantizedCaches) {
  for (const char* window : {"", ",window=16"})
    for (const char* dtype : {"auto", "int8"}) {
      SCOPED_TRACE(cat(window, ' ', dtype));
      model::RunnerOptions m;
      m.model = cat(kModel, window);
      m.kv.dtype = dtype;
      const Said plain = said("", m), ahead = said(cat(kSame, window), m);
      expect_same(plain, ahead);
      expect_right_drafts(plain, ahead, cat(kSame, window), m, 20);
    }
}

Status refused(const std::string& draft) {
  model::RunnerOptions m;
  m.model = kModel, m.threads = 1;
  EngineOptions options;
  options.kv_memory = 16 << 20;
  options.draft_model = draft;
  auto engine = Engine::start(m, options);
  return engine->wait_ready();
}

TEST(DraftModelOnACpu, WhatCannotDraftIsRefusedByName) {
  const Status size = refused("dummy:llama,layers=1,hidden=32,heads=2,kv_heads=1,head_dim=16,ffn=64,vocab=300");
  EXPECT_EQ(size.code(), Code::invalid_argument);
  EXPECT_EQ(size.field(), "draft_model");
  EXPECT_THAT(size.message(), ::testing::HasSubstr("it has 300 tokens, the model 260"));
  const Status none = refused("/nowhere/at/all.gguf");
  EXPECT_EQ(none.code(), Code::not_found);
  EXPECT_EQ(none.field(), "draft_model");
  EXPECT_THAT(none.message(), ::testing::HasSubstr("draft_model cannot be loaded"));
}

TEST(DraftModelVocabulary, TheFirstTokenThatDiffersIsNamed) {
  text::GgufVocab one = text::small_byte_level_vocab(), longer = one, other = one;
  longer.tokens.push_back("more"), longer.types.push_back(1);
  other.tokens.back() = "<thought>";
  const auto a = *text::Tokenizer::from_gguf(one), same = *text::Tokenizer::from_gguf(one),
             more = *text::Tokenizer::from_gguf(longer), else_ = *text::Tokenizer::from_gguf(other);
  const auto vocabulary = [](const char* name, const text::TokenizerPtr& t) {
    return Vocabulary{name, t->vocab_size() + 7, t.get()};  // padded logits are no tokens
  };
  EXPECT_TRUE(same_vocabulary(vocabulary("big", a), vocabulary("small", same)).ok());
  EXPECT_TRUE(same_vocabulary({"big", 300, a.get()}, vocabulary("small", same)).ok()) << "nor are other paddings";
  const auto size = same_vocabulary(vocabulary("big", a), vocabulary("small", more));
  EXPECT_THAT(size.message(),
              ::testing::HasSubstr(cat("it has ", more->vocab_size(), " tokens, the model ", a->vocab_size())));
  const auto token = same_vocabulary(vocabulary("big", a), vocabulary("small", else_));
  EXPECT_EQ(token.field(), "draft_model");
  EXPECT_THAT(token.message(),
              ::testing::HasSubstr(cat("token ", a->vocab_size() - 1, " is '<thought>', the model's is '<think>'")));
}

TEST(DraftModelMemory, AsManyTokensAsTheModelAtMostHalf) {
  model::ModelInfo model, draft;
  model.kv_bytes_per_token = 900, draft.kv_bytes_per_token = 100;
  draft.context_length = 1 << 20;
  const KvSteps steps{16, 64, 512};
  EXPECT_EQ(draft_pages(16'000'000, model, draft, steps).pages, 1000);
  EXPECT_EQ(draft_pages(16'000'000, model, draft, steps).bytes, 1'600'000);
  draft.kv_bytes_per_token = 9000;  // the larger one
  EXPECT_LE(draft_pages(16'000'000, model, draft, steps).bytes, 8'000'000);
  draft.kv_bytes_per_token = 100, draft.context_length = 64;  // 64 sequences of four pages
  EXPECT_EQ(draft_pages(16'000'000, model, draft, steps).pages, 256);
}

}  // namespace
}  // namespace kvasir::engine::testing
