// Prompts that are embedded or scored as wholes, and how far what comes of them is from what was stored.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
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

// A question and a text beside it, as a cross-encoder is asked.
inline Request scored_pair(const nlohmann::json& pair) {
  Request r;
  r.prompt = pair[0].get<std::vector<int32_t>>();
  r.second_text = int32_t(r.prompt.size());
  for (int32_t t : pair[1].get<std::vector<int32_t>>()) r.prompt.push_back(t);
  r.detokenize = false;
  r.classified = true;
  return pooled(r);
}

}  // namespace kvasir::engine::testing
