// Prompts that are embedded or scored as wholes, and how far what comes of them is from what was stored.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/engine/harness.h"

namespace kvasir::engine::testing {

inline Request pooled(Request r) {
  r.pooled = true;
  r.max_tokens = 0;
  return r;
}

inline std::vector<float> embedding(const Answer& a) {
  EXPECT_TRUE(a.complete()) << a.failed.message();
  if (a.finished.empty() || a.finished[0].pooled.empty()) return {};
  EXPECT_EQ(a.finished[0].pooled.size(), 1u);
  EXPECT_TRUE(a.tokens.empty());
  return a.finished[0].pooled[0];
}

inline double cosine(const std::vector<float>& a, const std::vector<double>& b) {
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i)
    ab += double(a[i]) * b[i], aa += double(a[i]) * a[i], bb += double(b[i]) * b[i];
  return a.size() == b.size() && aa > 0 ? ab / std::sqrt(aa * bb) : 0;
}

}  // namespace kvasir::engine::testing
