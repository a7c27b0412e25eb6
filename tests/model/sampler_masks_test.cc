// Draws under masks: those that are there at once, and those of constraints that come later.
#include "tests/model/sampler_rows.h"

namespace kvasir::model {
namespace {

TEST(Sampler, OfAMaskOnlyWhatItAllowsHasAProbability) {
  SamplingParams p;
  p.logprobs = 5;
  p.post_sampling_probs = true;
  std::vector<uint32_t> mask((kVocab + 31) / 32, 0);
  mask[0] = 0b1010;
  const Sampled told = once(p, row(), 0, {.mask = mask.data()});
  ASSERT_EQ(told.top.size(), 2u);
  EXPECT_NEAR(std::exp(told.top[0].logprob) + std::exp(told.top[1].logprob), 1, 1e-6);
  p.logprob_token_ids = {1, 2};
  const Sampled named = once(p, row(), 0, {.mask = mask.data()});
  EXPECT_LT(named.top[1].logprob, -9999);  // never
}

TEST(Sampler, AMaskIsObeyedAndADeadEndIsFlagged) {
  SamplingParams p;
  std::vector<uint32_t> mask((kVocab + 31) / 32, 0);
  mask[0] = 1u << 5;
  mask[1] = 1u << 2;  // 34
  for (int i = 0; i < 200; ++i) {
    int32_t t = once(p, row(), i, {.mask = mask.data()}).token;
    EXPECT_TRUE(t == 5 || t == 34);
  }
  std::fill(mask.begin(), mask.end(), 0);
  EXPECT_TRUE(once(p, row(), 0, {.mask = mask.data()}).nothing_allowed);
}

// Allows what its mask allows; the mask is there at once, or after so many times of asking.
class Allows final : public Constraint {
 public:
  Allows(std::vector<uint32_t> bits, int late) : bits_(std::move(bits)), late_(late) {}
  bool take(int32_t token, bool) override {
    const bool allowed = bits_[size_t(token) / 32] >> (token % 32) & 1;
    if (allowed) ++taken;
    return allowed;
  }
  const uint32_t* mask() override { return late_-- > 0 ? nullptr : bits_.data(); }
  int taken = 0;

 private:
  std::vector<uint32_t> bits_;
  int late_;
};

TEST(Sampler, AConstraintGivesTheAllowedDistributionWhetherItsMaskIsThereAtOnceOrLater) {
  std::vector<uint32_t> bits((kVocab + 31) / 32, 0);
  std::vector<double> want = softmax(row(), 1);
  double allowed = 0;
  for (int t = 0; t < kVocab; ++t) {
    if (t % 3 == 1)
      bits[size_t(t) / 32] |= 1u << (t % 32), allowed += want[size_t(t)];
    else
      want[size_t(t)] = 0;
  }
  for (double& w : want) w /= allowed;
  constexpr int kDraws = 5000;
  std::vector<int> counts(want.size());
  SamplingParams p;
  int refused_draws = 0;
  for (int i = 0; i < kDraws; ++i) {
    Allows at_once(bits, 0), later(bits, 1), never(bits, 9);
    const Sampled a = once(p, row(), i, {.constraint = &at_once});
    ++counts[size_t(a.token)];
    EXPECT_EQ(at_once.taken, 1);
    Sampler sampler(kVocab);
    std::vector<float> logits = row();
    SampleRow r{.params = &p, .position = i, .constraint = &later};
    Sampled b;
    Sampler::Refused refused;
    if (!sampler.sample(logits, r, b, refused)) {
      ++refused_draws;
      Sampler another(kVocab);  // whichever thread is free
      another.sample_again(logits, r, refused, b);
      Sampled c;
      r.constraint = &never;
      EXPECT_FALSE(sampler.sample(logits = row(), r, c, refused));
      another.sample_again(logits, r, refused, c);
      EXPECT_TRUE(c.late && c.token < 0 && never.taken == 0);
    }
    EXPECT_FALSE(b.late);
    EXPECT_EQ(a.token, b.token);
    EXPECT_EQ(a.logprob, b.logprob);
    EXPECT_NEAR(a.logprob, std::log(softmax(row(), 1)[size_t(a.token)]), 1e-4);
  }
  EXPECT_GT(refused_draws, kDraws / 10);
  double chi = 0;
  for (size_t t = 0; t < want.size(); ++t) {
    if (want[t] == 0) {
      EXPECT_EQ(counts[t], 0) << t;
    }
    if (want[t] * kDraws >= 5)
      chi += (counts[t] - want[t] * kDraws) * (counts[t] - want[t] * kDraws) / (want[t] * kDraws);
  }
  EXPECT_LT(chi, kVocab / 3 + 5 * std::sqrt(2.0 * kVocab / 3));
}

TEST(Sampler, AConstrainedTokensLogprobIsThatBeforePenalties) {
  SamplingParams p;
  p.temperature = 0;
  p.frequency_penalty = 2;
  std::vector<uint32_t> bits((kVocab + 31) / 32, 0);
  bits[0] = 1u << 7;
  const std::vector<int32_t> output{7, 7, 7};
  Allows only(bits, 1);
  std::vector<float> logits = row();
  Sampler sampler(kVocab);
  SampleRow r{.params = &p, .output = output, .constraint = &only};
  Sampled out;
  Sampler::Refused refused;
  ASSERT_FALSE(sampler.sample(logits, r, out, refused));
  sampler.sample_again(logits, r, refused, out);
  EXPECT_EQ(out.token, 7);
  EXPECT_NEAR(out.logprob, std::log(softmax(row(), 1)[7]), 1e-4);
}

}  // namespace
}  // namespace kvasir::model
