// The default model's own vocabulary against ids that llama.cpp gave (data/smollm2.json).
#include "tests/text/smollm2.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

namespace kvasir::text {
namespace {

using Json = nlohmann::json;
using Ids = std::vector<int32_t>;

class SmolLM2 : public ::testing::Test {
 protected:
  void SetUp() override {
    Result<TokenizerPtr> loaded = smollm2();
    if (!loaded.ok()) GTEST_SKIP() << "the SmolLM2 model is not downloaded (./test fetches it)";
    t = *loaded;
  }
  static Json read(const std::string& path) {
    std::ifstream in(path);
    return Json::parse(in);
  }
  TokenizerPtr t;
};

TEST_F(SmolLM2, PromptIdsAreLlamaCpps) {
  const Json refs = read("tests/text/data/smollm2.json");
  ASSERT_EQ(refs["runs"].size(), 5u);
  for (const Json& run : refs["runs"]) {
    EXPECT_EQ(*t->encode(run["prompt"].get<std::string>(), true, true), run["prompt_ids"].get<Ids>());
  }
}

TEST_F(SmolLM2, TwentyKilobytesComeBackAsTheyWere) {
  const Ids want = read("tests/model/fixtures/gpl3_20k_ids.json").get<Ids>();
  const std::string text = *t->decode(want, false);
  EXPECT_EQ(text.size(), 19998u);
  EXPECT_EQ(*t->encode(text, false, false), want);
  Detokenizer d(t, true);
  std::string pieces;
  for (const int32_t id : want) pieces += d.push(id).text;
  EXPECT_EQ(pieces + d.finish().text, text);
}

TEST_F(SmolLM2, ItsTemplateMakesTheReferencesPrompt) {
  const Json refs = read("tests/text/data/smollm2.json");
  auto chat = ChatTemplate::compile(t->chat_template(), *t);
  ASSERT_TRUE(chat.ok()) << chat.status().to_string();
  EXPECT_EQ(*(*chat)->render(R"([{"role":"user","content":"What is the capital of France?"}])", "", true),
            refs["runs"][0]["prompt"].get<std::string>());
  EXPECT_EQ(t->end_of_generation(), (Ids{2, 0}));
  EXPECT_EQ(t->bos(), 1);
}

}  // namespace
}  // namespace kvasir::text
