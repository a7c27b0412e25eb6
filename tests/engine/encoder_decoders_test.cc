// Encoder-decoders served: what transformers' generate() says, and the same tokens whichever way a request travels.
#include "tests/engine/pooled.h"
#include "tests/engine/real_case.h"
#include "tests/model/architectures.h"

namespace kvasir::engine::testing {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using Ids = std::vector<int32_t>;

const json& stored() {
  static const json all = model::fixture("t5.json");
  return all;
}

std::unique_ptr<Engine> serve(const model::Folder& folder, const json& one, EngineOptions options) {
  model::StoredNetwork(one).write_folder(folder);
  model::RunnerOptions m;
  m.model = folder.path.string();
  m.threads = 1, m.precise = true;
  auto engine = Engine::start(m, std::move(options));
  const Status ready = engine->wait_ready();
  EXPECT_TRUE(ready.ok()) << ready.message();
  return engine;
}

EngineOptions plenty() {
  EngineOptions o;
  o.page_size = 4;
  o.max_running = 16;
  o.max_tokens_per_step = 64;
  o.kv_memory = 16 << 20;
  o.max_draft = 0;
  return o;
}

Request prompt_of(size_t which, int64_t max_tokens) {
  Request r = ask(0, max_tokens);
  r.prompt = stored()["prompts"][which].get<Ids>();
  return r;
}

// All at once, each prompt so many times; what each answered.
std::vector<Ids> answers(Engine& engine, int times, int64_t length) {
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < times; ++i)
    for (size_t p = 0; p < 3; ++p) streams.push_back(std::move(*engine.submit(prompt_of(p, length))));
  std::vector<Ids> out;
  for (auto& stream : streams) {
    const Answer a = read(*stream);
    EXPECT_TRUE(a.complete()) << a.failed.message();
    out.push_back(a.tokens.empty() ? Ids() : a.tokens[0]);
  }
  expect_all_pages_back(engine);
  return out;
}

TEST(EncoderDecoders, AnswersAreTransformersOwn) {
  for (const json& one : stored()["cases"]) {
    SCOPED_TRACE(one["name"].get<std::string>());
    const model::Folder folder("t5-served");
    auto engine = serve(folder, one, plenty());
    const Ids first = one["greedy"][0];
    const std::vector<Ids> got = answers(*engine, 4, std::ssize(first));
    for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], one["greedy"][i % 3].get<Ids>());
  }
}

TEST(EncoderDecoders, APromptCountsTheTokenThatTheDecoderBeginsWithAndIsNobodyElsesPrefix) {
  const model::Folder folder("t5-usage");
  auto engine = serve(folder, stored()["cases"][0], plenty());
  for (int i = 0; i < 2; ++i) {
    const Answer a = run(*engine, prompt_of(0, 3));
    ASSERT_TRUE(a.complete()) << a.failed.message();
    EXPECT_EQ(a.finished[0].usage.prompt_tokens, 41);
    EXPECT_EQ(a.finished[0].usage.completion_tokens, 3);
    EXPECT_EQ(a.finished[0].usage.cached_tokens, 0);
  }
}

TEST(EncoderDecoders, ATokenIsScoredAsTheAnswersFirst) {
  const json& one = stored()["cases"][1];
  const model::Folder folder("t5-scored");
  auto engine = serve(folder, one, plenty());
  Request r = pooled(prompt_of(0, 0));
  r.scored = {5, 200};
  const Answer a = run(*engine, r);
  ASSERT_TRUE(a.complete()) << a.failed.message();
  ASSERT_EQ(a.finished[0].pooled[0].size(), 2u);
  for (size_t i = 0; i < 2; ++i)
    EXPECT_NEAR(a.finished[0].pooled[0][i], one["logprobs"][0][0][size_t(r.scored[i])].get<double>(), 1e-3);
}

