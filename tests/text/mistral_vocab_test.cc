// Mistral's own tokenizer files, and SentencePiece's: ids identical to mistral-common's and sentencepiece's on the
// 10,000 strings (make_mistral.py), and what cannot be read refused in words.
#include "model/formats/mistral_vocab.h"

#include <gmock/gmock.h>

#include "tests/text/stored_ids.h"

namespace kvasir::model {
namespace {

using nlohmann::json;
using testing::HasSubstr;

using text::expect_stored_ids;
using text::from_base64;

json data(const std::string& name) { return text::stored(name); }

TEST(MistralVocab, TekkenHasMistralCommonsIds) {
  const json f = data("mistral")["tekken"];
  auto made = read_tekken(f["file"].get<std::string>(), "tekken.json");
  ASSERT_TRUE(made.ok()) << made.status().message();
  auto t = text::Tokenizer::from_json(made->tokenizer_json, R"({"bos_token": "<s>", "eos_token": "</s>"})");
  ASSERT_TRUE(t.ok()) << t.status().message();
  expect_stored_ids(**t, f["hashes"]);
  EXPECT_EQ((*t)->bos(), 1);
  EXPECT_EQ((*t)->end_of_generation(), std::vector<int32_t>{2});
  EXPECT_EQ((*t)->token_id("[TOOL_CALLS]"), 5);
  EXPECT_EQ((*t)->token_text(9), "<SPECIAL_9>");
  EXPECT_TRUE((*t)->is_special(9));
  EXPECT_EQ(*(*t)->encode("[INST]A", true, true), (std::vector<int32_t>{1, 3, 10 + 'A'}));
  EXPECT_EQ(*(*t)->decode(*(*t)->encode("naïve 日本 😀", false, false), true), "naïve 日本 😀");
}

TEST(MistralVocab, SentencePieceHasItsIds) {
  for (const char* name : {"spm", "spm without a prefix", "unigrams", "unigrams as they are"}) {
    SCOPED_TRACE(name);
    const json f = data("mistral")[name];
    auto vocab = vocab_from_sentencepiece(from_base64(f["file"]), "tokenizer.model");
    ASSERT_TRUE(vocab.ok()) << vocab.status().message();
    auto t = text::Tokenizer::from_gguf(*vocab);
    ASSERT_TRUE(t.ok()) << t.status().message();
    expect_stored_ids(**t, f["hashes"]);
    const bool of_t5 = std::string(name) == "unigrams";  // a text ends there, and begins with nothing
    EXPECT_EQ((*t)->bos(), of_t5 ? -1 : 1);
    EXPECT_EQ((*t)->end_of_generation(), std::vector<int32_t>{of_t5 ? 1 : 2});
    const auto ids = *(*t)->encode("hello world", true, false);
    EXPECT_EQ(of_t5 ? ids.back() : ids.front(), 1);
    EXPECT_EQ(*(*t)->decode(*(*t)->encode("hello world", false, false), true), "hello world");
  }
}

TEST(MistralVocab, BrokenTekkenIsRefused) {
  const json good = json::parse(data("mistral")["tekken"]["file"].get<std::string>());
  const struct {
    const char* pointer;
    json value;
    const char* says;
  } wrong[] = {{"/config", 3, "config must be an object"},
               {"/config/pattern", nullptr, "config.pattern must be a text"},
               {"/config/default_vocab_size", -1, "default_vocab_size must be a whole number"},
               {"/config/default_vocab_size", 100, "default_vocab_size is 100"},
               {"/config/default_vocab_size", 4000000, "vocab must be a list of at least"},
               {"/config/default_num_special_tokens", 3, "it has 6 special tokens"},
               {"/special_tokens", "x", "special_tokens must be a list"},
               {"/special_tokens/2/rank", 7, "that of rank 2 is not"},
               {"/special_tokens/1/token_str", "<begin>", "no token <s>"},
               {"/special_tokens/3/token_str", "</s>", "special token of rank 3 stands there twice"},
               {"/special_tokens/3/token_str", "!", "is the text of a special token"},
               {"/vocab", 1, "vocab must be a list"},
               {"/vocab/300/rank", 1, "that of rank 300 is not"},
               {"/vocab/300/token_bytes", "*", "token_bytes of rank 300 is no base64"},
               {"/vocab/7/token_bytes", "QUE=", "token_bytes of rank 7"},
               {"/vocab/7/token_bytes", "QQ==", "the token of rank"}};
  for (const auto& w : wrong) {
    json file = good;
    file[json::json_pointer(w.pointer)] = w.value;
    EXPECT_THAT(read_tekken(file.dump(), "tekken.json").status().message(), HasSubstr(w.says)) << w.says;
  }
  EXPECT_THAT(read_tekken("[", "tekken.json").status().message(), HasSubstr("is not a JSON object"));
}

TEST(MistralVocab, OtherSentencePieceModelsAreRefused) {
  const std::string good = from_base64(data("mistral")["spm"]["file"]);
  for (size_t size = 0; size < good.size(); size += 1 + size / 3)
    (void)vocab_from_sentencepiece(good.substr(0, size), "tokenizer.model");
  auto says = [](const std::string& bytes) { return vocab_from_sentencepiece(bytes, "m").status().message(); };
  EXPECT_THAT(says(good.substr(0, good.size() - 1)), HasSubstr("no SentencePiece model"));
  EXPECT_THAT(says(""), HasSubstr("no SentencePiece model"));
  EXPECT_THAT(says("{\"version\": 1}"), HasSubstr("no SentencePiece model"));
  auto with = [&](std::initializer_list<int> more) {
    std::string out = good;
    for (const int byte : more) out += char(byte);
    return out;
  };
  EXPECT_THAT(says(with({0x12, 2, 0x18, 3})),
              HasSubstr("words or characters; BPE and unigrams are supported: put the"));
  EXPECT_THAT(says(with({0x12, 3, 0xc0, 0x01, 1})), HasSubstr("has the mark of a space behind words"));
  EXPECT_THAT(says(with({0x1a, 2, 0x28, 0})), HasSubstr("does not mark spaces"));
  EXPECT_THAT(says(with({0x12, 2, 0x18, 1, 0x0a, 4, 0x0a, 0, 0x18, 4})), HasSubstr("has pieces of its user's"));
  EXPECT_THAT(says(with({0x1a, 2, 0x20, 1})), HasSubstr("spaces that it removes"));
  EXPECT_THAT(says(with({0x1a, 3, 0x12, 1, 'x'})), HasSubstr("a map of characters"));
  EXPECT_THAT(says(with({0x12, 4, 0xc8, 0x02, 0xff, 0x7f})), HasSubstr("names the token 16383"));
  EXPECT_THAT(says(with({0x0a, 2, 0x18, 9})), HasSubstr("of a kind that is not known"));
}

}  // namespace
}  // namespace kvasir::model
