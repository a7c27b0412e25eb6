#include "client/workload.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/scratch.h"

namespace kvasir::client {
namespace {

using ::testing::HasSubstr;

int count_words(const std::string& s) { return 1 + static_cast<int>(std::count(s.begin(), s.end(), ' ')); }

std::string file_with(const std::string& name, const std::string& text) {
  static const ScratchFolder folder;
  return folder.file(name, text);
}

TEST(Length, FixedUniformLognormal) {
  std::mt19937_64 random(1);
  EXPECT_EQ(Length::parse("7", "x")->draw(random), 7);
  const Length uniform = *Length::parse("10-20", "x"), log = *Length::parse("lognormal:100,0.5", "x");
  std::vector<int> drawn;
  for (int i = 0; i < 20001; ++i) {
    const int u = uniform.draw(random);
    EXPECT_TRUE(u >= 10 && u <= 20);
    drawn.push_back(log.draw(random));
  }
  std::sort(drawn.begin(), drawn.end());
  EXPECT_NEAR(drawn[10000], 100, 3);
  EXPECT_NEAR(std::log(drawn[16826] / 100.0), 0.5, 0.05);  // one sigma
  for (const char* bad :
       {"", "0", "-3", "20-10", "x", "lognormal:5", "3 4", "1e30", "inf", "nan", "1-1e12", "lognormal:1e9,1"}) {
    EXPECT_THAT(Length::parse(bad, "input_len").status().message(), HasSubstr("input_len")) << bad;
  }
}

TEST(Workload, SyntheticWithSharedPrefixes) {
  WorkloadOptions o;
  o.input_length = "20";
  o.output_length = "5-9";
  o.shared_prefix = 30;
  o.prefix_groups = 2;
  const Workload w = *make_workload(o, 50);
  std::vector<std::string> heads;
  for (const Prompt& p : w.prompts) {
    EXPECT_EQ(count_words(p.text), 50);
    EXPECT_TRUE(p.max_tokens >= 5 && p.max_tokens <= 9);
    heads.push_back(p.text.substr(0, 60));
  }
  std::sort(heads.begin(), heads.end());
  EXPECT_EQ(std::unique(heads.begin(), heads.end()) - heads.begin(), 2);
  EXPECT_EQ(make_workload(o, 50)->prompts[7].text, w.prompts[7].text);  // the seed decides
}

TEST(Workload, Files) {
  WorkloadOptions o;
  o.file = file_with("share.json", R"([{"conversations":[{"from":"human","value":"Hi"},{"from":"gpt","value":")" +
                                       std::string(80, 'x') + R"("}]},{"conversations":[]}])");
  Workload w = *make_workload(o, 10);
  ASSERT_EQ(w.prompts.size(), 1u);
  EXPECT_EQ(w.prompts[0].text, "Hi");
  EXPECT_EQ(w.prompts[0].max_tokens, 20);

  o.file = file_with("p.jsonl", "{\"prompt\":\"a\",\"max_tokens\":3}\n\n{\"text\":\"b\"}\n");
  w = *make_workload(o, 10);
  ASSERT_EQ(w.prompts.size(), 2u);
  EXPECT_EQ(w.prompts[0].max_tokens, 3);

  o.file = file_with(
      "azure.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.5,37,4\n2023-11-16 18:17:05.0,10,2\n");
  w = *make_workload(o, 10);
  ASSERT_EQ(w.prompts.size(), 2u);
  EXPECT_EQ(count_words(w.prompts[0].text), 37);
  EXPECT_NEAR(w.arrivals[1], 1.5, 1e-6);

  o.file = file_with("mooncake.jsonl",
                     "{\"timestamp\":1000,\"input_length\":600,\"output_length\":5,\"hash_ids\":[1,2]}\n"
                     "{\"timestamp\":3000,\"input_length\":520,\"output_length\":5,\"hash_ids\":[1,3]}\n");
  w = *make_workload(o, 10);
  EXPECT_NEAR(w.arrivals[1], 2, 1e-9);
  EXPECT_EQ(w.prompts[0].text.substr(0, 2000), w.prompts[1].text.substr(0, 2000));  // block 1 is shared
  EXPECT_EQ(count_words(w.prompts[1].text), 520);

  o.file = file_with("late.jsonl",  // times out of order, and not from 0: each prompt stays with its time
                     "{\"timestamp\":9000,\"input_length\":9,\"output_length\":5}\n"
                     "{\"timestamp\":4000,\"input_length\":4,\"output_length\":5}\n");
  w = *make_workload(o, 10);
  EXPECT_EQ(count_words(w.prompts[0].text), 4);
  EXPECT_EQ(w.arrivals, (std::vector<double>{0, 5}));

  o.file = file_with("some.jsonl", "{\"timestamp\":1,\"input_length\":9,\"output_length\":5}\n{\"prompt\":\"a\"}\n");
  EXPECT_THAT(make_workload(o, 10).status().message(), HasSubstr("some of its entries"));

  o.file = file_with("bad.jsonl", "{\"prompt\":\"a\"}\n{\"nothing\":1}\n");
  EXPECT_THAT(make_workload(o, 10).status().message(), HasSubstr("line 2"));
  o.file = "/no/such/file";
  EXPECT_EQ(make_workload(o, 10).status().code(), Code::not_found);
}