// The last prompt that fits, and the longest answer to it.
TEST(EncoderDecoders, TheContextIsForPromptAndAnswer) {
  const model::Folder folder("t5-context");
  json one = stored()["cases"][0];
  one["configs"][0]["n_positions"] = 30;
  auto engine = serve(folder, one, plenty());
  EXPECT_EQ(engine->info().context_length, 60);
  Request r = prompt_of(0, 20);
  const Answer a = run(*engine, r);
  ASSERT_TRUE(a.complete()) << a.failed.message();
  EXPECT_EQ(a.tokens[0].size(), 20u);
  r.max_tokens.reset();
  EXPECT_EQ(run(*engine, r).tokens[0].size(), 20u);
  r.max_tokens = 21;
  EXPECT_EQ(run(*engine, r).failed.field(), "max_tokens");
}

TEST(EncoderDecoders, BeamsAreThoseOfTransformers) {
  for (const bool few : {false, true})
    for (const json& one : stored()["cases"]) {
      SCOPED_TRACE(one["name"].get<std::string>() + (few ? ", few pages" : ""));
      const model::Folder folder("t5-beams");
      EngineOptions options = plenty();
      if (few) {
        auto probe = serve(folder, one, plenty());
        options.kv_memory = probe->info().kv_bytes_per_token * 4 * 90;
      }
      auto engine = serve(folder, one, options);
      std::vector<std::unique_ptr<Stream>> streams;
      for (size_t p = 0; p < 3; ++p) {
        Request r = prompt_of(p, 24);
        r.beams = BeamOptions{.width = 4};
        r.n = 4;
        r.stop_tokens = one["beams"][p]["stops"].get<Ids>();
        r.include_stop = true;
        auto stream = engine->submit(std::move(r));
        ASSERT_TRUE(stream.ok()) << stream.status().message();
        streams.push_back(std::move(*stream));
      }
      for (size_t p = 0; p < 3; ++p) {
        const Answer a = read(*streams[p]);
        ASSERT_TRUE(a.complete()) << a.failed.message();
        const json& theirs = one["beams"][p]["answers"];
        ASSERT_EQ(a.tokens.size(), theirs.size());
        for (size_t i = 0; i < theirs.size(); ++i)
          EXPECT_EQ(a.tokens[i], theirs[i]["tokens"].get<Ids>()) << p << " " << i;
        for (const Finished& f : a.finished)
          EXPECT_NEAR(f.score.value_or(0), theirs[size_t(f.choice)]["score"].get<double>(), 1e-3);
      }
      expect_all_pages_back(*engine);
    }
}

// Of which the answers are longer than a step has room for behind a prompt, so that what is computed again takes
// several.
constexpr const char* kDummy = "dummy:t5,layers=2,hidden=128,heads=4,head_dim=32,ffn=128,type=f32,step_ms=1";

class EncoderDecoderCaches : public ::testing::TestWithParam<const char*> {};

TEST_P(EncoderDecoderCaches, TheSameTokensWhicheverWay) {
  Case c(kDummy);
  c.kv.dtype = GetParam();
  if (c.kv.dtype == "int8") c.kv.group = 8;
  const Ran eight = expect_same_whichever_way(c, c.options.max_tokens_per_step);  // prompts are planned whole
  c.options.page_size = 5;
  EXPECT_EQ(c.run(8, 40, 60).tokens, eight.tokens) << "other pages";
}

INSTANTIATE_TEST_SUITE_P(All, EncoderDecoderCaches, ::testing::Values("float32", "float16", "bfloat16", "fp8", "int8"));

