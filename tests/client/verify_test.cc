// Answers under load against those alone: what differs is found, near-ties are counted apart.
#include "client/verify.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/client/slow_server.h"

namespace kvasir::client {
namespace {

using ::testing::HasSubstr;

TEST(OverGrpc, VerificationFindsWhatDiffers) {
  SlowServer server(Ms(0), Ms(0));
  auto target = *make_target({"kvasir", server.address()});
  LoadOptions o;
  o.requests = 6;
  o.concurrency = 1;
  o.keep_text = true;
  server.flaky = true;
  const client::LoadRun run = run_load(*target, same_prompt(5), o, never, {});
  const Verification v = verify(*target, same_prompt(5), o, run, 6, never);
  EXPECT_EQ(v.compared, 6);
  EXPECT_EQ(v.equal, 5);
  EXPECT_EQ(v.different, 1);
  ASSERT_EQ(v.examples.size(), 1u);
  EXPECT_THAT(v.examples[0], HasSubstr("differs from character 1"));
}

TEST(OverGrpc, LaterTurnsAreVerifiedWithAllThatWasSaidBefore) {
  SlowServer server(Ms(0), Ms(0));
  auto target = *make_target({"kvasir", server.address()});
  LoadOptions o;
  o.requests = 6;
  o.concurrency = 1;
  o.turns = 3;
  o.turn_words = 4;
  const client::LoadRun run = run_load(*target, same_prompt(3, "hello"), o, never, {});
  EXPECT_EQ(verify(*target, same_prompt(3, "hello"), o, run, 6, never).equal, 6);
  EXPECT_EQ(verify(*target, same_prompt(3, "jello"), o, run, 6, never).different,
            2);  // the first turns asked something else
}

// Answers given in advance, each with its tokens' log-probabilities.
class Oracle final : public Target {
 public:
  struct Token {
    std::string text;
    double top_gap, logprob;
  };
  explicit Oracle(std::vector<std::vector<Token>> answers) : answers_(std::move(answers)) {}
  void start(const Ask& ask, std::shared_ptr<Sink> sink) override {
    asked_top_two.push_back(ask.top_two);
    for (const Token& t : answers_[next_++ % answers_.size()]) sink->on_tokens({1, t.text, t.top_gap, t.logprob});
    sink->on_done({}, {});
  }
  std::vector<bool> asked_top_two;

 private:
  std::vector<std::vector<Token>> answers_;
  size_t next_ = 0;
};

// The first answer is the one under load, the second the one alone.
Verification verified(std::vector<Oracle::Token> under_load, std::vector<Oracle::Token> alone) {
  Oracle oracle({std::move(under_load), std::move(alone)});
  LoadOptions o;
  o.requests = 1;
  o.concurrency = 1;
  o.keep_text = true;
  const client::LoadRun run = run_load(oracle, same_prompt(2), o, never, {});
  Verification v = verify(oracle, same_prompt(2), o, run, 1, never);
  EXPECT_EQ(oracle.asked_top_two, (std::vector<bool>{false, true}));
  return v;
}

TEST(NearTies, AreCountedApartWhereTheTopTwoAreKnown) {
  EXPECT_EQ(verified({{"a", -1, NAN}, {"b", -1, NAN}}, {{"a", 0.5, NAN}, {"c", 0.0005, NAN}}).near_ties, 1);
  EXPECT_EQ(verified({{"a", -1, NAN}, {"b", -1, NAN}}, {{"a", 0.0005, NAN}, {"c", 0.5, NAN}}).different, 1);
  EXPECT_EQ(verified({{"a", -1, NAN}, {"b", -1, NAN}}, {{"a", -1, NAN}, {"c", -1, NAN}}).different, 1);  // not known
}

TEST(NearTies, AreCountedApartWhereOnlyTheChosenTokensOddsAreKnown) {
  EXPECT_EQ(verified({{"a", -1, -1.0}, {"b", -1, -0.7000}}, {{"a", -1, -1.0}, {"c", -1, -0.7004}}).near_ties, 1);
  EXPECT_EQ(verified({{"a", -1, -1.0}, {"b", -1, -0.9000}}, {{"a", -1, -1.0}, {"c", -1, -0.7004}}).different, 1);
}

TEST(NearTies, TheGapOfSeveralTokensIsTheLeastKnown) {
  EXPECT_EQ(top_gap_of({-1.0}), -1);
  EXPECT_NEAR(top_gap_of({-3.0, -1.0, -1.5}), 0.5, 1e-12);
  EXPECT_EQ(lesser_gap(-1, 0.25), 0.25);
  EXPECT_EQ(lesser_gap(0.25, 0.5), 0.25);
}

}  // namespace
}  // namespace kvasir::client