TEST(Workload, AShareGptConversationHasItsLaterQuestions) {
  WorkloadOptions o;
  o.file = file_with("turns.jsonl",
                     R"({"conversations":[{"from":"human","value":"one"},{"from":"gpt","value":"1"},)"
                     R"({"from":"human","value":"two"},{"from":"gpt","value":"2"},{"from":"human","value":"three"}]})"
                     "\n"
                     R"({"conversations":[{"value":"a"},{"value":"b"},{"value":"c"}]})");
  const Workload w = *make_workload(o, 10);
  ASSERT_EQ(w.prompts.size(), 2u);
  EXPECT_THAT(w.prompts[0].later, ::testing::ElementsAre("two", "three"));
  EXPECT_THAT(w.prompts[1].later, ::testing::ElementsAre("c"));
}

TEST(Workload, AzureColumnsStandAnywhere) {
  WorkloadOptions o;
  o.file = file_with("wide.csv",
                     "id,GeneratedTokens,TIMESTAMP,ContextTokens\r\n"
                     "7,3,2024-05-10 00:00:01.5+00:00,12\r\n"
                     "\r\n"
                     "8,0,2024-05-10 00:00:00.5+00:00,0\r\n");
  const Workload w = *make_workload(o, 10);
  ASSERT_EQ(w.prompts.size(), 2u);
  EXPECT_EQ(w.arrivals, (std::vector<double>{0, 1}));
  EXPECT_EQ(w.prompts[0].max_tokens, 1);  // nothing asked or answered would be no request
  EXPECT_EQ(count_words(w.prompts[0].text), 1);
  EXPECT_EQ(count_words(w.prompts[1].text), 12);
  EXPECT_EQ(w.prompts[1].max_tokens, 3);
}

TEST(Workload, ABadFileSaysWhichLineAndWhy) {
  const auto message = [](const std::string& name, const std::string& text) {
    WorkloadOptions o;
    o.file = file_with(name, text);
    return make_workload(o, 10).status().message();
  };
  const std::string head = "TIMESTAMP,ContextTokens,GeneratedTokens\n", good = head + "2023-11-16 18:17:03.5,37,4\n";
  EXPECT_THAT(message("b1.csv", "TIMESTAMP,Context,GeneratedTokens\n"), HasSubstr("no column ContextTokens"));
  EXPECT_THAT(message("b2.csv", good + "2023-11-16 18:17:03.5,37\n"), HasSubstr("line 3"));
  EXPECT_THAT(message("b3.csv", good + "yesterday,37,4\n"), HasSubstr("2023-11-16 18:17:03.98"));
  EXPECT_THAT(message("b4.csv", good + "2023-11-16 18:17:03.5,-1,4\n"), HasSubstr("line 3"));
  EXPECT_THAT(message("b5.csv", good + "2023-11-16 18:17:03.5,1e9,4\n"), HasSubstr("line 3"));
  EXPECT_THAT(message("b6.csv", good + "2023-11-16 18:17:03.5,2000000,4\n"), HasSubstr("0 to 1000000"));
  EXPECT_THAT(message("b7.csv", head), HasSubstr("nothing to ask"));
  EXPECT_THAT(message("b1.jsonl", "{\"timestamp\":1,\"input_length\":2000000000,\"output_length\":1}"),
              HasSubstr("line 1 is of 2000000000"));
  EXPECT_THAT(message("b2.jsonl", "{\"prompt\":\"a\"}\n{\"timestamp\":\"1\",\"input_length\":2}"), HasSubstr("line 2"));
  EXPECT_THAT(message("b3.jsonl", "{\"prompt\":\"a\"}\n{\"prompt\":"), HasSubstr("line 2"));
  EXPECT_THAT(message("b4.jsonl", "\n \n"), HasSubstr("nothing to ask"));
  EXPECT_THAT(message("b1.json", "[{\"conversations\":[{\"value\":5}]}]"), HasSubstr("b1.json"));
}

TEST(Arrivals, RatesAndShapes) {
  ArrivalOptions o;
  o.rate = 50;
  const int n = 20000;
  for (const char* pattern : {"poisson", "constant", "bursty"}) {
    o.pattern = pattern;
    const std::vector<double> at = *arrivals(o, n);
    EXPECT_NEAR(n / at.back(), 50, 2.5) << pattern;
    double mean = at.back() / (n - 1), square = 0;
    for (int i = 1; i < n; ++i) square += std::pow(at[i] - at[i - 1] - mean, 2);
    const double variation = std::sqrt(square / n) / mean;
    EXPECT_NEAR(variation, o.pattern == "poisson" ? 1 : o.pattern == "constant" ? 0 : 2, 0.1) << pattern;
  }
  o.pattern = "ramp";
  const std::vector<double> ramp = *arrivals(o, 1000);
  EXPECT_NEAR(ramp.back(), 2.0 * 1000 / 50, 0.1);
  EXPECT_NEAR(ramp[250], ramp.back() / 2, 0.1);  // a quarter of the requests in half of the time
  o.pattern = "at-once";
  EXPECT_EQ(*arrivals(o, 3), (std::vector<double>{0, 0, 0}));
  o.pattern = "sometimes";
  EXPECT_THAT(arrivals(o, 3).status().message(), HasSubstr("poisson"));
}

}  // namespace
}  // namespace kvasir::client
