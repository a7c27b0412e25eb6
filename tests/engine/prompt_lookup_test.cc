// Drafts change when an answer comes, and nothing of what it says.
#include "engine/prompt_lookup.h"

#include <random>

#include "core/cat.h"
#include "tests/engine/real_case.h"

namespace kvasir::engine::testing {
namespace {

using Ids = std::vector<int32_t>;

Ids run_of(int32_t first, int32_t count) {
  Ids out;
  for (int32_t i = 0; i < count; ++i) out.push_back(first + i);
  return out;
}

TEST(PromptLookup, WhatStoodBehindTheSameThree) {
  PromptLookup lookup({}, run_of(100, 50));
  EXPECT_EQ(lookup.draft_length(8, 10, 1).tokens, 0) << "the prompt's end is like nothing before it";
  lookup.add(Ids{7, 120, 121});
  EXPECT_TRUE(lookup.draft(4).empty()) << "two tokens are no likeness";
  lookup.add(Ids{122});
  EXPECT_EQ(lookup.draft(4), (Ids{123, 124, 125, 126}));
  lookup.add(Ids{123, 124});
  EXPECT_EQ(lookup.draft(2), (Ids{125, 126}));
  lookup.add(Ids{9});
  EXPECT_TRUE(lookup.draft(4).empty());
  EXPECT_EQ(lookup.answer_tokens(), 7u);
}

TEST(PromptLookup, ATextThatRepeatsItself) {
  PromptLookup lookup({}, Ids{1, 2, 3, 4, 1, 2, 3});
  EXPECT_EQ(lookup.draft(9), (Ids{4, 1, 2, 3, 4, 1, 2, 3, 4}));
}

TEST(PromptLookup, ThePredictionComesFirst) {
  PromptLookup lookup(run_of(500, 20), run_of(100, 30));
  EXPECT_EQ(lookup.draft(3), (Ids{500, 501, 502}));
  EXPECT_GE(lookup.draft_length(8, 10, 1).tokens, 8);
  lookup.add(Ids{500, 501, 3});  // changed here
  EXPECT_TRUE(lookup.draft(3).empty());
  lookup.add(Ids{503, 504, 505});
  EXPECT_EQ(lookup.draft(3), (Ids{506, 507, 508}));
}

TEST(PromptLookup, HowFarItPays) {
  PromptLookup lookup({}, run_of(100, 2000));
  lookup.add(Ids{110, 111, 112});
  EXPECT_EQ(lookup.draft_length(8, 1, 1).tokens, 0) << "verifying costs what is saved";
  const int first = lookup.draft_length(8, 10, 1).tokens;
  EXPECT_GT(first, 0);
  for (int32_t t = 113; t < 150; ++t) lookup.add(Ids{t});
  EXPECT_EQ(lookup.draft_length(8, 10, 1).tokens, 8) << "all of them have been right";
  for (int round = 0; round < 20; ++round) lookup.add(Ids{110 + round, 111 + round, 112 + round, 5});
  EXPECT_LT(lookup.draft_length(8, 10, 1).tokens, first) << "most of them have been wrong";
}

TEST(PromptLookup, DraftsAreAlwaysOfTheText) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    Ids prompt(random() % 40), answer;
    for (int32_t& t : prompt) t = int32_t(random() % 3);
    PromptLookup lookup({}, prompt);
    Ids text = prompt;
    for (int i = 0; i < 200; ++i) {
      const Ids draft = lookup.draft(6);
      ASSERT_TRUE(draft.empty() || draft.size() == 6u);
      if (!draft.empty()) {  // the last three tokens stood before it somewhere
        Ids three(text.end() - 3, text.end());
        three.push_back(draft[0]);
        ASSERT_NE(std::search(text.begin(), text.end(), three.begin(), three.end()), text.end());
      }
      const auto next = int32_t(random() % 3);
      lookup.add(Ids{next}), text.push_back(next);
    }
  }
}

constexpr const char* kModel =
    "dummy:llama,layers=2,hidden=64,heads=4,kv_heads=2,head_dim=16,ffn=128,vocab=260,type=f32";

