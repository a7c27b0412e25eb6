#include <random>

#include "model/cpu/kernels.h"
#include "model/draws.h"
#include "model/philox.h"
#include "tests/model/sampler_rows.h"

namespace kvasir::model {
namespace {

TEST(Philox, KnownAnswers) {  // of the published generator
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
}

TEST(Sampler, TemperatureGivesTheSoftmax) {
  SamplingParams p;
  for (float t : {0.5f, 1.0f, 2.0f}) {
    p.temperature = t;
    expect_distribution(p, row(), softmax(row(), t));
  }
}
TEST(Sampler, TopK) {
  SamplingParams p;
  p.top_k = 7;
  expect_distribution(p, row(), filtered(softmax(row(), 1), [](double, size_t rank, double) { return rank < 7; }));
}
TEST(Sampler, TopP) {
  SamplingParams p;
  p.top_p = 0.6f;
  expect_distribution(p, row(),
                      filtered(softmax(row(), 1), [](double, size_t, double before) { return before < 0.6; }));
}
// What is told of a draw is the distribution that many draws have, and asking changes no draw.
TEST(Sampler, ProbabilitiesAfterSamplingAreThoseOfTheDraws) {
  auto check = [](SamplingParams p, const std::vector<double>& want) {
    const Sampled unasked = once(p, row());
    p.logprobs = kVocab;
    p.post_sampling_probs = true;
    const Sampled told = once(p, row());
    EXPECT_EQ(told.token, unasked.token);
    EXPECT_NEAR(std::exp(told.logprob), want[size_t(told.token)], 1e-5);
    double sum = 0, before = 1;
    for (const TokenLogprob& t : told.top) {
      EXPECT_NEAR(std::exp(t.logprob), want[size_t(t.token)], 1e-5) << t.token;
      EXPECT_LE(t.logprob, before);
      before = double(t.logprob);
      sum += std::exp(double(t.logprob));
    }
    EXPECT_NEAR(sum, 1, 1e-5);
    EXPECT_EQ(told.top.size(), size_t(std::count_if(want.begin(), want.end(), [](double w) { return w > 0; })));
  };
  SamplingParams p;
  p.temperature = 0.7f;
  check(p, softmax(row(), p.temperature));
  p.top_k = 7;
  check(p, filtered(softmax(row(), 0.7), [](double, size_t rank, double) { return rank < 7; }));
  p.top_k = 0;
  p.top_p = 0.6f;
  check(p, filtered(softmax(row(), 0.7), [](double, size_t, double before) { return before < 0.6f; }));
  p.top_p = 1;
  p.min_p = 0.1f;
  const std::vector<double> soft = softmax(row(), 0.7);
  const double heaviest = *std::max_element(soft.begin(), soft.end());
  check(p, filtered(soft, [&](double q, size_t, double) { return q >= double(0.1f) * heaviest; }));
  p = {.temperature = 0};
  std::vector<double> one(kVocab);
  one[size_t(once(p, row()).token)] = 1;
  check(p, one);
}
// The definition, by sorting: the heaviest until they hold top_p, of equal ones those of lower ids first.
TEST(Sampler, ANucleusOfThousandsIsTheOneThatSortingGives) {
  constexpr int kMany = 20011;
  std::mt19937 random(11);
  std::normal_distribution<float> noise(0, 1);
  for (int round = 0; round < 60; ++round) {
    std::vector<float> logits(kMany);
    for (float& l : logits) l = round % 2 ? noise(random) : std::round(4 * noise(random)) / 4;  // ties by the hundred
    SamplingParams p;
    p.seed = uint64_t(round);
    p.temperature = 1 + 0.1f * float(round % 11);
    p.top_p = round % 3 ? 0.95f : 0.7f + 0.0099f * float(round % 30);
    if (round % 5 == 0) p.min_p = 0.01f;
    std::vector<uint32_t> mask((kMany + 31) / 32, round % 4 == 0 ? 0x5aff0ff3u : ~0u);
    auto allowed = [&](int32_t t) { return mask[size_t(t) / 32] >> (t % 32) & 1; };
    float max = -100;
    for (int32_t t = 0; t < kMany; ++t)
      if (allowed(t)) max = std::max(max, logits[size_t(t)]);
    std::vector<float> weights(kMany);
    cpu::best_kernels().exponentials(logits.data(), kMany, max, 1 / p.temperature, weights.data());
    std::vector<std::pair<float, int32_t>> by;
    double all = 0;
    for (int32_t t = 0; t < kMany; ++t)
      if (allowed(t)) by.push_back({-weights[size_t(t)], t}), all += weights[size_t(t)];
    std::sort(by.begin(), by.end());
    double kept = 0, total = 0;
    std::vector<std::pair<int32_t, float>> nucleus;
    for (auto& [w, t] : by) {
      if (kept >= double(p.top_p) * all) break;
      kept += -w;
      if (-w >= p.min_p) nucleus.push_back({t, -w}), total += -w;
    }
    std::sort(nucleus.begin(), nucleus.end());
    for (int64_t position = 0; position < 20; ++position) {
      double below = 0;
      const double target = uniform(p.seed, 0, position, 0) * total;
      int32_t want = nucleus.back().first;
      for (auto& [t, w] : nucleus)
        if ((below += w) > target) {
          want = t;
          break;
        }
      EXPECT_EQ(once(p, logits, position, {.mask = mask.data()}).token, want)
          << round << '.' << position << ", nucleus " << nucleus.size();
    }
    EXPECT_GT(nucleus.size(), 1000u);
  }
}

TEST(Sampler, MinP) {
  SamplingParams p;
  p.min_p = 0.2f;
  auto soft = softmax(row(), 1);
  double most = *std::max_element(soft.begin(), soft.end());
  expect_distribution(p, row(), filtered(soft, [&](double v, size_t, double) { return v >= 0.2 * most; }));
}
TEST(Sampler, TypicalKeepsWhatSurprisesAsExpected) {
  SamplingParams p;
  p.typical_p = 0.3f;
  auto soft = softmax(row(), 1);
  double entropy = 0;
  for (double v : soft) entropy -= v * std::log(v);
  std::vector<std::pair<double, size_t>> order;
  for (size_t i = 0; i < soft.size(); ++i) order.emplace_back(std::fabs(-std::log(soft[i]) - entropy), i);
  std::sort(order.begin(), order.end());
  std::vector<double> want(soft.size());
  double mass = 0;
  for (auto& [odd, t] : order) {
    want[t] = soft[t], mass += soft[t];
    if (mass >= 0.3) break;
  }
  for (double& v : want) v /= mass;
  expect_distribution(p, row(), want);
}

TEST(Sampler, GreedyTakesTheFirstOfEquals) {
  SamplingParams p;
  p.temperature = 0;
  std::vector<float> l(50, -1);
  l[20] = l[30] = 2;
  EXPECT_EQ(once(p, l).token, 20);
}

TEST(Sampler, ASeededDrawDependsOnlyOnItsOwnCounter) {
  SamplingParams p;
  p.seed = 42;
  Sampler used(kVocab);
  for (int i = 0; i < 50; ++i) {
    auto l = row();
    SampleRow r{.params = &p, .position = i};
    Sampled out;
    Sampler::Refused refused;
    EXPECT_TRUE(used.sample(l, r, out, refused));
    EXPECT_EQ(out.token, once(p, row(), i).token);
  }
  SamplingParams other = p;
  other.seed = 43;
  int same = 0, same_choice = 0;
  for (int i = 0; i < 200; ++i) {
    same += once(p, row(), i).token == once(other, row(), i).token;
    same_choice += once(p, row(), i).token == once(p, row(), i, {.choice = 1}).token;
  }
  EXPECT_LT(same, 60);
  EXPECT_LT(same_choice, 60);
}

TEST(Sampler, LogprobsAreOfTheBiasedRowBeforeEverythingElse) {
  SamplingParams p;
  p.temperature = 0, p.logprobs = 3, p.repetition_penalty = 5, p.logit_bias = {{4, 50.0f}};
  std::vector<int32_t> output{4};
  auto l = row();
  l[4] += 50;
  auto soft = softmax(l, 1);
  Sampled s = once(p, row(), 0, {.output = output});
  ASSERT_EQ(s.top.size(), 3u);
  EXPECT_EQ(s.top[0].token, 4);
  EXPECT_NEAR(s.logprob, std::log(soft[size_t(s.token)]), 1e-4);
  EXPECT_GE(s.top[1].logprob, s.top[2].logprob);
}

// Instead of the likeliest, however unlikely they are; what was drawn is told beside them, once.
TEST(Sampler, NamedTokensHaveTheirLogprobs) {
  SamplingParams p;
  p.temperature = 0, p.logprobs = 5, p.logprob_token_ids = {7, 3, 7};
  const auto soft = softmax(row(), 1);
  Sampled s = once(p, row());
  ASSERT_EQ(s.top.size(), 3u);
  EXPECT_EQ(s.top[0].token, 7);
  EXPECT_EQ(s.top[1].token, 3);
  EXPECT_EQ(s.top[2].token, s.token);
  for (const TokenLogprob& t : s.top) EXPECT_NEAR(t.logprob, std::log(soft[size_t(t.token)]), 1e-4);
  p.logprob_token_ids = {s.token};
  EXPECT_EQ(once(p, row()).top.size(), 1u);
  p.logprob_token_ids = {7};
  std::vector<uint32_t> mask((kVocab + 31) / 32, 0);
  mask[0] = 1u << 5;  // what is drawn is another one, and the figures are those before the mask
  s = once(p, row(), 0, {.mask = mask.data()});
  ASSERT_EQ(s.top.size(), 2u);
  EXPECT_EQ(s.top[1].token, 5);
  EXPECT_NEAR(s.top[1].logprob, std::log(soft[5]), 1e-4);
  EXPECT_FALSE(draws_on_device({.params = &p}, true));
}

TEST(Sampler, BadSequencesDoNotGoOn) {
  SamplingParams p;
  p.temperature = 0;
  const std::vector<float> l{1, 3, 2, -1};
  p.bad_sequences = {{1}};
  Sampled s = once(p, l);
  EXPECT_EQ(s.token, 2);
  EXPECT_NEAR(s.logprob, std::log(softmax(l, 1)[2]), 1e-4);  // of the row as the model has it
  p.bad_sequences = {{3, 0, 1}};
  const std::vector<int32_t> other{0, 3, 0, 0}, begun{2, 3, 0}, half{2, 3};
  EXPECT_EQ(once(p, l, 0, {.output = other}).token, 1);
  EXPECT_EQ(once(p, l, 0, {.output = half}).token, 1);
  EXPECT_EQ(once(p, l, 0, {.output = begun}).token, 2);
  EXPECT_EQ(once(p, l, 0, {.prompt = begun}).token, 1);  // the answer's alone
  EXPECT_EQ(once(p, l, 0, {.output = half, .last = 0}).token, 2);
  EXPECT_EQ(once(p, l, 0, {.output = half, .last = 3}).token, 1);
  p.bad_sequences.push_back({0, 2});
  EXPECT_EQ(once(p, l, 0, {.output = begun}).token, 0);
  p.bad_sequences = {{0}, {1}, {2}, {3}};
  EXPECT_TRUE(once(p, l).nothing_allowed);
  EXPECT_FALSE(draws_on_device({.params = &p}, true));
}

TEST(Sampler, Penalties) {
  SamplingParams p;
  p.temperature = 0;
  std::vector<float> l{1, 3, 2, -1};
  std::vector<int32_t> twice{1, 1}, once_each{1, 2};
  EXPECT_EQ(once(p, l, 0, {.output = twice}).token, 1);
  p.frequency_penalty = 0.6f;
  EXPECT_EQ(once(p, l, 0, {.output = twice}).token, 2);  // 3 - 1.2 < 2
  EXPECT_EQ(once(p, l, 0, {.prompt = twice}).token, 1);  // output only
  p.frequency_penalty = 0, p.presence_penalty = 1.5f;
  EXPECT_EQ(once(p, l, 0, {.output = twice}).token, 2);
  p.presence_penalty = 0, p.repetition_penalty = 4;
  EXPECT_EQ(once(p, l, 0, {.prompt = once_each}).token, 0);  // 3/4 and 2/4 against 1
  EXPECT_EQ(once(p, l, 0, {.prompt = once_each, .output = twice}).token, 0);
}

TEST(Sampler, ScoreOnlyDrawsNothing) {
  SamplingParams p;
  p.logprobs = 2;
  Sampled s = once(p, row(), 0, {.score_only = true, .target = 9});
  EXPECT_EQ(s.token, 9);
  EXPECT_NEAR(s.logprob, std::log(softmax(row(), 1)[9]), 1e-5);
  EXPECT_EQ(s.top.size(), 2u);
}

// Logits within n standard deviations of the greatest, whatever the temperature; other filters are of what is left.
TEST(Sampler, TopNSigma) {
  const std::vector<float> logits = row();
  double mean = 0, squares = 0;
  for (float l : logits) mean += double(l) / kVocab;
  for (float l : logits) squares += (double(l) - mean) * (double(l) - mean) / kVocab;
  const double least = double(*std::max_element(logits.begin(), logits.end())) - std::sqrt(squares);
  std::vector<double> want(size_t(kVocab), 0.0);
  double total = 0;
  for (size_t t = 0; t < want.size(); ++t)
    if (double(logits[t]) >= least) total += want[t] = std::exp(double(logits[t]) / 2);
  for (double& w : want) w /= total;
  SamplingParams p;
  p.top_n_sigma = 1, p.temperature = 2;
  expect_distribution(p, logits, want);
  // Beside top-k of many, the same; beside top-k of one, that one.
  p.top_k = kVocab - 1;
  expect_distribution(p, logits, want);
  p.top_k = 1;
  EXPECT_EQ(once(p, logits).token, std::max_element(logits.begin(), logits.end()) - logits.begin());
  // What a mask forbids counts for nothing in the deviation.
  std::vector<uint32_t> mask((kVocab + 31) / 32, 0);
  mask[0] = 0b110;
  p.top_k = 0, p.top_n_sigma = 2;
  for (int i = 0; i < 50; ++i) EXPECT_TRUE(mask[0] >> once(p, logits, i, {.mask = mask.data()}).token & 1);
}

TEST(Sampler, NotANumberFailsTheRow) {
  for (float bad : {NAN, INFINITY, -INFINITY}) {
    auto l = row();
    l[70] = bad;
    EXPECT_TRUE(once({}, l).bad_logits);
  }
}

TEST(Sampler, EveryCombinationDrawsAnAllowedToken) {
  std::mt19937 random(3);
  for (int i = 0; i < 2000; ++i) {
    auto pick = [&](auto... v) {
      float all[] = {float(v)...};
      return all[random() % sizeof...(v)];
    };
    SamplingParams p;
    p.temperature = pick(0, 0.01, 1, 100), p.top_k = int(pick(0, 1, 5, 1000)), p.top_p = pick(1e-6, 0.5, 1);
    p.min_p = pick(0, 0.3, 1), p.top_n_sigma = pick(0, 1, 100), p.typical_p = pick(1e-6, 0.5, 1), p.seed = random();
    p.repetition_penalty = pick(0.5, 1, 2), p.presence_penalty = pick(-2, 0, 2);
    ASSERT_TRUE(p.validate(kVocab).ok());
    std::vector<int32_t> output{1, 2, 3};
    Sampled s = once(p, row(), i, {.output = output});
    ASSERT_FALSE(s.bad_logits);
    ASSERT_TRUE(s.token >= 0 && s.token < kVocab);
    ASSERT_LE(s.logprob, 0);
  }
}

TEST(SamplingParams, EachFieldIsRefusedByName) {
  auto field = [](auto set) {
    SamplingParams p;
    set(p);
    return p.validate(kVocab).field();
  };
  EXPECT_EQ(field([](auto& p) { p.temperature = -1; }), "temperature");
  EXPECT_EQ(field([](auto& p) { p.temperature = NAN; }), "temperature");
  EXPECT_EQ(field([](auto& p) { p.top_k = -1; }), "top_k");
  EXPECT_EQ(field([](auto& p) { p.top_p = 0; }), "top_p");
  EXPECT_EQ(field([](auto& p) { p.top_p = NAN; }), "top_p");
  EXPECT_EQ(field([](auto& p) { p.min_p = 2; }), "min_p");
  EXPECT_EQ(field([](auto& p) { p.typical_p = 0; }), "typical_p");
  EXPECT_EQ(field([](auto& p) { p.repetition_penalty = 0; }), "repetition_penalty");
  EXPECT_EQ(field([](auto& p) { p.presence_penalty = 3; }), "presence_penalty");
  EXPECT_EQ(field([](auto& p) { p.frequency_penalty = -3; }), "frequency_penalty");
  EXPECT_EQ(field([](auto& p) { p.logprobs = kVocab + 1; }), "logprobs");
  EXPECT_EQ(field([](auto& p) { p.logit_bias = {{kVocab, 1.0f}}; }), "logit_bias");
  EXPECT_EQ(field([](auto& p) { p.logprob_token_ids = {kVocab}; }), "logprob_token_ids");
  EXPECT_EQ(field([](auto& p) { p.bad_sequences = {{0, -1}}; }), "bad_words");
  EXPECT_EQ(field([](auto& p) { p.bad_sequences = {{}}; }), "bad_words");
  EXPECT_EQ(field([](auto&) {}), "");
}

}  // namespace
}  // namespace kvasir::model
