// The kernels of linear attention against what they stand for, in every instruction set.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "model/config.h"
#include "model/cpu/kernels.h"

namespace kvasir::model::cpu {
namespace {

// The delta rule as it is defined, in float64, beside what the kernels make of it, one row after another or all at
// once.
TEST(LinearAttention, TheDeltaRuleIsItsDefinitionInEveryInstructionSet) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (const auto& [keys, values] : {std::pair<int64_t, int64_t>{16, 16}, {32, 48}, {128, 128}}) {
    constexpr int64_t kRows = 5;
    auto some = [&](int64_t n, float scale) {
      std::vector<float> v(static_cast<size_t>(n));
      for (float& f : v) f = scale * normal(random);
      return v;
    };
    const float length = 1 / std::sqrt(float(keys));
    const std::vector<float> q = some(kRows * keys, length), k = some(kRows * keys, length),
                             v = some(kRows * values, 1), before = some(keys * values, 1),
                             decay{.9f, .5f, .99f, .1f, 1}, beta{.5f, .9f, .1f, 1, .3f};
    std::vector<double> state(before.begin(), before.end()), out(static_cast<size_t>(kRows * values));
    for (int64_t t = 0; t < kRows; ++t)
      for (int64_t c = 0; c < values; ++c) {
        auto at = [&](int64_t j) -> double& { return state[size_t(j * values + c)]; };
        double had = 0;
        for (int64_t j = 0; j < keys; ++j)
          at(j) *= double(decay[size_t(t)]), had += at(j) * double(k[size_t(t * keys + j)]);
        const double delta = (double(v[size_t(t * values + c)]) - had) * double(beta[size_t(t)]);
        for (int64_t j = 0; j < keys; ++j) {
          at(j) += double(k[size_t(t * keys + j)]) * delta;
          out[size_t(t * values + c)] += at(j) * double(q[size_t(t * keys + j)]);
        }
      }
    std::vector<float> first_state, first_out;
    for (const Kernels* kernels : runnable_kernels())
      for (int64_t step : {kRows, int64_t(1)}) {
        std::vector<float> s = before, made(static_cast<size_t>(kRows * (values + 3)));
        for (int64_t t = 0; t < kRows; t += step)
          kernels->delta_rule({step, keys, values, q.data() + t * keys, k.data() + t * keys, v.data() + t * values,
                               decay.data() + t, beta.data() + t, s.data(), made.data() + t * (values + 3),
                               values + 3});
        for (size_t i = 0; i < s.size(); ++i) ASSERT_NEAR(s[i], state[i], 1e-5) << kernels->name;
        for (int64_t t = 0; t < kRows; ++t)
          for (int64_t c = 0; c < values; ++c)
            ASSERT_NEAR(made[size_t(t * (values + 3) + c)], out[size_t(t * values + c)], 1e-5) << kernels->name;
        if (first_out.empty()) first_state = s, first_out = made;
        EXPECT_EQ(s, first_state) << kernels->name << " by " << step;
        EXPECT_EQ(made, first_out) << kernels->name << " by " << step;
      }
  }
}

TEST(LinearAttention, TheShortConvolutionIsTheSameBitsInEveryInstructionSet) {
  std::mt19937 random(8);
  std::normal_distribution<float> normal;
  constexpr int64_t kChannels = 51, kTaps = 4;
  std::vector<float> x(static_cast<size_t>(kTaps * kChannels)), w(static_cast<size_t>(kTaps * 64)), first;
  for (std::vector<float>* v : {&x, &w})
    for (float& f : *v) f = normal(random);
  const float* rows[kTaps];
  for (int64_t j = 0; j < kTaps; ++j) rows[j] = x.data() + j * kChannels;
  for (const Kernels* kernels : runnable_kernels()) {
    std::vector<float> out(static_cast<size_t>(kChannels));
    kernels->short_convolution(rows, w.data(), 64, kTaps, kChannels, out.data());
    for (int64_t c = 0; c < kChannels; ++c) {
      double sum = 0;
      for (int64_t j = 0; j < kTaps; ++j) sum += double(w[size_t(j * 64 + c)]) * double(rows[j][c]);
      EXPECT_NEAR(out[size_t(c)], sum / (1 + std::exp(-sum)), 1e-5) << kernels->name;
    }
    if (first.empty()) first = out;
    EXPECT_EQ(out, first) << kernels->name;
  }
}

}  // namespace
}  // namespace kvasir::model::cpu