struct Said {
  std::vector<Answer> answers;
  Stats stats;
};

Said said(int32_t max_draft, const std::vector<Request>& requests, EngineOptions options = {}, const char* more = "") {
  model::RunnerOptions m;
  m.model = cat(kModel, more), m.threads = 1;
  options.page_size = 8, options.max_running = 8, options.kv_memory = options.kv_memory ? options.kv_memory : 16 << 20;
  options.max_tokens_per_step = 128;
  options.max_draft = max_draft;
  auto engine = Engine::start(m, options);
  const Status ready = engine->wait_ready();
  EXPECT_TRUE(ready.ok()) << ready.message();
  std::vector<std::unique_ptr<Stream>> streams;
  for (const Request& r : requests) {
    auto s = engine->submit(r);
    EXPECT_TRUE(s.ok()) << s.status().message();
    if (s.ok()) streams.push_back(std::move(*s));
  }
  Said out;
  for (auto& s : streams) out.answers.push_back(read(*s));
  expect_all_pages_back(*engine);
  out.stats = engine->stats();
  return out;
}

void expect_same(const Said& a, const Said& b) {
  ASSERT_EQ(a.answers.size(), b.answers.size());
  for (size_t i = 0; i < a.answers.size(); ++i) {
    EXPECT_TRUE(a.answers[i].complete() && b.answers[i].complete());
    EXPECT_EQ(a.answers[i].tokens, b.answers[i].tokens) << "request " << i;
    EXPECT_EQ(a.answers[i].logprobs, b.answers[i].logprobs) << "request " << i;
  }
}

Request repeating(int32_t seed) {
  Request r = ask(1, 60, seed);
  r.prompt.clear();
  for (int32_t i = 0; i < 40; ++i) r.prompt.push_back(3 + (i % 9 + seed) % 60);
  r.sampling.temperature = 0;
  r.sampling.seed = uint64_t(seed) + 1;
  return r;
}

TEST(Speculation, TheSameAnswersForEveryWayOfSampling) {
  std::vector<Request> requests;
  for (int32_t i = 0; i < 16; ++i) requests.push_back(repeating(i));
  requests[1].sampling.temperature = 0.8f;
  requests[2].sampling.temperature = 0.3f, requests[2].sampling.top_p = 0.9f;
  requests[3].sampling.temperature = 1.5f, requests[3].sampling.top_k = 3;
  requests[4].sampling.repetition_penalty = 1.3f;
  requests[5].sampling.frequency_penalty = 0.7f, requests[5].sampling.presence_penalty = 0.2f;
  requests[6].sampling.logprobs = 3;
  requests[7].n = 3, requests[7].sampling.temperature = 0.7f;
  requests[8].min_tokens = 30, requests[8].stop_tokens = {5, 6, 7, 8, 9, 10};
  requests[9].stop_tokens = run_of(3, 6);
  requests[10].allowed_tokens = run_of(3, 12);
  requests[11].sampling.logit_bias = {{4, 2.0f}, {5, -100.0f}};
  requests[12].max_tokens = 7;
  requests[13].prediction = run_of(3, 30);
  requests[14].sampling.logprobs = 0, requests[14].sampling.logprob_token_ids = {3, 9};
  const Said free = said(0, {requests[15]});  // what comes of the last without them, every second pair forbidden
  for (size_t i = 1; i < free.answers[0].tokens.at(0).size(); i += 2)
    requests[15].sampling.bad_sequences.push_back({free.answers[0].tokens[0][i - 1], free.answers[0].tokens[0][i]});
  const Said plain = said(0, requests), ahead = said(8, requests);
  const std::vector<int32_t>& bound = plain.answers[15].tokens.at(0);
  for (size_t i = 1; i < bound.size(); ++i)
    for (const std::vector<int32_t>& pair : requests[15].sampling.bad_sequences)
      EXPECT_FALSE(bound[i - 1] == pair[0] && bound[i] == pair[1]) << i;
  EXPECT_EQ(plain.stats.all_drafts().drafted, 0);
  EXPECT_GT(ahead.stats.all_drafts().accepted, 0);
  EXPECT_GE(ahead.stats.all_drafts().drafted, ahead.stats.all_drafts().accepted);
  EXPECT_LT(ahead.stats.steps, plain.stats.steps);
  expect_same(plain, ahead);
  int64_t drafted = 0, accepted = 0;
  for (const Answer& a : ahead.answers)
    drafted += a.finished.back().usage.drafted, accepted += a.finished.back().usage.accepted;
  EXPECT_EQ(drafted, ahead.stats.all_drafts().drafted);
  EXPECT_EQ(accepted, ahead.stats.all_drafts().accepted);
}

