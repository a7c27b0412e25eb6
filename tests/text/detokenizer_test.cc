#include <gtest/gtest.h>

#include <random>

#include "tests/text/small_vocab.h"

namespace kvasir::text {
namespace {

class DetokenizerTest : public ::testing::Test {
 protected:
  TokenizerPtr t = *Tokenizer::from_gguf(small_byte_level_vocab());
  int32_t byte(int b) { return t->token_id(byte_level(std::string(1, static_cast<char>(b)))); }

  struct Outcome {
    std::string text, stop;
  };
  Outcome run(const std::vector<int32_t>& ids, std::vector<std::string> stops = {}, bool include = false) {
    Detokenizer d(t, true, std::move(stops), include);
    Outcome o;
    for (const int32_t id : ids) {
      const Detokenizer::Piece p = d.push(id);
      o.text += p.text;
      if (p.stopped) o.stop = p.stop;
    }
    const Detokenizer::Piece p = d.finish();
    o.text += p.text;
    if (p.stopped) o.stop = p.stop;
    return o;
  }
};

TEST_F(DetokenizerTest, HoldsACharacterUntilItIsWhole) {
  Detokenizer d(t, true);
  EXPECT_EQ(d.push(byte(0xF0)).text, "");
  EXPECT_EQ(d.push(byte(0x9F)).text, "");
  EXPECT_EQ(d.push(byte(0x98)).text, "");
  EXPECT_EQ(d.push(byte(0x80)).text, "\U0001F600");
  EXPECT_EQ(d.push(byte(0xE2)).text, "");
  EXPECT_EQ(d.push(byte('a')).text, "\uFFFDa");
  EXPECT_EQ(d.push(byte(0xE2)).text, "");
  EXPECT_EQ(d.finish().text, "\uFFFD");
}

TEST_F(DetokenizerTest, SpecialTokensAreSkippedOrShown) {
  EXPECT_EQ(run({1, byte('a'), 2}).text, "a");
  Detokenizer shown(t, false);
  EXPECT_EQ(shown.push(2).text, "<|im_end|>");
}

TEST_F(DetokenizerTest, StopAcrossTokens) {
  const std::vector<int32_t> ids = *t->encode("say STOP now", false, false);
  EXPECT_EQ(run(ids, {"STOP"}).text, "say ");
  EXPECT_EQ(run(ids, {"STOP"}).stop, "STOP");
  EXPECT_EQ(run(ids, {"STOP"}, true).text, "say STOP");
  EXPECT_EQ(run(ids, {"STOPPED"}).text, "say STOP now");  // what was held back comes out again
  EXPECT_EQ(run(ids, {"STOPPED"}).stop, "");
  EXPECT_EQ(run(*t->encode("ends in ST", false, false), {"STOP"}).text, "ends in ST");
}

TEST_F(DetokenizerTest, NothingOfAStopIsSentEarly) {
  Detokenizer d(t, true, {"abab!"});
  std::string sent;
  for (const char c : std::string("xabababab")) sent += d.push(byte(c)).text;
  EXPECT_EQ(sent, "xabab");  // the last four may still begin the stop
  EXPECT_TRUE(d.push(byte('!')).stopped);
  EXPECT_EQ(d.push(byte('z')).text, "");
}

TEST_F(DetokenizerTest, TheFirstCompleteStopWinsHoweverTheTextWasCut) {
  const int32_t hello = t->token_id("hello");
  const std::vector<int32_t> spelled = {byte('h'), byte('e'), byte('l'), byte('l'), byte('o')};
  for (const auto& ids : {std::vector<int32_t>{hello}, spelled}) {
    const Outcome o = run(ids, {"hello", "l"});
    EXPECT_EQ(o.text, "he");
    EXPECT_EQ(o.stop, "l");
  }
}

TEST_F(DetokenizerTest, AStopCannotCutACharacter) {
  EXPECT_EQ(run(*t->encode("caf\u00e9!", false, false), {"\xA9!"}).text, "caf\u00e9!");
}

// Whatever the ids are, the pieces together are decode() of all of them.
TEST_F(DetokenizerTest, PiecesAreTheWholeForRandomIds) {
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    std::vector<int32_t> ids(random() % 12);
    for (int32_t& id : ids) id = static_cast<int32_t>(random() % t->vocab_size());
    EXPECT_EQ(run(ids).text, *t->decode(ids, true));
  }
}

TEST(SentencePieceDetokenizer, KeepsTheSpaceOfAContinuation) {
  const TokenizerPtr t = *Tokenizer::from_gguf(small_spm_vocab());
  Detokenizer d(t, true);
  EXPECT_EQ(d.push(t->token_id("\u2581hello")).text, " hello");
  EXPECT_EQ(*t->decode(std::vector<int32_t>{t->token_id("\u2581hello")}, true), "hello");
}

}  // namespace
}  // namespace kvasir::text
