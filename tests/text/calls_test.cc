// Free answers that may call tools: what a grammar leaves free and what it holds, against what the parser reads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>

#include "model/text/tool_parser.h"
#include "tests/text/small_vocab.h"

namespace kvasir::text {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

const std::vector<CallableTool> kTools = {
    {"weather", R"({"type":"object","properties":{"city":{"type":"string","maxLength":4},"days":{"$ref":"#/$defs/few"}},
        "required":["city","days"],"additionalProperties":false,"$defs":{"few":{"enum":[1,2]}}})"},
    {"say \"so\"", R"({"type":"object"})"},
};

class Calls : public ::testing::Test {
 protected:
  Calls() {
    GgufVocab v = small_byte_level_vocab();
    auto add = [&v](const char* text, int type) {
      v.tokens.emplace_back(text);
      v.types.push_back(type);
      return static_cast<int32_t>(v.tokens.size() - 1);
    };
    python = add("<|python_tag|>", 3);
    tag = add("<tool_call>", 4);
    crossing = add(">{", 1);
    t = *Tokenizer::from_gguf(v);
    compiler = *GrammarCompiler::create(t);
  }
  std::unique_ptr<Matcher> matcher(ToolFormat format, std::span<const CallableTool> tools = kTools) {
    auto m = compiler->compile(calls_grammar(format, tools));
    EXPECT_TRUE(m.ok()) << m.status().to_string();
    return m.ok() ? std::move(*m) : nullptr;
  }
  std::vector<int32_t> allowed(Matcher& m) {
    std::vector<uint32_t> bits((t->vocab_size() + 31) / 32);
    const Status s = m.mask(bits);
    EXPECT_TRUE(s.ok()) << s.to_string();
    std::vector<int32_t> ids;
    for (int32_t i = 0; i < t->vocab_size(); ++i)
      if (bits[i / 32] >> (i % 32) & 1) ids.push_back(i);
    return ids;
  }
  bool takes(Matcher& m, std::string_view text) {
    for (const char c : text)
      if (!m.consume(t->token_id(byte_level(std::string(1, c)))).ok()) return false;
    return true;
  }
  // Whether `text` may be a whole answer.
  bool whole(ToolFormat format, std::string_view text) {
    auto m = matcher(format);
    return takes(*m, text) && m->consume(t->end_of_generation()[0]).ok();
  }
  // Tokens that no free text could hold here: bytes that begin no character.
  std::vector<int32_t> not_allowed(Matcher& m) {
    std::vector<int32_t> out;
    const std::vector<int32_t> some = allowed(m);
    for (int32_t i = 0; i < t->vocab_size(); ++i) {
      const std::string bytes = t->token_bytes(i);
      const auto first = static_cast<unsigned char>(bytes.empty() ? 0 : bytes[0]);
      const bool begins = t->is_special(i) || first < 0x80 || (first >= 0xC2 && first <= 0xF4);
      if (begins && !std::binary_search(some.begin(), some.end(), i)) out.push_back(i);
    }
    return out;
  }

  TokenizerPtr t;
  std::shared_ptr<GrammarCompiler> compiler;
  int32_t python = 0, tag = 0, crossing = 0;
};

TEST_F(Calls, TextIsFreeUntilACallBegins) {
  auto m = matcher(ToolFormat::hermes);
  EXPECT_THAT(not_allowed(*m), ::testing::IsEmpty());
  EXPECT_TRUE(takes(*m, "{\"name\": 3}\n\xC3\xA9</tool_call><tool_cal"));
  EXPECT_THAT(not_allowed(*m), ::testing::ElementsAre(t->bos(), python));  // unseen, they would make a call
  EXPECT_TRUE(takes(*m, "x"));
  EXPECT_THAT(not_allowed(*m), ::testing::IsEmpty());
  EXPECT_TRUE(m->consume(python).ok());
  EXPECT_THAT(not_allowed(*m), ::testing::IsEmpty());
  EXPECT_TRUE(m->consume(tag).ok());
  std::string next;
  for (const int32_t id : allowed(*m)) next += t->token_bytes(id);
  EXPECT_EQ(next, "\n\r {");
}

TEST_F(Calls, ATokenMayCrossIntoACall) {
  auto m = matcher(ToolFormat::hermes);
  EXPECT_TRUE(takes(*m, "<tool_call"));
  EXPECT_TRUE(m->consume(crossing).ok());
  EXPECT_TRUE(takes(*m, "\"name\":\"weather\",\"arguments\":{\"city\":\"Oslo\",\"days\":1}}</tool_call>"));
  EXPECT_THAT(not_allowed(*m), ::testing::IsEmpty());  // free again
}