TEST(Speculation, TheSameAnswersWhenPagesAreTakenAway) {
  std::vector<Request> requests;
  for (int32_t i = 0; i < 8; ++i) requests.push_back(repeating(i)), requests.back().max_tokens = 180;
  const Said plain = said(0, requests);
  EngineOptions few;
  few.kv_memory = plain.stats.kv_bytes_per_token * 8 * 70;  // 70 pages, of which each takes 28 in the end
  const Said ahead = said(8, requests, few);
  EXPECT_GT(ahead.stats.preemptions, 0);
  EXPECT_GT(ahead.stats.all_drafts().accepted, 0);
  expect_same(plain, ahead);
}

// Two steps in flight, as on a GPU. The clients predict their answers, some of them wrongly half-way.
TEST(Speculation, StepsThatOverlapWaitForDrafts) {
  for (int depth : {1, 2}) {
    SCOPED_TRACE(depth);
    Harness h;
    h.script.depth = depth;
    h.script.step = std::chrono::milliseconds(2);
    h.options.max_step_ms = 100;
    Engine& engine = h.start();
    std::vector<Request> requests;
    std::vector<std::unique_ptr<Stream>> streams;
    for (int32_t i = 0; i < 6; ++i) {
      requests.push_back(ask(9 + i, 60 + i, i));
      Request& r = requests.back();
      if (i % 3 == 1) r.sampling.temperature = 1, r.sampling.seed = uint64_t(i), r.n = 2;
      if (i % 3 == 2) r.sampling.repetition_penalty = 1.1f;
      r.prediction = expected(r);
      if (i >= 3) r.prediction.resize(30), r.prediction.push_back(1);
      auto stream = engine.submit(r);
      ASSERT_TRUE(stream.ok()) << stream.status().message();
      streams.push_back(std::move(*stream));
    }
    for (size_t i = 0; i < streams.size(); ++i) {
      const Answer a = read(*streams[i]);
      ASSERT_TRUE(a.complete()) << a.failed.message();
      for (int32_t c = 0; c < requests[i].n; ++c) EXPECT_EQ(a.tokens[size_t(c)], expected(requests[i], c)) << i;
    }
    expect_all_pages_back(engine);
    const int64_t mixed = h.script.launches, ahead = h.script.ahead, accepted = engine.stats().all_drafts().accepted;
    Request alone = ask(9, 60, 7);
    alone.prediction = expected(alone);
    EXPECT_EQ(run(engine, alone).tokens[0], expected(alone));
    const Stats stats = engine.stats();
    EXPECT_GT(stats.all_drafts().accepted - accepted, 40);
    EXPECT_GE(stats.all_drafts().drafted, stats.all_drafts().accepted);
    EXPECT_LT(h.script.launches - mixed, 20) << "plain steps would be 60";
    EXPECT_LT(h.script.ahead - ahead, 5) << "drafts follow known tokens";
  }
}

TEST(Speculation, StepsThatOverlapDoSoWhereNothingIsDrafted) {
  Harness h;
  h.script.depth = 2;
  Engine& engine = h.start();
  const Answer a = run(engine, ask(8, 50));
  EXPECT_TRUE(a.complete());
  EXPECT_EQ(engine.stats().all_drafts().drafted, 0);
  EXPECT_GT(h.script.ahead, 40);
}

