// What the tests of a CUDA model have in common: they need a device.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "attention/cuda/cuda.h"
#include "model/sampling.h"

namespace kvasir::model {

class NeedsDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    if (Status s = attention::cuda_backend().available(); !s.ok()) GTEST_SKIP() << "skipped: " << s.message();
  }
};

inline int devices() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

// Whether `got` is the best of `want` where that is best by more than .1; the greatest difference of its
// log-probability goes to `worst`.
inline void compare_best(const std::vector<double>& want, const Sampled& got, double* worst) {
  std::vector<double> best = want;
  std::nth_element(best.begin(), best.begin() + 1, best.end(), std::greater<>());
  const auto most = std::max_element(want.begin(), want.end());
  if (*most - best[1] > 0.1) {
    EXPECT_EQ(got.top[0].token, most - want.begin());
  }
  *worst = std::max(*worst, std::fabs(got.top[0].logprob - want[size_t(got.top[0].token)]));
}

// A constraint that refuses what is drawn first, and allows what its mask does.
class RefusesFirst final : public Constraint {
 public:
  explicit RefusesFirst(const uint32_t* mask) : mask_(mask) {}
  bool take(int32_t, bool masked) override { return masked; }
  const uint32_t* mask() override { return mask_; }

 private:
  const uint32_t* mask_;
};

}  // namespace kvasir::model
