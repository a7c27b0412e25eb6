// Thoughts that have had their tokens are closed.
#include "engine/thought_budget.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

namespace kvasir::engine {
namespace {

constexpr int32_t kOpen = 300, kClose = 301, kWords = 302;

// Ids below 256 are bytes; two are special, and have no bytes.
class Bytes final : public text::Tokenizer {
 public:
  int32_t vocab_size() const override { return kWords; }
  Result<std::vector<int32_t>> encode(std::string_view text, bool, bool) const override {
    return std::vector<int32_t>(text.begin(), text.end());
  }
  Result<std::string> decode(std::span<const int32_t> ids, bool) const override {
    std::string out;
    for (int32_t id : ids) out += token_bytes(id);
    return out;
  }
  std::string token_text(int32_t id) const override {
    return id == kOpen ? "<think>" : id == kClose ? "</think>" : std::string(1, char(id));
  }
  std::string token_bytes(int32_t id) const override { return id < 256 ? std::string(1, char(id)) : ""; }
  bool is_special(int32_t id) const override { return id >= kOpen; }
  int32_t token_id(std::string_view text) const override { return text == "<think>" ? kOpen : -1; }
  int32_t bos() const override { return -1; }
  const std::vector<int32_t>& end_of_generation() const override { return end_; }
  const std::string& chat_template() const override { return none_; }

 private:
  const std::vector<int32_t> end_{0};
  const std::string none_;
};

class ThoughtBudgets : public ::testing::Test {
 protected:
  ThoughtLimit limit(int64_t tokens, bool begun, bool special = true) {
    const std::string close = "</think>";
    return {tokens,
            "<think>",
            {close},
            begun,
            special ? std::vector<int32_t>{kClose} : std::vector<int32_t>(close.begin(), close.end())};
  }
  // What a model that says these tokens is left with: each that is refused becomes the one that is allowed.
  std::vector<int32_t> said(const ThoughtLimit& of, const std::vector<int32_t>& wanted,
                            std::unique_ptr<text::Matcher> grammar = nullptr) {
    ThoughtBudget budget(tokenizer_, of, std::move(grammar));
    std::vector<int32_t> out;
    for (size_t i = 0; i < wanted.size();) {
      if (budget.consume(wanted[i]).ok()) {
        out.push_back(wanted[i++]);
        continue;
      }
      std::vector<uint32_t> bits((kWords + 31) / 32);
      EXPECT_TRUE(budget.mask(bits).ok());
      int32_t only = -1;
      for (int32_t t = 0; t < kWords; ++t)
        if (bits[size_t(t) / 32] >> (t % 32) & 1) {
          EXPECT_EQ(std::exchange(only, t), -1);
        }
      const auto forced = budget.forced();
      EXPECT_TRUE(forced.ok() && !forced->empty());
      EXPECT_EQ(forced->front(), only);
      EXPECT_TRUE(budget.consume(only).ok());
      out.push_back(only);
    }
    ended_ = budget.indifferent();
    return out;
  }
  static std::vector<int32_t> tokens(std::string_view text) { return {text.begin(), text.end()}; }

  const text::TokenizerPtr tokenizer_ = std::make_shared<Bytes>();
  bool ended_ = false;
};

using Ids = std::vector<int32_t>;

TEST_F(ThoughtBudgets, AreClosedBehindTheirTokens) {
  EXPECT_EQ(said(limit(3, true), tokens("abcdef")), (Ids{'a', 'b', 'c', kClose, 'd', 'e', 'f'}));
  EXPECT_TRUE(ended_);
  EXPECT_EQ(said(limit(0, true), tokens("ab")), (Ids{kClose, 'a', 'b'}));
  EXPECT_EQ(said(limit(2, false), Ids{'\n', kOpen, 'a', 'b', 'c'}), (Ids{'\n', kOpen, 'a', 'b', kClose, 'c'}));
  Ids spelled = tokens("<think>ab");
  spelled.push_back(kClose);
  spelled.push_back('c');
  EXPECT_EQ(said(limit(2, false), tokens("<think>abc")), spelled);
}

TEST_F(ThoughtBudgets, WhatEndsByItselfIsLeftAlone) {
  EXPECT_EQ(said(limit(3, true), Ids{'a', kClose, 'b', 'c', 'd', 'e'}), (Ids{'a', kClose, 'b', 'c', 'd', 'e'}));
  EXPECT_EQ(said(limit(4, true), tokens("ab</think>cdefgh")), tokens("ab</think>cdefgh"));  // begun in time
  EXPECT_EQ(said(limit(1, false), tokens("no thoughts")), tokens("no thoughts"));
  EXPECT_TRUE(ended_);
  EXPECT_EQ(said(limit(9, true), tokens("abc")), tokens("abc"));
  EXPECT_FALSE(ended_);
}

TEST_F(ThoughtBudgets, ATagOfSeveralTokensIsForcedWhole) {
  EXPECT_EQ(said(limit(2, true, false), tokens("abcd")), tokens("ab</think>cd"));
  ThoughtBudget one(tokenizer_, limit(1, true, false), nullptr);
  ASSERT_TRUE(one.consume('a').ok());
  ASSERT_TRUE(one.consume('<').ok());
  const auto copy = one.clone();
  EXPECT_EQ(*copy->forced(), tokens("/think>"));
  EXPECT_EQ(*one.forced(), tokens("/think>"));
}

// Only its first token may be anything.
class Nothing final : public text::Matcher {
 public:
  Status mask(std::span<uint32_t> bits) override {
    std::fill(bits.begin(), bits.end(), 0);
    bits['z' / 32] |= 1u << ('z' % 32);
    return {};
  }
  Status consume(int32_t token) override { return token == 'z' ? Status() : invalid_argument("not a z"); }
  bool finished() const override { return false; }
  std::unique_ptr<text::Matcher> clone() const override { return std::make_unique<Nothing>(); }
};

TEST_F(ThoughtBudgets, AGrammarWithoutThoughtsHasItsWay) {
  ThoughtBudget budget(tokenizer_, limit(0, true), std::make_unique<Nothing>());
  EXPECT_FALSE(budget.consume('z').ok());
  std::vector<uint32_t> bits((kWords + 31) / 32);
  ASSERT_TRUE(budget.mask(bits).ok());
  EXPECT_TRUE(bits['z' / 32] >> ('z' % 32) & 1);
  EXPECT_TRUE(budget.consume('z').ok());
  EXPECT_FALSE(budget.consume('y').ok());
  EXPECT_FALSE(budget.indifferent());
}

}  // namespace
}  // namespace kvasir::engine