// Byte-level text of a model that knows nothing: the grammars say most of it, and what is left repeats itself.
std::vector<Request> constrained() {
  const text::GrammarSpec json{text::GrammarSpec::Kind::json_schema,
                               R"({"type":"object","properties":{"first_name":{"type":"string","maxLength":12},)"
                               R"("is_it_so":{"type":"boolean"},"how_many":{"enum":[1,22,333]}},)"
                               R"("required":["first_name","is_it_so","how_many"],"additionalProperties":false})",
                               {}};
  const text::GrammarSpec regex{text::GrammarSpec::Kind::regex, "(abc|abd)(-[a-c]{3}-the same again){3,5}", {}};
  const text::GrammarSpec choice{text::GrammarSpec::Kind::choice, "", {"one of these", "one of those", "none of them"}};
  std::vector<Request> out;
  for (int32_t i = 0; i < 12; ++i) {
    out.push_back(repeating(i));
    Request& r = out.back();
    r.grammar = i % 3 == 0 ? json : i % 3 == 1 ? regex : choice;
    r.ignore_eos = false;
    r.max_tokens = i % 4 == 3 ? 20 : 150;
    if (i / 3 % 2 == 1) r.sampling.temperature = 1.2f, r.sampling.top_p = 0.95f;
    if (i == 4) r.n = 3;
    if (i == 6) r.sampling.repetition_penalty = 1.2f;
    if (i == 7) r.sampling.logprobs = 2;
    if (i == 8) r.min_tokens = 5;
  }
  for (const char c : std::string("abc-aaa-the same again-aaa-the same again-bbb-the same again"))
    out[1].prediction.push_back(int32_t(static_cast<unsigned char>(c)) + 3);
  return out;
}

TEST(Speculation, TheSameAnswersUnderGrammars) {
  // Steps that take a while, so that asking a grammar pays. On a crowded machine masks are late, and a grammar that
  // waits for one is not asked: so in as many runs as it takes.
  const Said plain = said(0, constrained());
  int64_t by_grammar = 0;
  for (int run = 0; run < 8 && by_grammar <= 100; ++run) {
    const Said ahead = said(8, constrained(), {}, ",step_ms=1");
    expect_same(plain, ahead);
    const DraftCount grammar = ahead.stats.drafts[size_t(DraftSource::grammar)];
    EXPECT_GT(grammar.accepted, 0);
    EXPECT_GE(10 * grammar.accepted, 9 * grammar.drafted) << "nothing else may come";
    EXPECT_LT(4 * ahead.stats.steps, 3 * plain.stats.steps);
    by_grammar += grammar.accepted;
    int64_t drafted = 0, accepted = 0;
    for (const Answer& a : ahead.answers)
      drafted += a.finished.back().usage.drafted, accepted += a.finished.back().usage.accepted;
    EXPECT_EQ(drafted, ahead.stats.all_drafts().drafted);
    EXPECT_EQ(accepted, ahead.stats.all_drafts().accepted);
  }
  EXPECT_GT(by_grammar, 100);
}

TEST(Speculation, TheSameAnswersUnderGrammarsWhenPagesAreTakenAway) {
  const Said plain = said(0, constrained());
  EngineOptions few;
  few.kv_memory = plain.stats.kv_bytes_per_token * 8 * 50;
  const Said ahead = said(8, constrained(), few, ",step_ms=2");  // so that they meet
  EXPECT_GT(ahead.stats.preemptions, 0);
  EXPECT_GT(ahead.stats.all_drafts().accepted, 0);
  expect_same(plain, ahead);
}

TEST(Speculation, BeamsAreLeftAlone) {
  Request beams = repeating(1);
  beams.beams = BeamOptions{.width = 3}, beams.max_tokens = 20;
  const Said plain = said(0, {beams}), ahead = said(8, {beams});
  EXPECT_EQ(ahead.stats.all_drafts().drafted, 0);
  expect_same(plain, ahead);
}

}  // namespace
}  // namespace kvasir::engine::testing
