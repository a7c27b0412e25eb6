#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/text/small_vocab.h"

namespace kvasir::text {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TokenizerPtr made(const GgufVocab& vocab) {
  Result<TokenizerPtr> t = Tokenizer::from_gguf(vocab);
  EXPECT_TRUE(t.ok()) << t.status().to_string();
  return *t;
}

std::string refusal(const GgufVocab& vocab) {
  Result<TokenizerPtr> t = Tokenizer::from_gguf(vocab);
  EXPECT_FALSE(t.ok());
  return t.status().to_string();
}

TEST(ByteLevel, MergesSplitsAndComesBack) {
  const TokenizerPtr t = made(small_byte_level_vocab());
  const int32_t hello = t->token_id("hello"), w = t->token_id(byte_level(" w"));
  const std::vector<int32_t> ids = *t->encode("hello world", false, false);
  ASSERT_EQ(ids.size(), 6u);
  EXPECT_EQ(ids[0], hello);
  EXPECT_EQ(ids[1], w);
  EXPECT_EQ(*t->decode(ids, true), "hello world");
  EXPECT_EQ(t->token_bytes(w), " w");
  EXPECT_EQ(t->token_text(w), "\u0120w");
}

TEST(ByteLevel, EveryTextComesBack) {
  const TokenizerPtr t = made(small_byte_level_vocab());
  for (const char* text : {"", " ", "\n\n  \t", "caf\u00e9", "\U0001F468\u200D\U0001F469\u200D\U0001F467",
                           "\u0001\u0002", "\u0645\u0631\u062d\u0628\u0627", "\u65e5\u672c\u8a9e  text"}) {
    EXPECT_EQ(*t->decode(*t->encode(text, false, false), false), text);
  }
}

TEST(ByteLevel, SpecialTextIsATokenOnlyWhereAllowed) {
  const TokenizerPtr t = made(small_byte_level_vocab());
  EXPECT_THAT(*t->encode("<|im_end|>", false, true), ElementsAre(t->token_id("<|im_end|>")));
  const std::vector<int32_t> plain = *t->encode("<|im_end|>", false, false);
  EXPECT_EQ(plain.size(), 10u);
  for (const int32_t id : plain) EXPECT_FALSE(t->is_special(id));
  // A user-defined token is text of the model's own and always whole; it is not hidden.
  EXPECT_THAT(*t->encode("<think>", false, false), ElementsAre(t->token_id("<think>")));
  EXPECT_FALSE(t->is_special(t->token_id("<think>")));
}

TEST(ByteLevel, EndsOfGeneration) {
  const TokenizerPtr t = made(small_byte_level_vocab());
  EXPECT_THAT(t->end_of_generation(), ElementsAre(2, 0));
}

TEST(ByteLevel, SkipsSpecialTokensWhenAsked) {
  const TokenizerPtr t = made(small_byte_level_vocab());
  const std::vector<int32_t> ids = *t->encode("<|im_start|>hello<|im_end|>", false, true);
  EXPECT_EQ(*t->decode(ids, true), "hello");
  EXPECT_EQ(*t->decode(ids, false), "<|im_start|>hello<|im_end|>");
}

TEST(SentencePiece, SpacesAndBytes) {
  const TokenizerPtr t = made(small_spm_vocab());
  EXPECT_THAT(*t->encode("hello", true, false), ElementsAre(1, t->token_id("\u2581hello")));
  const std::vector<int32_t> e_acute = *t->encode("h\u00e9", false, false);
  EXPECT_THAT(e_acute, ElementsAre(t->token_id("\u2581h"), 3 + 0xC3, 3 + 0xA9));
  EXPECT_EQ(*t->decode(e_acute, true), "h\u00e9");
  EXPECT_EQ(*t->decode(*t->encode(" hello  world", false, false), true), " hello  world");
}

TEST(SentencePiece, ItsTokenizerJsonTokenizesAlike) {
  const TokenizerPtr t = made(small_spm_vocab());
  const Result<std::string> json = t->to_json();
  ASSERT_TRUE(json.ok()) << json.status().message();
  const Result<TokenizerPtr> again = Tokenizer::from_json(*json);
  ASSERT_TRUE(again.ok()) << again.status().message();
  for (const char* text :
       {"hello", "hello world", " hello  world", "h\u00e9llo", "world hello hel", "", "\n", "</s>"}) {
    for (const bool bos : {false, true})
      EXPECT_EQ(*(*again)->encode(text, bos, true), *t->encode(text, bos, true)) << text;
    EXPECT_EQ(*(*again)->decode(*t->encode(text, false, false), true), text);
  }
}

TEST(SentencePiece, NoMergeMakesASpecialToken) {
  const TokenizerPtr t = made(small_spm_vocab());
  const std::vector<int32_t> plain = *t->encode("</s>", false, false);
  for (const int32_t id : plain) EXPECT_FALSE(t->is_special(id));
  EXPECT_THAT(*t->encode("</s>", false, true), ElementsAre(2));
}

TEST(Refused, BadUtf8AndUnknownIds) {
  const TokenizerPtr t = made(small_byte_level_vocab());
  const Status bad = t->encode("ab\xFF", false, false).status();
  EXPECT_EQ(bad.code(), Code::invalid_argument);
  EXPECT_THAT(bad.message(), HasSubstr("byte 2"));
  EXPECT_EQ(t->decode(std::vector<int32_t>{-1}, true).status().code(), Code::invalid_argument);
  EXPECT_EQ(t->decode(std::vector<int32_t>{1 << 30}, true).status().code(), Code::invalid_argument);
  EXPECT_EQ(t->token_bytes(-5), "");
}

TEST(Refused, VocabulariesThatCannotBe) {
  GgufVocab v = small_byte_level_vocab();
  v.merges.push_back("nospace");
  EXPECT_THAT(refusal(v), HasSubstr("merges[6]"));
  v = small_byte_level_vocab();
  v.merges.push_back("zz yy");
  EXPECT_THAT(refusal(v), HasSubstr("\"zz\", which is not in the vocabulary"));
  v = small_byte_level_vocab();
  v.types.pop_back();
  EXPECT_THAT(refusal(v), HasSubstr("token_type has"));
  v = small_byte_level_vocab();
  v.eos = 100000;
  EXPECT_THAT(refusal(v), HasSubstr("eos_token_id is 100000"));
  v = small_byte_level_vocab();
  v.pre = "martian";
  EXPECT_THAT(refusal(v), HasSubstr("smollm"));
  v.model = "bert";
  EXPECT_THAT(refusal(v), HasSubstr("bert"));
  EXPECT_THAT(refusal({}), HasSubstr("tokens has 0 entries"));
}

TEST(Json, ByteLevelFileAndItsConfig) {
  const std::string json = R"({"version":"1.0","added_tokens":[
    {"id":4,"content":"<|eot|>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],
    "normalizer":null,"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},
    "post_processor":null,"decoder":{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true},
    "model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2,"\u0120":3},"merges":["a b"]}})";
  Result<TokenizerPtr> t = Tokenizer::from_json(
      json, R"({"eos_token":{"content":"<|eot|>"},"chat_template":[{"name":"default","template":"x"}]})");
  ASSERT_TRUE(t.ok()) << t.status().to_string();
  EXPECT_THAT(*(*t)->encode("ab a<|eot|>", false, true), ElementsAre(2, 3, 0, 4));
  EXPECT_THAT((*t)->end_of_generation(), ElementsAre(4));
  EXPECT_EQ((*t)->chat_template(), "x");
  EXPECT_EQ(*(*t)->decode(std::vector<int32_t>{2, 3, 0}, true), "ab a");
}

// As BERT's files are: words in pieces, of which all but the first begin with ##.
TEST(Json, WordPieceFile) {
  const std::string json = R"({"version":"1.0","added_tokens":[
    {"id":0,"content":"[CLS]","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true},
    {"id":1,"content":"[SEP]","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],
    "normalizer":{"type":"BertNormalizer","clean_text":true,"handle_chinese_chars":true,"strip_accents":null,
    "lowercase":true},"pre_tokenizer":{"type":"BertPreTokenizer"},"post_processor":{"type":"BertProcessing",
    "sep":["[SEP]",1],"cls":["[CLS]",0]},"decoder":{"type":"WordPiece","prefix":"##","cleanup":true},
    "model":{"type":"WordPiece","unk_token":"[UNK]","continuing_subword_prefix":"##","max_input_chars_per_word":100,
    "vocab":{"[CLS]":0,"[SEP]":1,"[UNK]":2,"hel":3,"##lo":4,"un":5,"##aff":6,"##able":7,",":8,"\u6771":9}}})";
  Result<TokenizerPtr> t = Tokenizer::from_json(json);
  ASSERT_TRUE(t.ok()) << t.status().to_string();
  EXPECT_THAT(*(*t)->encode("H\u00c9llo", false, false), ElementsAre(3, 4));
  EXPECT_THAT(*(*t)->encode("Hello, UNAFFABLE zebra \u6771\u6771", true, false),
              ElementsAre(0, 3, 4, 8, 5, 6, 7, 2, 9, 9, 1));
  EXPECT_EQ(*(*t)->decode(std::vector<int32_t>{0, 3, 4, 8, 5, 6, 7, 1}, true), "hello , unaffable");
}

TEST(Json, BrokenFilesAreRefused) {
  for (const char* json : {"", "{}", "[1,2", R"({"model":{"type":"BPE","vocab":{"a":0},"merges":["a b"]}})"}) {
    EXPECT_EQ(Tokenizer::from_json(json).status().code(), Code::invalid_argument) << json;
  }
}

}  // namespace
}  // namespace kvasir::text
