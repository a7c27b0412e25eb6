// A grammar compiled, and followed as a model would: nothing of it may cost more than a single input may.
#pragma once

#include <random>

#include "tests/hostile/cost.h"
#include "tests/text/small_vocab.h"

namespace kvasir::text {

class Follow : public ::testing::Test {
 protected:
  using Kind = GrammarSpec::Kind;
  TokenizerPtr tokenizer = *Tokenizer::from_gguf(small_byte_level_vocab());
  std::shared_ptr<GrammarCompiler> compiler = *GrammarCompiler::create(tokenizer);

  // Draws among what is allowed until the grammar ends, refuses to go on, or `tokens` are drawn.
  Status follow(Matcher& matcher, int tokens) {
    std::vector<uint32_t> bits((size_t(tokenizer->vocab_size()) + 31) / 32);
    std::mt19937 random(1);
    for (int n = 0; n < tokens && !matcher.finished(); ++n) {
      KVASIR_TRY(matcher.mask(bits));
      std::vector<int32_t> allowed;
      for (int32_t t = 0; t < tokenizer->vocab_size(); ++t)
        if (bits[size_t(t) / 32] >> (t % 32) & 1) allowed.push_back(t);
      if (allowed.empty()) return internal_error("nothing is allowed");
      KVASIR_TRY(matcher.consume(allowed[random() % allowed.size()]));
    }
    return {};
  }
  // Refused as the client's, or followed as far as its limits go; the second time it is known.
  void expect_bounded(Kind kind, const std::string& text, int tokens = 100) {
    Status compiled;
    kvasir::expect_bounded(text, [&] {
      auto matcher = compiler->compile({kind, text, {}});
      compiled = matcher.status();
      if (!matcher.ok()) return;
      const Status followed = follow(**matcher, tokens);
      EXPECT_TRUE(followed.ok() || followed.code() == Code::resource_exhausted) << followed.to_string();
    });
    EXPECT_TRUE(compiled.ok() || compiled.code() == Code::invalid_argument) << compiled.to_string();
    const Cost again = cost_of([&] { (void)compiler->compile({kind, text, {}}); });
    EXPECT_LT(again.seconds, 0.2) << "not remembered: " << text.substr(0, 200);
  }
};

}  // namespace kvasir::text
