// A row of logits for tests of the sampler, one draw from it, and what many draws must look like.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "model/sampler.h"

namespace kvasir::model {

constexpr int kVocab = 100;

inline std::vector<float> row(int n = kVocab) {
  std::vector<float> l;
  for (int i = 0; i < n; ++i) l.push_back(3 * std::sin(float(i) * 12.9898f));
  return l;
}

inline Sampled once(const SamplingParams& p, std::vector<float> logits, int64_t position = 0, SampleRow r = {}) {
  Sampler sampler(int32_t(logits.size()));
  r.params = &p, r.position = position;
  Sampled out;
  Sampler::Refused refused;
  EXPECT_TRUE(sampler.sample(logits, r, out, refused));
  return out;
}

// Frequencies of many draws against the distribution they should have.
inline void expect_distribution(const SamplingParams& p, const std::vector<float>& logits,
                                const std::vector<double>& want) {
  constexpr int kDraws = 20000;
  std::vector<int> counts(want.size());
  for (int i = 0; i < kDraws; ++i) ++counts[size_t(once(p, logits, i).token)];
  double chi = 0;
  int cells = 0;
  for (size_t t = 0; t < want.size(); ++t) {
    if (want[t] == 0) {
      EXPECT_EQ(counts[t], 0) << t;
    } else if (want[t] * kDraws >= 5) {
      chi += (counts[t] - want[t] * kDraws) * (counts[t] - want[t] * kDraws) / (want[t] * kDraws);
      ++cells;
    }
  }
  EXPECT_LT(chi, cells + 5 * std::sqrt(2.0 * cells));  // five standard deviations
}

inline std::vector<double> softmax(const std::vector<float>& l, double temperature) {
  std::vector<double> p;
  double sum = 0;
  for (float v : l) p.push_back(std::exp(v / temperature)), sum += p.back();
  for (double& v : p) v /= sum;
  return p;
}

// Keeps the tokens `keep` says of (probability, rank) and makes them sum to one.
template <class Keep>
std::vector<double> filtered(std::vector<double> p, const Keep& keep) {
  std::vector<size_t> order(p.size());
  for (size_t i = 0; i < p.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return p[a] > p[b]; });
  double before = 0, sum = 0;
  std::vector<double> out(p.size());
  for (size_t rank = 0; rank < order.size(); ++rank) {
    if (keep(p[order[rank]], rank, before)) out[order[rank]] = p[order[rank]], sum += p[order[rank]];
    before += p[order[rank]];
  }
  for (double& v : out) v /= sum;
  return out;
}

}  // namespace kvasir::model
