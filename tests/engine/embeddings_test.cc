// Prompts as wholes: what the engine makes of their hidden states, whichever way they travel, beside answers, and to
// the last page back.
#include "tests/engine/pooled.h"
#include "tests/engine/real_case.h"
#include "tests/model/architectures.h"
#include "tests/model/drive.h"

namespace kvasir::engine::testing {
namespace {

using model::Pooling;

// What FakeRunner's hidden states come to: {the token, where it stands, what follows, 1}.
std::vector<float> expected_embedding(const Request& r, Pooling how) {
  std::vector<float> sum(4, 0.0f);
  const auto prompt = int64_t(r.prompt.size());
  int64_t rows = 0;
  for (int64_t t = 0; t < prompt; ++t) {
    if ((how == Pooling::last && t + 1 < prompt) || (how == Pooling::cls && t > 0)) continue;
    const std::vector<int32_t> seen(r.prompt.begin(), r.prompt.begin() + t + 1);
    sum[0] += float(seen.back());
    sum[1] += float(t + 1);
    sum[2] += float(draw_from(seen, {.temperature = 0}, 0));
    sum[3] += 1;
    ++rows;
  }
  EXPECT_TRUE(model::finish_embedding(sum, rows, r.dimensions.value_or(0), r.normalize.value_or(true)));
  return sum;
}

class Embeddings : public ::testing::TestWithParam<std::tuple<Pooling, int>> {
 protected:
  Embeddings() { h_.script.pooling = std::get<0>(GetParam()), h_.script.depth = std::get<1>(GetParam()); }
  Harness h_;
};
INSTANTIATE_TEST_SUITE_P(All, Embeddings,
                         ::testing::Combine(::testing::Values(Pooling::last, Pooling::mean, Pooling::cls),
                                            ::testing::Values(1, 2)));

TEST_P(Embeddings, AreTheSameAloneBatchedInChunksAndBesideAnswers) {
  Engine& engine = h_.start();
  std::vector<Request> requests;
  std::vector<std::unique_ptr<Stream>> streams;
  for (int32_t i = 0; i < 60; ++i) {  // a step has room for 64 tokens: many take several
    requests.push_back(i % 3 == 0 ? ask(20 + i, 30, i) : pooled(ask(1 + (i * 37) % 300, 0, i)));
    if (i % 4 == 1) requests.back().normalize = false;
    if (i % 5 == 1) requests.back().dimensions = 2;
    if (i % 3 == 0) requests.back().dimensions.reset(), requests.back().normalize.reset();
    auto stream = engine.submit(requests.back());
    ASSERT_TRUE(stream.ok()) << stream.status().message();
    streams.push_back(std::move(*stream));
  }
  for (size_t i = 0; i < streams.size(); ++i) {
    SCOPED_TRACE(i);
    const Answer a = read(*streams[i]);
    if (requests[i].pooled) {
      EXPECT_EQ(embedding(a), expected_embedding(requests[i], h_.script.pooling));
    } else {
      ASSERT_TRUE(a.complete()) << a.failed.message();
      EXPECT_EQ(a.tokens[0], expected(requests[i]));
    }
  }
  expect_all_pages_back(engine);
}

TEST_P(Embeddings, OutliveBeingPreempted) {
  h_.pages(60);
  h_.options.max_running = 8;
  Engine& engine = h_.start();
  std::vector<Request> requests;
  std::vector<std::unique_ptr<Stream>> streams;
  for (int32_t i = 0; i < 24; ++i) {
    requests.push_back(i % 2 == 0 ? ask(12, 60, i) : pooled(ask(100 + i, 0, i)));
    auto stream = engine.submit(requests.back());
    ASSERT_TRUE(stream.ok()) << stream.status().message();
    streams.push_back(std::move(*stream));
  }
  for (size_t i = 0; i < streams.size(); ++i) {
    const Answer a = read(*streams[i]);
    if (requests[i].pooled)
      EXPECT_EQ(embedding(a), expected_embedding(requests[i], h_.script.pooling)) << i;
    else
      EXPECT_EQ(a.tokens[0], expected(requests[i])) << i;
  }
  expect_all_pages_back(engine);
}

// A prefix is shared where only the end of a prompt matters, and nothing stays behind elsewhere.
TEST_P(Embeddings, LeaveInTheCacheWhatOthersCanUse) {
  Engine& engine = h_.start();
  const Request r = pooled(ask(40, 0, 7));
  const auto first = embedding(run(engine, r));
  const int64_t kept = engine.stats().pages_cached;
  const Answer again = run(engine, r);
  EXPECT_EQ(embedding(again), first);
  const bool last = h_.script.pooling == Pooling::last;
  EXPECT_EQ(kept > 0, last);
  EXPECT_EQ(again.finished[0].usage.cached_tokens > 0, last);
}

TEST_P(Embeddings, BadStatesFailAloneAndByWord) {
  h_.script.poison = 999;
  Engine& engine = h_.start();
  Request bad = pooled(ask(30, 0)), good = pooled(ask(30, 0, 1));
  for (int32_t& t : bad.prompt) t = 999;
  auto one = engine.submit(bad), two = engine.submit(good);
  EXPECT_NE(read(**one).failed.message().find("not numbers"), std::string::npos);
  EXPECT_EQ(embedding(read(**two)), expected_embedding(good, h_.script.pooling));
  expect_all_pages_back(engine);
}

TEST_P(Embeddings, AreCancelledAndExpireAsAnswersDo) {
  h_.script.step = std::chrono::milliseconds(5);
  Engine& engine = h_.start();
  auto long_one = engine.submit(pooled(ask(3000, 0)));
  (*long_one)->cancel();
  const Answer a = read(**long_one);
  ASSERT_FALSE(a.finished.empty());
  EXPECT_EQ(a.finished.back().reason, FinishReason::cancelled);
  Request late = pooled(ask(3000, 0, 1));
  late.deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
  EXPECT_EQ(run(engine, late).failed.code(), Code::deadline_exceeded);
  expect_all_pages_back(engine);
}

TEST(EmbeddingRequests, AreRefusedByName) {
  Harness h;
  Engine& engine = h.start();
  auto says = [&](Request r) { return engine.submit(std::move(r)).status(); };
  Request r = pooled(ask(5, 0));
  r.dimensions = 5;
  EXPECT_EQ(says(r).field(), "dimensions");
  EXPECT_NE(says(r).message().find("1 to 4"), std::string::npos);
  r = pooled(ask(5, 0));
  r.n = 2;
  EXPECT_EQ(says(r).field(), "n");
  r = pooled(ask(5, 0));
  r.scored = {kVocab};
  EXPECT_EQ(says(r).field(), "scored");
  r = pooled(ask(5, 0));
  r.max_tokens = 3;
  EXPECT_EQ(says(r).field(), "max_tokens");
}

// Each token's log-probability after the prompt, as a request for that one would have it.
TEST(Scores, AreTheLogProbabilitiesOfTheNextToken) {
  Harness h;
  Engine& engine = h.start();
  Request r = pooled(ask(150, 0));
  r.scored = {3, 5};
  EXPECT_EQ(embedding(run(engine, r)), (std::vector<float>{-150, -150}));  // the fake's: how long the text is
  expect_all_pages_back(engine);
}

// Against sentence-transformers, for every architecture and each way of pooling.
TEST(RealEmbeddings, AreThoseOfSentenceTransformers) {
  const auto stored = model::fixture("embeddings.json"), networks = model::fixture("architectures.json");
  double worst = 0;
  for (const auto& one : stored["cases"]) {
    SCOPED_TRACE(one["network"].get<std::string>());
    model::Folder folder("embeddings");
    for (const auto& network : networks["cases"])
      if (network["name"] == one["network"]) model::StoredNetwork(network).write_folder(folder);
    for (const char* pooling : {"last", "mean", "cls"}) {
      Case c(folder.path.string());
      model::RunnerOptions m;
      m.model = c.model;
      m.threads = 1;
      m.pooling = pooling;
      auto engine = Engine::start(m, c.options);
      ASSERT_TRUE(engine->wait_ready().ok()) << engine->wait_ready().message();
      for (size_t i = 0; i < stored["texts"].size(); ++i) {
        // LongRoPE's factors are those of the context that is served, here the longer; transformers' of each text.
        if (one["network"] == "phi3 short" || (one["network"] == "phi3 long" && i > 0)) continue;
        Request r;
        r.prompt = stored["texts"][i].get<std::vector<int32_t>>();
        r.detokenize = false;
        const auto got = embedding(run(*engine, pooled(r)));
        const std::vector<double> want = one["embeddings"][pooling][i];
        const double off = 1 - cosine(got, want);
        EXPECT_LT(off, 1e-4) << pooling << " of text " << i;
        worst = std::max(worst, off);
        double length = 0;
        for (float x : got) length += double(x) * x;
        EXPECT_NEAR(length, 1, 1e-5);
      }
    }
  }
  RecordProperty("worst_cosine", std::to_string(worst));
}

std::unique_ptr<Engine> engine_of(const std::string& model, const char* pooling, const EngineOptions& options) {
  model::RunnerOptions m;
  m.model = model;
  m.threads = 2;
  m.pooling = pooling;
  auto engine = Engine::start(m, options);
  EXPECT_TRUE(engine->wait_ready().ok()) << engine->wait_ready().message();
  return engine;
}

TEST(Encoders, EmbedAsSentenceTransformersDoesInAnyCompany) {
  const auto stored = model::fixture("embeddings.json");
  for (const auto& one : stored["encoders"]) {
    if (!one.contains("embeddings")) continue;
    SCOPED_TRACE(one["name"].get<std::string>());
    model::Folder folder("encoder");
    model::StoredNetwork(one).write_folder(folder);
    for (const char* pooling : {"last", "mean", "cls"}) {
      auto engine = engine_of(folder.path.string(), pooling, Case("").options);
      EXPECT_TRUE(engine->info().encoder);
      std::vector<std::unique_ptr<Stream>> streams;
      std::vector<std::vector<float>> first(2);
      for (size_t i = 0; i < 12; ++i) {  // a step has room for 64 tokens: one of the long ones
        Request r;
        r.prompt = stored["texts"][i % 2].get<std::vector<int32_t>>();
        r.detokenize = false;
        streams.push_back(*engine->submit(pooled(r)));
      }
      for (size_t i = 0; i < 12; ++i) {
        const auto got = embedding(read(*streams[i]));
        if (first[i % 2].empty()) first[i % 2] = got;
        EXPECT_EQ(got, first[i % 2]) << "alone or in company";
        EXPECT_LT(1 - cosine(got, one["embeddings"][pooling][i % 2].get<std::vector<double>>()), 1e-4) << pooling << i;
      }
      EXPECT_EQ(engine->stats().pages_cached, 0);
      expect_all_pages_back(*engine);
    }
  }
}

TEST(Encoders, ScorePairsAsTransformersDoes) {
  const auto stored = model::fixture("embeddings.json");
  int seen = 0;
  for (const auto& one : stored["encoders"]) {
    if (!one.contains("pairs")) continue;
    SCOPED_TRACE(one["name"].get<std::string>());
    model::Folder folder("encoder");
    model::StoredNetwork(one).write_folder(folder);
    auto engine = engine_of(folder.path.string(), "auto", Case("").options);
    ASSERT_EQ(engine->info().labels, 1);
    for (const auto& pair : one["pairs"]) {
      const auto got = embedding(run(*engine, scored_pair(pair)));
      ASSERT_EQ(got.size(), 1u);
      EXPECT_NEAR(got[0], pair[2].get<double>(), 1e-3);
      ++seen;
    }
    Request r = pooled(ask(5, 0));
    EXPECT_NE(engine->submit(r).status().message().find("classifier"), std::string::npos);
  }
  EXPECT_GE(seen, 4);
}

TEST(Encoders, SayWhatTheyDoNotDo) {
  const auto stored = model::fixture("embeddings.json");
  model::Folder folder("encoder");
  model::StoredNetwork(stored["encoders"][0]).write_folder(folder);
  EngineOptions options = Case("").options;
  options.max_tokens_per_step = 32;
  auto engine = engine_of(folder.path.string(), "auto", options);
  Request r = ask(5, 3);
  EXPECT_NE(engine->submit(r).status().message().find("encoder"), std::string::npos);
  r = pooled(ask(5, 0));
  r.scored = {1};
  EXPECT_FALSE(engine->submit(r).ok());
  Request too_long = pooled(ask(40, 0));
  for (int32_t& t : too_long.prompt) t %= 250;
  const Answer long_one = run(*engine, too_long);
  EXPECT_NE(long_one.failed.message().find("max_tokens_per_step"), std::string::npos) << long_one.failed.message();
}

// Bit for bit: alone, all at once, in small steps, and beside answers.
TEST(RealEmbeddings, AreTheSameBitsWhicheverWayTheyTravel) {
  for (const char* pooling : {"last", "mean"}) {
    std::vector<std::vector<float>> expected;
    for (int64_t step_tokens : {int64_t(512), int64_t(24)}) {
      for (bool together : {false, true}) {
        Case c("dummy:llama,layers=3,hidden=64,heads=4,kv_heads=2,head_dim=16,ffn=96,vocab=300,type=f32");
        c.options.max_tokens_per_step = step_tokens;
        model::RunnerOptions m;
        m.model = c.model;
        m.threads = 2;
        m.pooling = pooling;
        auto engine = Engine::start(m, c.options);
        ASSERT_TRUE(engine->wait_ready().ok()) << engine->wait_ready().message();
        std::vector<std::unique_ptr<Stream>> streams, answers;
        std::vector<std::vector<float>> got;
        for (int32_t i = 0; i < 6; ++i) {
          Request r = pooled(ask(20 + 30 * i, 0, i)), answer = ask(9, 40, i);
          for (int32_t& t : r.prompt) t = 4 + t % 250;
          for (int32_t& t : answer.prompt) t = 4 + t % 250;
          if (together) answers.push_back(*engine->submit(answer));
          streams.push_back(*engine->submit(r));
          if (!together) got.push_back(embedding(read(*streams.back())));
        }
        if (together)
          for (auto& stream : streams) got.push_back(embedding(read(*stream)));
        for (auto& answer : answers) EXPECT_TRUE(read(*answer).complete());
        if (expected.empty()) expected = got;
        EXPECT_EQ(got, expected) << pooling << ' ' << step_tokens << ' ' << together;
        expect_all_pages_back(*engine);
      }
    }
  }
}

}  // namespace
}  // namespace kvasir::engine::testing
