// tiktoken's file of a vocabulary: ids identical to tiktoken's on the 10,000 strings (make_tiktoken.py), and what
// cannot be read refused in words.
#include "model/formats/tiktoken_vocab.h"

#include <gmock/gmock.h>

#include "tests/text/stored_ids.h"

namespace kvasir::model {
namespace {

using nlohmann::json;
using testing::HasSubstr;

const json& stored() {
  static const json kStored = text::stored("tiktoken");
  return kStored;
}
std::string file() { return stored()["file"]; }
json config() { return json::parse(stored()["config"].get<std::string>()); }

TEST(TiktokenVocab, HasTiktokensIds) {
  auto made = read_tiktoken(file(), config().dump(), "tiktoken.model");
  ASSERT_TRUE(made.ok()) << made.status().message();
  auto t = text::Tokenizer::from_json(*made, config().dump());
  ASSERT_TRUE(t.ok()) << t.status().message();
  text::expect_stored_ids(**t, stored()["hashes"]);
  const int32_t first = stored()["tokens"];
  EXPECT_EQ((*t)->bos(), first);
  EXPECT_EQ((*t)->end_of_generation(), (std::vector<int32_t>{first + 1, first + 2}));
  EXPECT_EQ((*t)->token_text(first + 4), "<|reserved_token_" + std::to_string(first + 4) + "|>");
  EXPECT_TRUE((*t)->is_special(first + 2));
  EXPECT_FALSE((*t)->is_special(first + 7)) << "a call's marks are text";
  const auto ids = (*t)->encode(stored()["mixed"].get<std::string>(), false, true);
  ASSERT_TRUE(ids.ok());
  EXPECT_EQ(*ids, stored()["mixed_ids"].get<std::vector<int32_t>>());
  EXPECT_EQ(*(*t)->decode(*ids, false), stored()["mixed"].get<std::string>());
}

TEST(TiktokenVocab, BrokenFilesAreRefused) {
  const auto says = [](const std::string& text, const std::string& of) {
    const auto made = read_tiktoken(text, of, "tiktoken.model");
    return made.ok() ? "nothing" : made.status().message();
  };
  const std::string good = config().dump();
  EXPECT_THAT(says(file(), ""), HasSubstr("of the class TikTokenTokenizer (Kimi K2, Moonlight); none is there"));
  EXPECT_THAT(says(file(), R"({"tokenizer_class":"QWenTokenizer"})"), HasSubstr("QWenTokenizer is there"));
  EXPECT_THAT(says("", good), HasSubstr("has no token for the byte 0"));
  EXPECT_THAT(says("/w== 0\n/g== 2\n", good), HasSubstr("line 2 is not the token of rank 1"));
  EXPECT_THAT(says("/w== 0\n/g==\n", good), HasSubstr("line 2 is not the token of rank 1"));
  EXPECT_THAT(says("/w== 0\n!!== 1\n", good), HasSubstr("line 2 is not the token of rank 1"));
  EXPECT_THAT(says("/w== 0\n/w== 1\n", good), HasSubstr("the token of line 2 stands there twice"));
  std::string cut;  // a download that ended early, at the end of a line
  for (size_t line = 0; line < 500; ++line)
    cut += file().substr(cut.size(), file().find('\n', cut.size()) + 1 - cut.size());
  EXPECT_THAT(says(cut, good), HasSubstr("the file was cut short"));
  json low = config(), far = config(), twice = config(), odd = config();
  low["added_tokens_decoder"]["3"] = {{"content", "x"}};
  EXPECT_THAT(says(file(), low.dump()), HasSubstr("\"3\" is none"));
  far["added_tokens_decoder"]["900000"] = {{"content", "x"}};
  EXPECT_THAT(says(file(), far.dump()), HasSubstr("names the token 900000"));
  const std::string next = std::to_string(stored()["tokens"].get<int>() + 5);
  twice["added_tokens_decoder"][next] = {{"content", "[EOS]"}};
  EXPECT_THAT(says(file(), twice.dump()), HasSubstr("stands there twice"));
  twice["added_tokens_decoder"][next] = {{"content", "a"}};
  EXPECT_THAT(says(file(), twice.dump()), HasSubstr("is the text of a special token"));
  odd["added_tokens_decoder"] = json::array();
  EXPECT_THAT(says(file(), odd.dump()), HasSubstr("must be an object"));
}

}  // namespace
}  // namespace kvasir::model