TEST(EncoderDecoders, ChoicesAndDraftsAreWhatEachWouldBeAlone) {
  Case c(kDummy);
  model::RunnerOptions m;
  m.model = c.model, m.threads = 1;
  auto plain = Engine::start(m, c.options);
  c.options.max_draft = 8, c.options.max_step_ms = 100;  // drafts are planned by what steps are learned to take
  auto drafting = Engine::start(m, c.options);
  ASSERT_TRUE(plain->wait_ready().ok() && drafting->wait_ready().ok());
  Request r = ask(30, 40);
  for (int32_t& t : r.prompt) t = 4 + t % 250;
  const Answer alone = run(*plain, r);
  ASSERT_TRUE(alone.complete()) << alone.failed.message();
  Request guessed = r;  // right at first, then wrong
  guessed.prediction.assign(alone.tokens[0].begin(), alone.tokens[0].begin() + 20);
  guessed.prediction.resize(40, 5);
  const Answer drafted = run(*drafting, guessed);
  ASSERT_TRUE(drafted.complete()) << drafted.failed.message();
  EXPECT_GT(drafted.finished[0].usage.accepted, 0);
  EXPECT_EQ(drafted.tokens, alone.tokens);

  r.sampling.temperature = 1;
  r.sampling.seed = 7;
  r.n = 3;
  const Answer three = run(*plain, r), again = run(*drafting, r);
  ASSERT_TRUE(three.complete() && again.complete());
  EXPECT_EQ(three.tokens.size(), 3u);
  EXPECT_EQ(again.tokens, three.tokens);
  r.n = 1;
  EXPECT_EQ(run(*plain, r).tokens[0], three.tokens[0]);
}

// A prompt that fills a step comes in although others decode all the time.
TEST(EncoderDecoders, APromptThatTakesAWholeStepWaitsForOneAndHasIt) {
  Case c(kDummy);
  c.options.max_running = 4;
  model::RunnerOptions m;
  m.model = c.model, m.threads = 1;
  auto engine = Engine::start(m, c.options);
  ASSERT_TRUE(engine->wait_ready().ok());
  std::vector<std::unique_ptr<Stream>> streams;
  auto submit = [&](int32_t prompt, int64_t output) {
    Request r = ask(prompt, output, int32_t(streams.size()));
    for (int32_t& t : r.prompt) t = 4 + t % 250;
    streams.push_back(std::move(*engine->submit(std::move(r))));
  };
  for (int i = 0; i < 3; ++i) submit(8, 30);
  submit(63, 4);
  for (int i = 0; i < 12; ++i) submit(8, 30);
  for (auto& stream : streams) EXPECT_TRUE(read(*stream).complete());
  expect_all_pages_back(*engine);
}

TEST(EncoderDecoders, WhatTheyCannotDoIsRefusedByName) {
  Case c(kDummy);
  model::RunnerOptions m;
  m.model = c.model, m.threads = 1;
  auto engine = Engine::start(m, c.options);
  ASSERT_TRUE(engine->wait_ready().ok());
  auto refusal = [&](Request r) {
    for (int32_t& t : r.prompt) t = 4 + t % 250;
    return run(*engine, std::move(r)).failed;
  };
  Request scored = ask(10, 4);
  scored.prompt_logprobs = 1;
  EXPECT_EQ(refusal(scored).field(), "prompt_logprobs");
  EXPECT_THAT(refusal(scored).message(), HasSubstr("encoder-decoder"));
  EXPECT_THAT(refusal(pooled(ask(10, 0))).message(), HasSubstr("embeddings of this model are not served"));
  EXPECT_THAT(refusal(ask(64, 4)).message(), HasSubstr("max_tokens_per_step"));
  EXPECT_THAT(refusal(ask(0, 4)).message(), HasSubstr("the prompt has no tokens"));
  EXPECT_THAT(refusal(ask(2100, 4)).message(), HasSubstr("the model's context is"));

  EngineOptions with_draft = c.options;
  with_draft.draft_model = "dummy:llama,layers=1,hidden=64";
  auto refused = Engine::start(m, with_draft);
  EXPECT_THAT(refused->wait_ready().message(), HasSubstr("the model is an encoder-decoder"));
  m.model = with_draft.draft_model, with_draft.draft_model = kDummy;
  EXPECT_THAT(Engine::start(m, with_draft)->wait_ready().message(), HasSubstr("it is an encoder-decoder"));
}

}  // namespace
}  // namespace kvasir::engine::testing
