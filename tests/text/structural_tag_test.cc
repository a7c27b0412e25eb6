// Free text, and from a trigger on a tag of a schema: both forms of a structural tag, and every part of the newer one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/text/small_vocab.h"

namespace kvasir::text {
namespace {

using ::testing::HasSubstr;

const std::string kTags = R"([
  {"begin":"<f=a>","schema":{"type":"object","properties":{"n":{"enum":[1,2]}},"required":["n"],
   "additionalProperties":false},"end":"</f>"},
  {"begin":"<f=b>","schema":{"type":"boolean"},"end":"</f>"},
  {"begin":"[go/","schema":{"type":"null"},"end":"]"}])";

class StructuralTag : public ::testing::Test {
 protected:
  bool whole(const std::string& tag, std::string_view text) {
    auto m = compiler->compile({GrammarSpec::Kind::structural_tag, tag, {}});
    EXPECT_TRUE(m.ok()) << m.status().to_string();
    if (!m.ok()) return false;
    for (const char c : text)
      if (!(*m)->consume(t->token_id(byte_level(std::string(1, c)))).ok()) return false;
    return (*m)->consume(t->end_of_generation()[0]).ok();
  }
  std::string refusal(const std::string& tag) {
    return compiler->compile({GrammarSpec::Kind::structural_tag, tag, {}}).status().to_string();
  }
  static std::string format(const std::string& inner) { return R"({"type":"structural_tag","format":)" + inner + "}"; }

  TokenizerPtr t = *Tokenizer::from_gguf(small_byte_level_vocab());
  std::shared_ptr<GrammarCompiler> compiler = *GrammarCompiler::create(t);
};

TEST_F(StructuralTag, TextIsFreeUntilATrigger) {
  const std::string tag = R"({"type":"structural_tag","triggers":["<f=","[go/"],"structures":)" + kTags + "}";
  for (const char* good :
       {"", "plain < text\n<f", R"(<f=a>{"n": 2}</f>)", R"(so: <f=b>true</f> and <f=a>{"n":1}</f> ends)",
        "x [go/null] <f=b>false</f>", "<f=b>true</f><f=b>true</f>"})
    EXPECT_TRUE(whole(tag, good)) << good;
  for (const char* bad : {"<f=", "<f=c>", R"(<f=a>{"n": 3}</f>)", "<f=b>true</f", "x [go/<f=b>true</f>", "[go/nil]",
                          "<f=b>true</f> <f=?", "[go/null] [go/1]"})
    EXPECT_FALSE(whole(tag, bad)) << bad;
}

TEST_F(StructuralTag, TagsMayBeWanted) {
  auto tags = [&](const std::string& more) {
    return format(R"({"type":"triggered_tags","triggers":["<f="],"tags":[
        {"format":"tag","begin":"<f=a>","content":{"type":"json_schema","json_schema":{"type":"boolean"}},"end":"</f>"},
        {"begin":"<f=","content":{"type":"regex","pattern":"[/x]{2}"},"end":["!","?"]}])" +
                  more + "}");
  };
  EXPECT_TRUE(whole(tags(""), "free"));
  EXPECT_TRUE(whole(tags(""), "<f=/x! free <f=a>true</f>"));
  const std::string one = tags(R"(,"at_least_one":true)"), first = tags(R"(,"stop_after_first":true)"),
                    both = tags(R"(,"at_least_one":true,"stop_after_first":true)");
  EXPECT_TRUE(whole(one, "<f=x/?and more <f=xx!"));
  EXPECT_FALSE(whole(one, "free"));
  EXPECT_TRUE(whole(first, "free"));
  EXPECT_TRUE(whole(first, "free <f=xx?"));
  EXPECT_FALSE(whole(first, "free <f=xx? more"));
  EXPECT_TRUE(whole(both, "<f=a>false</f>"));
  EXPECT_FALSE(whole(both, "<f=a>false</f><f=xx!"));
}

TEST_F(StructuralTag, PartsWithinParts) {
  const std::string think = R"({"type":"tag","begin":"<think>","content":{"type":"any_text"},"end":"</think>"})";
  const std::string call = R"j({"begin":"(","content":{"type":"const_string","value":"ab"},"end":")"})j";
  const std::string thought = format(R"({"type":"sequence","elements":[)" + think + R"(,
      {"type":"triggered_tags","triggers":["("],"tags":[)" +
                                     call + "]}]}");
  EXPECT_TRUE(whole(thought, "<think>(x) </thin</think>free (ab) text"));
  EXPECT_FALSE(whole(thought, "<think></think>(x)"));
  EXPECT_FALSE(whole(thought, "free"));
  const std::string list =
      format(R"({"type":"tags_with_separator","separator":", ","at_least_one":true,"tags":[)" + call + "]}");
  EXPECT_TRUE(whole(list, "(ab), (ab)"));
  EXPECT_FALSE(whole(list, "(ab), "));
  EXPECT_FALSE(whole(list, ""));
  const std::string either = format(R"({"type":"or","elements":[{"type":"const_string","value":"no"},)" + think + "]}");
  EXPECT_TRUE(whole(either, "no"));
  EXPECT_TRUE(whole(either, "<think>y</think>"));
  EXPECT_FALSE(whole(either, "yes"));
  EXPECT_TRUE(whole(format(R"({"type":"any_text"})"), "any\ntext"));
}

TEST_F(StructuralTag, WhatCannotBeIsRefused) {
  for (const auto& [tag, says] : std::vector<std::pair<std::string, const char*>>{
           {"{", "not usable"},
           {R"({"type":"json"})", "structural_tag"},
           {R"({"type":"structural_tag"})", "either a format, or structures and triggers"},
           {R"({"triggers":["["],"structures":)" + kTags + "}", "begins with \"<f=a>\" has none of the triggers"},
           {R"({"triggers":["<f=","[","none"],"structures":)" + kTags + "}", "none"},
           {R"({"triggers":[""],"structures":)" + kTags + "}", "empty trigger"},
           {format(R"({"type":"qwen_xml_parameter"})"), "unknown variant"},
           {format(R"({"type":"any_text","excludes":["x"]})"), "excludes"},
           {format(R"({"type":"sequence","elements":[{"type":"any_text"},{"type":"const_string","value":"x"}]})"),
            "any_text has no end"},
           {format(R"({"type":"sequence","elements":[]})"), "empty sequence"},
           {format(R"({"type":"tags_with_separator","separator":",","tags":[
               {"type":"regex","begin":"<","content":{"type":"const_string","value":"x"},"end":">"}]})"),
            "lists a \"regex\""},
           {format(R"({"type":"regex","pattern":"x\\"})"), "backslash"},
           {format(R"({"type":"regex","pattern":"("})"), "cannot be used"},
           {format(R"({"type":"const_string","value":""})"), "empty value"}})
    EXPECT_THAT(refusal(tag), ::testing::AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr(says))) << tag;
}

}  // namespace
}  // namespace kvasir::text
