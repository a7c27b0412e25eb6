#include "model/text/stop_expressions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/text/small_vocab.h"

namespace kvasir::text {
namespace {

// The text up to where it ends, told in these pieces; all of it: nothing has matched.
std::string until(const std::vector<std::string>& expressions, const std::vector<std::string>& pieces,
                  size_t* which = nullptr) {
  const auto compiled = StopExpressions::compile(expressions);
  EXPECT_TRUE(compiled.ok()) << compiled.status().message();
  StopExpressions::Scan scan(**compiled);
  std::string text;
  for (const std::string& piece : pieces) {
    const auto found = scan.push(piece);
    text += piece.substr(0, found ? found->end : piece.size());
    if (found && which) *which = found->which;
    if (found) break;
  }
  return text;
}

std::vector<std::string> bytes_of(const std::string& text) {
  std::vector<std::string> out;
  for (const char c : text) out.emplace_back(1, c);
  return out;
}

TEST(StopExpressions, EndATextWhereTheFirstMatchEndsHoweverItIsCut) {
  const std::string text = "salt or pepper and more";
  for (const auto& pieces : {std::vector<std::string>{text}, bytes_of(text), {"salt o", "r pep", "per"}}) {
    EXPECT_EQ(until({"and|or"}, pieces), "salt or");
    EXPECT_EQ(until({"p+er"}, pieces), "salt or pepper");
    EXPECT_EQ(until({"[^a-z ]"}, pieces).size(), pieces.size() == 3 ? 14u : text.size());
  }
  size_t which = 9;
  EXPECT_EQ(until({"x", "l.*p", "t o"}, {text}, &which), "salt o");
  EXPECT_EQ(which, 2u);
  EXPECT_EQ(until({"a", "sa"}, {text}, &which), "sa");
  EXPECT_EQ(which, 0u);  // the first of those that end together
}

TEST(StopExpressions, TheEndOfATextIsWhatHasComeSoFar) {
  EXPECT_EQ(until({"[.!?]\\s*$"}, {"3", ".14 is", " it. ", "No"}), "3.14 is it. ");
  EXPECT_EQ(until({"[.!?]\\s*$"}, bytes_of("3.14")), "3.");
  EXPECT_EQ(until({"^b"}, {"a", "b"}), "ab");
  EXPECT_EQ(until({"^a"}, {"a", "b"}), "a");
  EXPECT_EQ(until({"(?m)^b"}, {"a\n", "bc"}), "a\nb");
  EXPECT_EQ(until({"\\bor\\b"}, {"fort or ", "else"}), "fort or");
}

TEST(StopExpressions, CharactersAreWhole) {
  EXPECT_EQ(until({"é."}, bytes_of("caféine")), "caféi");
  EXPECT_EQ(until({"caf.i"}, {"caf", "\xc3", "\xa9", "ine"}), "caféi");
  EXPECT_EQ(until({"\\p{Greek}"}, {"abγδ"}), "abγ");
  EXPECT_EQ(until({"(?i)END"}, {"The eNd."}), "The eNd");
}

TEST(StopExpressions, WhatCannotBeServedIsRefused) {
  auto refused = [](std::vector<std::string> expressions, const char* why) {
    const auto compiled = StopExpressions::compile(std::move(expressions));
    ASSERT_FALSE(compiled.ok());
    EXPECT_EQ(compiled.status().code(), Code::invalid_argument);
    EXPECT_THAT(compiled.status().message(), testing::HasSubstr(why));
  };
  refused({"a", "(b"}, "[1] is no regular expression");
  refused({"(?=a)b"}, "look-around");
  refused({"(a)\\1"}, "backreferences");
  refused({"a*"}, "[0] matches an empty text");
  refused({"$"}, "empty text");
  refused({"(\\w{1000}){1000}"}, "KiB");
}

// A byte costs what the automaton has states, not what the text has been so far: this ends at once, or not at all.
TEST(StopExpressions, NoTextIsSlow) {
  const std::string text(20000, 'a');
  EXPECT_EQ(until({"(a|aa|aaa)*b"}, {text}), text);
  EXPECT_EQ(until({"(a+)+$x|(.*.*.*=)"}, bytes_of(text)), text);
}

TEST(StopExpressions, OfADetokenizersText) {
  const TokenizerPtr t = *Tokenizer::from_gguf(small_byte_level_vocab());
  struct Case {
    std::vector<std::string> strings, expressions;
    const char *text, *stop;
  };
  for (const Case& c : std::vector<Case>{{{}, {"t[aeiou]r"}, "he told ter", "t[aeiou]r"},
                                         {{"told"}, {"t[aeiou]r"}, "he ", "told"},
                                         {{"ter me"}, {"t.r"}, "he told ter", "t.r"},  // held back for the string
                                         {{"ter"}, {"ter"}, "he told ", "ter"},        // a string wins where both end
                                         {{}, {"[0-9]"}, "he told ter me", ""}}) {
    auto compiled = StopExpressions::compile(c.expressions);
    ASSERT_TRUE(compiled.ok());
    Detokenizer d(t, true, c.strings, false, false, *compiled);
    std::string text, stop;
    auto take = [&](const Detokenizer::Piece& piece) {
      text += piece.text;
      if (piece.stopped) stop = piece.stop;
    };
    const std::vector<int32_t> ids = *t->encode("he told ter me", false, false);
    for (const int32_t id : ids) take(d.push(id));
    take(d.finish());
    EXPECT_EQ(text, c.text);
    EXPECT_EQ(stop, c.stop);
  }
}

}  // namespace
}  // namespace kvasir::text