TEST_F(Calls, HermesCallsObeyTheirSchemas) {
  const auto h = ToolFormat::hermes;
  const std::string good = R"({"name": "weather", "arguments": {"city": "Rome", "days": 2}})";
  EXPECT_TRUE(whole(h, "hello <tool_call>\n" + good + "\n</tool_call>\n<tool_call>" + good + "</tool_call> done"));
  EXPECT_TRUE(whole(h, R"(<tool_call>{"arguments": {"city": "Rome", "days": 2}, "name": "weather"}</tool_call>)"));
  EXPECT_TRUE(whole(h, R"(<tool_call>{"name":"say \"so\"","arguments":{"any":[1,{}]}}</tool_call>)"));
  EXPECT_TRUE(whole(h, ""));
  for (const char* bad :
       {R"({"name": "weather", "arguments": {"city": "Rome", "days": 3)", R"({"name": "weather", "arguments": {"days")",
        R"({"name": "weather", "arguments": {"city": "Romes)", R"({"name": "x)", R"({"name": "weather", "parameters)",
        R"({"name": "weather"})", R"({"name": "weather", "arguments": ")", "[", "{}"})
    EXPECT_FALSE(takes(*matcher(h), std::string("<tool_call>") + bad)) << bad;
  EXPECT_FALSE(whole(h, "<tool_call>" + good));  // a call is closed
}

TEST_F(Calls, TheAnswerIsACallForLlama3) {
  const auto l = ToolFormat::llama3;
  const std::string good = R"({"name": "weather", "parameters": {"city": "Rome", "days": 2}})";
  EXPECT_TRUE(whole(l, good));
  EXPECT_TRUE(whole(l, "\n " + good + "; " + good));
  EXPECT_TRUE(whole(l, "<|python_tag|>" + good));
  EXPECT_TRUE(whole(l, R"({"type": "function", "name": "weather", "parameters": {"city": "a", "days": 1}})"));
  EXPECT_TRUE(whole(l, "So: " + good + "{\"name\""));  // not at the beginning: text
  EXPECT_TRUE(whole(l, R"({"city": "Rome", "name": 3})"));
  EXPECT_TRUE(whole(l, "{}"));
  EXPECT_TRUE(whole(l, "<|python_tag|>print(1)"));
  EXPECT_TRUE(whole(l, ""));
  for (const char* bad : {R"({"name": "weather", "parameters": {"city": "Rome", "days": 3)", R"( {"name": "x)",
                          R"({"parameters")", R"({"na\)", R"({"type": "object)", R"({"name": "weather", "arguments)"})
    EXPECT_FALSE(takes(*matcher(l), bad)) << bad;
  auto m = matcher(l);
  EXPECT_THAT(not_allowed(*m), ::testing::IsEmpty());
  EXPECT_TRUE(m->consume(python).ok());
  EXPECT_TRUE(takes(*m, "{\"name\": \"weather"));
  EXPECT_FALSE(takes(*m, "s"));
  m = matcher(l);
  EXPECT_TRUE(takes(*m, "{ "));
  EXPECT_FALSE(m->consume(python).ok());  // unseen, what follows would be a call
  m = matcher(l);
  EXPECT_TRUE(takes(*m, "Hi"));
  EXPECT_TRUE(m->consume(python).ok());
  EXPECT_TRUE(takes(*m, good + "!"));
}

TEST_F(Calls, CallsAndNothingElseWhenTheyAreForced) {
  for (const ToolFormat format : {ToolFormat::hermes, ToolFormat::llama3}) {
    const bool tagged = format == ToolFormat::hermes;
    const std::string call =
        tagged ? R"(<tool_call>{"name": "weather", "arguments": {"city": "a", "days": 1}}</tool_call>)"
               : R"({"name": "weather", "parameters": {"city": "a", "days": 1}})";
    auto takes_whole = [&](HowMany how_many, const std::string& text) {
      auto m = *compiler->compile(calls_grammar(format, kTools, "", how_many));
      return takes(*m, text) && m->consume(t->end_of_generation()[0]).ok();
    };
    const std::string two = call + (tagged ? "\n" : "; ") + call;
    EXPECT_TRUE(takes_whole(HowMany::one, call));
    EXPECT_TRUE(takes_whole(HowMany::some, call));
    EXPECT_TRUE(takes_whole(HowMany::some, two));
    EXPECT_FALSE(takes_whole(HowMany::one, two));
    for (const HowMany how_many : {HowMany::one, HowMany::some}) {
      EXPECT_FALSE(takes_whole(how_many, ""));
      EXPECT_FALSE(takes_whole(how_many, "I"));
      EXPECT_FALSE(takes_whole(how_many, call + "."));
    }
  }
}

TEST_F(Calls, ACallOrAnAnswerOfItsOwnSchema) {
  for (const ToolFormat format : {ToolFormat::hermes, ToolFormat::llama3}) {
    const bool tagged = format == ToolFormat::hermes;
    const std::string call =
        tagged ? R"(<tool_call>{"name": "weather", "arguments": {"city": "a", "days": 1}}</tool_call>)"
               : R"({"name": "weather", "parameters": {"city": "a", "days": 1}})";
    const GrammarSpec spec = calls_grammar(
        format, kTools, R"({"type":"object","properties":{"note":{"type":"integer"}},"additionalProperties":false})");
    auto takes_whole = [&](const std::string& text) {
      auto m = *compiler->compile(spec);
      return takes(*m, text) && m->consume(t->end_of_generation()[0]).ok();
    };
    EXPECT_TRUE(takes_whole(call));
    EXPECT_TRUE(takes_whole(call + (tagged ? "\n" : "; ") + call));
    EXPECT_TRUE(takes_whole(R"({"note": 3})"));
    EXPECT_FALSE(takes_whole(R"({"other": 3})"));
    EXPECT_FALSE(takes_whole("text"));
    EXPECT_FALSE(takes_whole(R"({"name": "weather", "parameters": {"city": "a", "days": 3}})"));
  }
}

TEST_F(Calls, ToolsThatCannotBeHeldAreRefused) {
  auto refusal = [&](const char* schema) {
    const std::vector<CallableTool> tools = {{"f", schema}};
    return compiler->compile(calls_grammar(ToolFormat::hermes, tools)).status().to_string();
  };
  EXPECT_THAT(refusal(R"({"type":"strong"})"), HasSubstr("strong"));
  EXPECT_THAT(refusal(R"({"$ref":"http://127.0.0.1:1/x"})"), HasSubstr("127.0.0.1"));
  EXPECT_THAT(refusal("{"), HasSubstr("INVALID_ARGUMENT"));
  EXPECT_THAT(compiler->compile(calls_grammar(ToolFormat::hermes, {})).status().to_string(), HasSubstr("0 tools"));
}

// Whatever is drawn, and however tokens that readers do not see part the text: a call that the parser finds is whole
// and obeys its schema.
TEST_F(Calls, WhatTheParserFindsObeys) {
  std::mt19937 random(7);
  const std::vector<std::string> pieces = {"<tool_call>",
                                           "{",
                                           "\"name\"",
                                           "\"type\"",
                                           ":",
                                           "\"function\"",
                                           "\"weather\"",
                                           ",",
                                           "\"parameters\"",
                                           "\"arguments\"",
                                           "\"city\"",
                                           "\"Rome\"",
                                           "\"days\"",
                                           "3",
                                           "2",
                                           "}",
                                           "</tool_call>",
                                           ";",
                                           " ",
                                           "<tool",
                                           "_call>",
                                           "x",
                                           "\"na",
                                           "\\"};
  int calls = 0;
  for (const ToolFormat format : {ToolFormat::hermes, ToolFormat::llama3}) {
    const std::string begin = format == ToolFormat::hermes ? "<tool_call>{" : "{\"name\"";
    for (int round = 0; round < 300; ++round) {
      auto m = matcher(format);
      std::string seen;
      for (int i = 0; i < 40; ++i) {
        if (random() % 16 == 0) {
          (void)m->consume(python);
          continue;
        }
        // A piece that fits, or else some allowed token.
        bool fits = false;
        for (size_t tried = 0, first = random() % pieces.size(); tried < pieces.size() && !fits; ++tried) {
          const std::string& piece = i == 0 && round % 2 ? begin : pieces[(first + tried) % pieces.size()];
          auto trial = m->clone();
          fits = takes(*trial, piece);
          if (!fits) continue;
          m = std::move(trial);
          seen += piece;
        }
        if (fits) continue;
        const std::vector<int32_t> some = allowed(*m);
        ASSERT_FALSE(some.empty()) << seen;
        const int32_t id = some[random() % some.size()];
        ASSERT_TRUE(m->consume(id).ok());
        if (!t->is_special(id)) seen += t->token_bytes(id);
      }
      ToolParser parser(format);
      std::string arguments, name;
      auto check = [&] {
        if (name == "weather") {
          const Json got = Json::parse(arguments, nullptr, false);
          // A call that was cut off is only begun.
          if (!got.is_discarded()) {
            ++calls;
            EXPECT_TRUE(got.is_object() && got.size() == 2 && got["city"].is_string() && got["days"].is_number() &&
                        (got["days"] == 1 || got["days"] == 2))
                << seen << "\n"
                << arguments;
          }
        } else if (!name.empty()) {
          EXPECT_EQ(name, "say \"so\"") << seen;
        }
      };
      for (ToolParser::Out out : {parser.push(seen), parser.finish()})
        for (const auto& delta : out.calls) {
          if (!delta.name.empty()) {
            check();
            name = delta.name;
            arguments.clear();
          }
          arguments += delta.arguments;
        }
      check();
    }
  }
  EXPECT_GT(calls, 20);
}

}  // namespace
}  // namespace kvasir::text
