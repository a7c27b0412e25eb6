// Mixtures of experts: which are chosen and what each counts, and that rows share experts without knowing it.
#include "model/experts.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "model/philox.h"
#include "tests/model/drive.h"

namespace kvasir::model {
namespace {

using Ids = std::vector<int32_t>;

std::vector<float> numbers(uint32_t seed, size_t n, float spread) {
  std::vector<float> out;
  for (uint32_t i = 0; i < n; ++i) out.push_back((float(philox({i, 0, 0, 0}, {seed, 0})[0]) * 0x1p-32f - .5f) * spread);
  return out;
}

// As the papers have it, in float64 and by sorting.
std::vector<std::pair<int32_t, double>> plainly(const Routing& r, const std::vector<float>& logits,
                                                const std::vector<float>& correction) {
  const auto n = size_t(r.experts);
  std::vector<double> scores(n), choice(n);
  double sum = 0;
  for (size_t i = 0; i < n; ++i) {
    scores[i] =
        r.scores_of == ExpertScores::sigmoid ? 1 / (1 + std::exp(-double(logits[i]))) : std::exp(double(logits[i]));
    sum += scores[i];
  }
  for (size_t i = 0; i < n; ++i) {
    if (r.scores_of == ExpertScores::softmax) scores[i] /= sum;
    choice[i] = scores[i] + (correction.empty() ? 0.0 : double(correction[i]));
  }
  const size_t size = n / size_t(r.groups);
  std::vector<std::pair<double, size_t>> groups;
  for (size_t g = 0; g < size_t(r.groups); ++g) {
    std::vector<double> of(choice.begin() + int64_t(g * size), choice.begin() + int64_t((g + 1) * size));
    std::sort(of.rbegin(), of.rend());
    groups.emplace_back(-(of[0] + (size > 1 ? of[1] : 0)), g);
  }
  std::sort(groups.begin(), groups.end());
  groups.resize(size_t(r.used_groups));
  std::vector<std::pair<double, int32_t>> order;
  for (const auto& [score, g] : groups)
    for (size_t i = g * size; i < (g + 1) * size; ++i) order.emplace_back(-choice[i], int32_t(i));
  std::sort(order.begin(), order.end());
  order.resize(size_t(r.used));
  sum = 0;
  for (const auto& [c, i] : order) sum += scores[size_t(i)];
  if (!r.normalized && r.scores_of != ExpertScores::of_chosen) sum = 1;
  std::vector<std::pair<int32_t, double>> out;
  for (const auto& [c, i] : order) out.emplace_back(i, scores[size_t(i)] / sum * double(r.scale));
  return out;
}

TEST(Experts, AreChosenAndWeighedAsThePapersHaveIt) {
  const Routing kinds[] = {
      {.experts = 8, .used = 2},
      {.experts = 128, .used = 8, .normalized = true},
      {.experts = 32, .used = 4, .scores_of = ExpertScores::of_chosen},
      {.experts = 16, .used = 16, .scores_of = ExpertScores::of_chosen},
      {.experts = 64, .used = 6, .scores_of = ExpertScores::sigmoid, .normalized = true, .scale = 2.5f},
      {.experts = 64, .used = 6, .scores_of = ExpertScores::sigmoid, .corrected = true, .groups = 8, .used_groups = 3},
      {.experts = 8, .used = 2, .normalized = true, .groups = 8, .used_groups = 4},
      {.experts = 1, .used = 1},
  };
  for (const Routing& r : kinds) {
    for (uint32_t seed = 0; seed < 50; ++seed) {
      SCOPED_TRACE(testing::Message() << r.experts << " experts, seed " << seed);
      const auto logits = numbers(seed, size_t(r.experts), 8);
      const auto correction = r.corrected ? numbers(seed + 1000, size_t(r.experts), 1) : std::vector<float>();
      Ids chosen(static_cast<size_t>(r.used));
      std::vector<float> weights(chosen.size());
      r.choose(logits.data(), correction.empty() ? nullptr : correction.data(), chosen.data(), weights.data());
      const auto want = plainly(r, logits, correction);
      for (size_t k = 0; k < want.size(); ++k) {
        EXPECT_EQ(chosen[k], want[k].first);
        EXPECT_NEAR(double(weights[k]), want[k].second, 1e-5);
      }
    }
  }
}

TEST(Experts, EqualScoresGoToTheFirstAndNoNumberIsChosenLast) {
  const Routing r{.experts = 4, .used = 3};
  Ids chosen(3);
  std::vector<float> weights(3);
  const float equal[] = {1, 2, 2, 2};
  r.choose(equal, nullptr, chosen.data(), weights.data());
  EXPECT_EQ(chosen, (Ids{1, 2, 3}));
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float broken[] = {nan, 2, nan, 3};
  r.choose(broken, nullptr, chosen.data(), weights.data());
  EXPECT_EQ(chosen, (Ids{3, 1, 0}));
  EXPECT_TRUE(std::isnan(weights[0])) << "the row is to be seen as broken";
  const float none[] = {nan, nan, nan, nan};
  r.choose(none, nullptr, chosen.data(), weights.data());
  EXPECT_EQ(chosen, (Ids{0, 1, 2}));
}

TEST(Experts, WhatCannotBeIsRefusedByName) {
  const struct {
    ExpertsConfig config;
    const char* says;
  } wrong[] = {
      {{.routing = {.experts = 8, .used = 9}, .ffn = 64}, "experts a token is 9; it must be from 1 to 8"},
      {{.routing = {.experts = 5000, .used = 1}, .ffn = 64}, "number of experts is 5000"},
      {{.routing = {.experts = 8, .used = 0}, .ffn = 64}, "experts a token is 0"},
      {{.routing = {.experts = 8, .used = 2}, .ffn = 100}, "feed-forward size is 100; it must be a multiple of 16"},
      {{.routing = {.experts = 8, .used = 2, .scale = 0}, .ffn = 64}, "scale of the experts' sum is 0"},
      {{.routing = {.experts = 8, .used = 2, .groups = 3}, .ffn = 64}, "of different sizes"},
      {{.routing = {.experts = 8, .used = 4, .groups = 4, .used_groups = 1}, .ffn = 64}, "too few"},
      {{.routing = {.experts = 8, .used = 2}, .ffn = 64, .dense = {true}}, "1 of its 3 layers"},
  };
  for (const auto& w : wrong) EXPECT_THAT(w.config.validate(3).message(), testing::HasSubstr(w.says));
}

constexpr const char* kModel =
    "dummy:qwen2_moe,layers=3,hidden=128,heads=4,kv_heads=2,head_dim=32,experts=12,experts_used=3,expert_ffn=96,"
    "shared_ffn=64,context=512,type=";

std::vector<float> all_logprobs(Drive& drive, const std::vector<Piece>& pieces) {
  SamplingParams params = Drive::greedy();
  params.logprobs = 512;
  std::vector<float> out;
  for (const Sampled& s : drive.step(pieces, params)) {
    EXPECT_FALSE(s.bad_logits);
    std::vector<float> row(512);
    for (const TokenLogprob& t : s.top) row[size_t(t.token)] = t.logprob;
    out.insert(out.end(), row.begin(), row.end());
  }
  return out;
}

// Many rows of an expert, one row, with other company, by one thread and two: the same bits.
TEST(Experts, RowsThatShareOneDoNotKnowIt) {
  Ids prompt, other;
  for (int32_t i = 0; i < 120; ++i) prompt.push_back((7 * i * i + 3 * i + 1) % 256), other.push_back((5 * i + 2) % 256);
  for (const char* type : {"q4_0", "q4_1", "q8_0", "bf16", "f32"}) {
    SCOPED_TRACE(type);
    const std::string model = std::string(kModel) + type;
    Drive one(model, 1, false, 256, 2), two(model, 2, false, 256, 2);
    const auto whole = all_logprobs(one, {{0, 0, prompt}});
    EXPECT_EQ(all_logprobs(two, {{0, 0, prompt}}), whole);
    EXPECT_EQ(all_logprobs(two, {{0, 119, {prompt.back()}}}), whole);
    all_logprobs(two, {{1, 0, {other.begin(), other.begin() + 77}}});
    const auto both = all_logprobs(two, {{1, 77, {other[77]}}, {0, 40, {prompt.begin() + 40, prompt.end()}}});
    EXPECT_TRUE(std::equal(whole.begin(), whole.end(), both.begin() + 512));
    for (size_t i = 0; i < prompt.size(); ++i)
      if (auto last = all_logprobs(one, {{0, int64_t(i), {prompt[i]}}}); i + 1 == prompt.size()) EXPECT_EQ(last, whole);
  }
}

// Products of integers are near those of float32, expert by expert too.
TEST(Experts, WhatWasChosenIsCounted) {
  Drive drive("dummy:qwen3_moe,layers=3,hidden=64,heads=4,kv_heads=2,head_dim=16,experts=8,experts_used=2,type=f32", 2);
  EXPECT_EQ(drive.runner->expert_load().tokens, 0);
  drive.step({{0, 0, Ids{5, 9, 100, 7, 3, 40}}});
  const ExpertLoad first = drive.runner->expert_load();
  EXPECT_EQ(first.tokens, 6 * 2 * 3);
  EXPECT_GE(first.reads, 2 * 3);
  EXPECT_LE(first.reads, 8 * 3);
  EXPECT_GE(first.usual, 1);
  EXPECT_LE(first.usual, first.worst);
  EXPECT_LE(first.worst, 8 / 2.0);  // each token's experts differ
  drive.step({{0, 6, Ids{11}}});
  const ExpertLoad then = drive.runner->expert_load();
  EXPECT_EQ(then.tokens, 7 * 2 * 3);
  EXPECT_EQ(then.reads, first.reads + 2 * 3);  // one token reads its own
  Drive dense("dummy:llama,layers=1,hidden=64,type=f32", 1);
  dense.step({{0, 0, Ids{5}}});
  EXPECT_EQ(dense.runner->expert_load().tokens, 0);
}

TEST(Experts, IntegersAreNearFloat) {
  Ids prompt;
  for (int32_t i = 0; i < 40; ++i) prompt.push_back((11 * i + 3) % 256);
  for (const char* type : {"q4_0", "q8_0"}) {
    SCOPED_TRACE(type);
    Drive integers(std::string(kModel) + type, 2, false, 256), floats(std::string(kModel) + type, 2, true, 256);
    const auto a = all_logprobs(integers, {{0, 0, prompt}}), b = all_logprobs(floats, {{0, 0, prompt}});
    for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 0.05) << i;
  }
}

}  // namespace
}  // namespace kvasir::model
