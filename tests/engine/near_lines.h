// Answers of a GPU, which are the same alone and beside others until the first token that another is nearly as good as.
#pragma once

#include "tests/engine/real_case.h"

namespace kvasir::engine::testing {

struct Line {
  std::vector<int32_t> tokens;
  std::vector<double> margins;  // by which each was best
};

// Of a request that wants the log-probabilities of two tokens.
inline Line line(Stream& stream) {
  Line out;
  while (auto event = stream.next()) {
    if (auto* failed = std::get_if<Failed>(&*event)) ADD_FAILURE() << failed->status.message();
    auto* tokens = std::get_if<Tokens>(&*event);
    for (size_t i = 0; tokens && i < tokens->tokens.size(); ++i) {
      const TokenOut& t = tokens->tokens[i];
      out.tokens.push_back(t.id), out.margins.push_back(t.top[0].logprob - t.top[1].logprob);
    }
  }
  return out;
}

// How many tokens are the same, until one that another is as good as to within `near`.
inline size_t compare(const Line& got, const std::vector<int32_t>& want, double near) {
  EXPECT_EQ(got.tokens.size(), want.size());
  for (size_t t = 0; t < std::min(want.size(), got.tokens.size()); ++t) {
    if (got.tokens[t] == want[t]) continue;
    EXPECT_LE(got.margins[t], near) << "token " << t;
    return t;
  }
  return want.size();
}

}  // namespace kvasir::engine::testing
