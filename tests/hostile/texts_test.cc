// Texts of megabytes to be tokenized: they cost little memory, and no time that nobody wants.
#include <gmock/gmock.h>

#include "core/awaited.h"
#include "model/text/bounded.h"
#include "tests/hostile/cost.h"
#include "tests/text/smollm2.h"

namespace kvasir::text {
namespace {

class LargeTexts : public ::testing::Test {
 protected:
  void SetUp() override {
    auto made = smollm2();
    if (!made.ok()) GTEST_SKIP() << made.status().to_string();
    tokenizer_ = *made;
    bounded_ = dynamic_cast<const BoundedTokenizer*>(tokenizer_.get());
    ASSERT_TRUE(bounded_);
    (void)tokenizer_->encode("what is made once", false, false);
  }
  static std::string of(const std::string& part, size_t bytes) {
    std::string text;
    while (text.size() < bytes) text += part;
    return text;
  }
  Cost cost(const std::string& text, const EncodeLimits& limits = {}) {
    return cost_of([&] { last_ = bounded_->encode_within(limits, text, true, true); });
  }

  TokenizerPtr tokenizer_;
  const BoundedTokenizer* bounded_ = nullptr;
  Result<std::vector<int32_t>> last_ = std::vector<int32_t>();
};

TEST_F(LargeTexts, TakeLittleMemory) {
  for (const char* part : {"The quick brown fox. ", "{\"a\": [1, 22, 333]},\n", "a1", "\u65e5\u672c\u8a9e\u3002"}) {
    EXPECT_LT(cost(of(part, 1 << 20)).bytes, 64 << 20) << part;
    ASSERT_TRUE(last_.ok()) << last_.status().to_string();
    EXPECT_EQ(*tokenizer_->decode(*last_, true), of(part, 1 << 20)) << part;
  }
}

TEST_F(LargeTexts, AreReadNoFurtherThanTheirTokensAreWanted) {
  const std::string text = of("The quick brown fox. ", 8 << 20);
  EXPECT_LT(cost(text, {.most_tokens = 8192}).seconds, 0.5);
  ASSERT_TRUE(last_.ok());
  EXPECT_GT(last_->size(), 8192u);
  EXPECT_LT(last_->size(), 8192u + (64 << 10));
}

TEST_F(LargeTexts, EndWhenNobodyWaits) {
  const std::atomic<bool> left{true};
  const Awaited awaited(left);
  EXPECT_LT(cost(of("The quick brown fox. ", 8 << 20)).seconds, 0.5);
  EXPECT_EQ(last_.status().code(), Code::cancelled);
}

TEST_F(LargeTexts, OfOneWordAreRefused) {
  for (const char* part : {"a", " ", "\n"}) {
    const std::string text = of(part, 8 << 20);
    EXPECT_LT(cost(text).seconds, 0.5);
    EXPECT_EQ(last_.status().code(), Code::invalid_argument);
    EXPECT_THAT(last_.status().message(), ::testing::HasSubstr("1048576"));
  }
}

}  // namespace
}  // namespace kvasir::text
