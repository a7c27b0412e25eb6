#include <gtest/gtest.h>

#include <ctime>
#include <random>

#include "model/text/stop_scanner.h"
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

TEST(SentencePieceDetokenizer, ATextOfItsOwnBeginsWithoutIt) {
  const TokenizerPtr t = *Tokenizer::from_gguf(small_spm_vocab());
  const int32_t hello = t->token_id("\u2581hello");
  Detokenizer d(t, true, {}, false, true);
  EXPECT_EQ(d.push(hello).text, "hello");
  EXPECT_EQ(d.push(hello).text, " hello");
  EXPECT_EQ(*t->decode(std::vector<int32_t>{hello, hello}, true), "hello hello");
}

// What the scanner says, beside looking for each stop at each end.
TEST(StopScanner, FindsWhatLookingEverywhereFinds) {
  std::mt19937 random(5);
  auto word = [&](size_t most) {
    std::string w(1 + random() % most, 'a');
    for (char& c : w) c = static_cast<char>('a' + random() % 2);
    return w;
  };
  for (int round = 0; round < 3000; ++round) {
    std::vector<std::string> stops(random() % 5);
    for (std::string& s : stops) s = word(7);
    StopScanner scanner(stops);
    std::string text, found;
    while (found.empty() && text.size() < 60) {
      const std::string piece = word(6);
      size_t used = 0, end = text.size() + 1;
      const std::string* stop = scanner.scan(piece, used);
      text += piece;
      std::string expected;
      for (; end <= text.size() && expected.empty(); ++end)
        for (const std::string& s : stops)
          if (std::string_view(text).substr(0, end).ends_with(s) && s.size() > expected.size()) expected = s;
      found = stop ? *stop : "";
      ASSERT_EQ(found, expected) << text;
      if (stop) {
        ASSERT_EQ(text.size() - piece.size() + used, end - 1);
        break;
      }
      size_t longest = 0;
      for (const std::string& s : stops)
        for (size_t n = 1; n < s.size() && n <= text.size(); ++n)
          if (text.ends_with(s.substr(0, n))) longest = std::max(longest, n);
      ASSERT_EQ(scanner.may_begin(), longest) << text;
    }
  }
}

// Text that is nearly a stop all the time: by looking again at all that is held these 200,000 bytes took minutes.
TEST_F(DetokenizerTest, LongStopsThatNeverComeCostLittle) {
  std::vector<std::string> stops;
  for (int i = 0; i < 16; ++i) stops.push_back(std::string(20000 + i, 'a') + "b");
  Detokenizer d(t, true, stops);
  const auto start = std::clock();
  size_t sent = 0;
  for (int i = 0; i < 200000; ++i) sent += d.push(byte('a')).text.size();
  EXPECT_EQ(sent, 200000u - 20015u);
  EXPECT_TRUE(d.push(byte('b')).stopped);
  EXPECT_LT(double(std::clock() - start) / CLOCKS_PER_SEC, 30);
}

}  // namespace
}  // namespace kvasir::text
