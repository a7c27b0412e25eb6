// Calls held to their schemas in each family's own syntax: what the grammar lets through, the family's parser reads as
// calls that obey, whether its tags are tokens of their own or text.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>

#include "model/text/tool_parser.h"
#include "tests/text/small_vocab.h"

namespace kvasir::text {
namespace {

using Json = nlohmann::json;
using Read = std::vector<std::pair<std::string, Json>>;

const std::vector<CallableTool> kTools = {
    {"weather", R"({"type":"object","properties":{"city":{"type":"string","maxLength":4},"days":{"$ref":"#/$defs/few"},
        "unit":{"type":"string","enum":["C","F"]},"note":{"anyOf":[{"type":"string"},{"type":"null"}]}},
        "required":["city","days"],"additionalProperties":false,"$defs":{"few":{"enum":[1,2]}}})"},
    {"now", R"({"type":"object","properties":{},"additionalProperties":false})"},
    {"any", R"({"type":"object"})"},
};

// Every family that a grammar can hold, with calls as it writes them: of one tool, and of two.
struct Family {
  ToolFormat format;
  std::string one, two;
  std::vector<std::string> bad;  // beginnings that are refused
};

const std::string kKimi = "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
                  kKimiEnd = "<|tool_call_end|><|tool_calls_section_end|>",
                  kDeepseek = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
                  kDeepseekEnd = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
const std::string kRome = R"({"city": "Rome", "days": 2})";

std::vector<Family> families() {
  const std::string named = R"({"name": "weather", "arguments": )" + kRome + "}",
                    now = R"({"name": "now", "arguments": {}})";
  return {
      {ToolFormat::xml,
       "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
       "</function>\n</tool_call>",
       "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
       "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
       {"<tool_call>\n<function=nobody", "<tool_call>\n<function=weather>\n<parameter=days>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nRomes", "<tool_call>{",
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3",
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>",
        "<tool_call>\n<function=now>\n<parameter"}},
      {ToolFormat::seed,
       "<seed:tool_call>\n<function=weather>\n<parameter=city>Rome</parameter>\n<parameter=days>2</parameter>\n"
       "</function>\n</seed:tool_call>",
       "<seed:tool_call>\n<function=weather>\n<parameter=city>Rome</parameter>\n<parameter=days>2</parameter>\n"
       "</function>\n</seed:tool_call><seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
       {"<seed:tool_call>\n<function=weather>\n<parameter=city>Romes",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>\n"}},
      {ToolFormat::glm,
       "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
       "<arg_value>2</arg_value>\n</tool_call>",
       "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>days</arg_key>"
       "<arg_value>2</arg_value></tool_call><tool_call>now</tool_call>",
       {"<tool_call>nobody", "<tool_call>weather\n</tool_call>", "<tool_call>now\n<arg_key>",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Romes"}},
      {ToolFormat::minimax,
       "<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">Rome</parameter>\n"
       "<parameter name=\"days\">2</parameter>\n</invoke>\n</minimax:tool_call>",
       "<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">Rome</parameter>\n"
       "<parameter name=\"days\">2</parameter>\n</invoke>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>",
       {"<minimax:tool_call>\n<invoke name=\"nobody", "<minimax:tool_call>\n</minimax",
        "<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">Rome</parameter>\n</invoke>"}},
      {ToolFormat::mistral,
       "[TOOL_CALLS] [" + named + "]",
       "[TOOL_CALLS][" + named + ", " + now + "]",
       {"[TOOL_CALLS]nobody", "[TOOL_CALLS][]", "[TOOL_CALLS]weather[ARGS]{\"days\"", "[TOOL_CALLS][{\"arguments\""}},
      {ToolFormat::mistral,
       "[TOOL_CALLS]weather[ARGS]" + kRome,
       "[TOOL_CALLS]weather[ARGS]" + kRome + "[TOOL_CALLS]now[ARGS]{}",
       {"[TOOL_CALLS]now[ARGS]{\""}},
      {ToolFormat::list,
       "<|tool_call|>[" + named + "]<|/tool_call|>",
       "<|tool_call|>[" + named + "," + now + "]",
       {"<|tool_call|>{", "<|tool_call|>[{\"name\": \"x"}},
      {ToolFormat::functools,
       "functools[" + named + "]",
       "functools[" + named + ", " + now + "]",
       {"functools[]", "functools[{\"name\": \"x", "functools[{\"arguments\""}},
      {ToolFormat::deepseek,
       kDeepseek + "function<｜tool▁sep｜>weather\n```json\n" + kRome + "\n```" + kDeepseekEnd,
       kDeepseek + "weather<｜tool▁sep｜>" + kRome + "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}" +
           kDeepseekEnd,
       {kDeepseek + "nobody", kDeepseek + "weather<｜tool▁sep｜>{\"days\"", "<｜tool▁calls▁begin｜>x"}},
      {ToolFormat::kimi,
       kKimi + "weather:0<|tool_call_argument_begin|>" + kRome + kKimiEnd,
       kKimi + "weather:0<|tool_call_argument_begin|>" + kRome +
           "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}" + kKimiEnd,
       {kKimi + "nobody", kKimi + "weather<", kKimi + "now:3<|tool_call_argument_begin|>{\"",
        "<|tool_calls_section_begin|>functions"}},
      {ToolFormat::gemma,
       "<|tool_call>call:weather{city:<|\"|>Rome<|\"|>,days:2}<tool_call|>",
       "<|tool_call>call:weather{city:<|\"|>Rome<|\"|>,days:2}<tool_call|>\n<|tool_call>call:now{}<tool_call|>",
       {"<|tool_call>call:nobody", "<|tool_call>call:weather{days", "<|tool_call>call:weather{city:<|\"|>Romes",
        "<|tool_call>call:weather{city:\"", "<|tool_call>call:weather{city:<|\"|>Rome<|\"|>}",
        "<|tool_call>call:weather{city:<|\"|>Rome<|\"|>,days:3", "<|tool_call>call:now{a", "<|tool_call>{"}},
      {ToolFormat::olmo,
       "<function_calls>weather(city=\"Rome\", days=2)</function_calls>",
       "<function_calls>\nweather(city='Rome',days=2)\nnow()\n</function_calls>",
       {"<function_calls>nobody", "<function_calls>weather(days", "<function_calls>weather(city=\"Romes",
        "<function_calls>weather(city='Romes", "<function_calls>weather(city=\"Rome\")", "<function_calls>now(a",
        "<function_calls></function", "<function_calls>[", "<function_calls>weather(city=\"Rome\", days=3"}},
  };
}

const std::vector<std::string> kTags = {"[TOOL_CALLS]",
                                        "[ARGS]",
                                        "<|tool_call|>",
                                        "<|/tool_call|>",
                                        "<|tool_calls_section_begin|>",
                                        "<|tool_calls_section_end|>",
                                        "<|tool_call_begin|>",
                                        "<|tool_call_argument_begin|>",
                                        "<|tool_call_end|>",
                                        "<|tool_call>",
                                        "<tool_call|>",
                                        "<|\"|>",
                                        "<minimax:tool_call>",
                                        "</minimax:tool_call>"};

// Param: whether the tags are special tokens.
class HeldCalls : public ::testing::TestWithParam<bool> {
 protected:
  HeldCalls() {
    GgufVocab v = small_byte_level_vocab();
    v.tokens.emplace_back("<|other|>");
    v.types.push_back(3);
    for (const std::string& tag : kTags) {
      if (!GetParam()) break;
      v.tokens.push_back(tag);
      v.types.push_back(3);
    }
    t = *Tokenizer::from_gguf(v);
    compiler = *GrammarCompiler::create(t);
  }
  std::unique_ptr<Matcher> matcher(ToolFormat format, HowMany how_many = HowMany::any, std::string_view answer = "") {
    auto m = compiler->compile(calls_grammar(format, kTools, answer, how_many));
    EXPECT_TRUE(m.ok()) << m.status().to_string();
    return m.ok() ? std::move(*m) : nullptr;
  }
  // As a model writes it: tags that are tokens, as tokens.
  bool takes(Matcher& m, std::string_view text) {
    while (!text.empty()) {
      size_t n = 1;
      for (const std::string& tag : kTags)
        if (GetParam() && text.starts_with(tag)) n = tag.size();
      const std::string piece(text.substr(0, n));
      if (!m.consume(t->token_id(n > 1 ? piece : byte_level(piece))).ok()) return false;
      text.remove_prefix(n);
    }
    return true;
  }
  bool whole(std::unique_ptr<Matcher> m, std::string_view text) {
    return takes(*m, text) && m->consume(t->end_of_generation()[0]).ok();
  }
  static Read read(ToolFormat format, std::string_view text) {
    ToolParser parser(format, bare_texts(kTools));
    Read calls;
    for (const ToolParser::Out& out : {parser.push(text), parser.finish()})
      for (const auto& call : out.calls) calls.emplace_back(call.name, Json::parse(call.arguments, nullptr, false));
    return calls;
  }

  TokenizerPtr t;
  std::shared_ptr<GrammarCompiler> compiler;
};

INSTANTIATE_TEST_SUITE_P(Tags, HeldCalls, ::testing::Bool(),
                         [](const auto& p) { return p.param ? "AreTokens" : "AreText"; });

TEST_P(HeldCalls, AreWrittenInTheFamilysOwnSyntax) {
  const Json rome = Json::parse(kRome);
  for (const Family& family : families()) {
    const ToolFormat f = family.format;
    SCOPED_TRACE(name_of(f));
    ASSERT_TRUE(can_hold(f, kTools));
    EXPECT_EQ(read(f, family.one), (Read{{"weather", rome}}));
    EXPECT_EQ(read(f, family.two), (Read{{"weather", rome}, {"now", Json::object()}}));
    for (const HowMany how_many : {HowMany::one, HowMany::some}) {
      EXPECT_TRUE(whole(matcher(f, how_many), family.one));
      EXPECT_EQ(whole(matcher(f, how_many), family.two), how_many == HowMany::some);
      for (const std::string& none : {std::string(), std::string("I"), family.one + ".", "x" + family.one})
        EXPECT_FALSE(whole(matcher(f, how_many), none)) << none;
    }
    for (const std::string& text :
         {std::string(), std::string("Free <text] \xC3\xA9"), "So: " + family.one, family.two})
      EXPECT_TRUE(whole(matcher(f), text)) << text;
    EXPECT_TRUE(whole(matcher(f, HowMany::any, R"({"type":"null"})"), family.two));
    EXPECT_TRUE(whole(matcher(f, HowMany::any, R"({"type":"null"})"), "null"));
    EXPECT_FALSE(whole(matcher(f, HowMany::any, R"({"type":"null"})"), "text"));
    for (const std::string& bad : family.bad) {
      EXPECT_FALSE(takes(*matcher(f), "So: " + bad)) << bad;
      EXPECT_FALSE(takes(*matcher(f, HowMany::some), bad)) << bad;
    }
  }
}

// A client knows its tools, and not the grammar that all of them become.
TEST_P(HeldCalls, AToolWhoseParametersCannotBeUsedIsNamed) {
  std::vector<CallableTool> tools = kTools;
  tools[1].parameters_json = R"({"type":"object","properties":{"a":{"type":"string","pattern":"(?=a)b"}}})";
  for (const ToolFormat format : {ToolFormat::hermes, ToolFormat::llama3, ToolFormat::mistral}) {
    const Status refused = compiler->compile(calls_grammar(format, tools)).status();
    EXPECT_THAT(refused.message(), testing::StartsWith("the parameters of tool 1 (\"now\") cannot be used: "));
    EXPECT_THAT(refused.message(), testing::HasSubstr("look-around"));
    EXPECT_THAT(refused.message(), testing::Not(testing::HasSubstr("args_")));
  }
}

// Values that are not quoted are read as what their schema says.
TEST_P(HeldCalls, BareValuesAreWhatTheSchemaSays) {
  const std::string open = "<tool_call>\n<function=", close = "</function>\n</tool_call>";
  auto xml = [&](const std::string& name, const std::vector<std::pair<std::string, std::string>>& parameters) {
    std::string out = open + name + ">\n";
    for (const auto& [key, value] : parameters) out += "<parameter=" + key + ">\n" + value + "\n</parameter>\n";
    return out + close;
  };
  auto reads = [&](const std::string& text) -> Json {
    if (!whole(matcher(ToolFormat::xml, HowMany::one), text)) return nullptr;
    const Read calls = read(ToolFormat::xml, text);
    return calls.size() == 1 ? calls[0].second : Json("no call");
  };
  EXPECT_EQ(reads(xml("weather", {{"city", "12"}, {"days", "1"}})), Json::parse(R"({"city":"12","days":1})"));
  EXPECT_EQ(reads(xml("weather", {{"city", ""}, {"days", "1"}, {"unit", "F"}})),
            Json::parse(R"({"city":"","days":1,"unit":"F"})"));
  EXPECT_EQ(reads(xml("weather", {{"city", "a\nb"}, {"days", "1"}, {"note", "\"7\""}})),
            Json::parse(R"({"city":"a\nb","days":1,"note":"7"})"));
  EXPECT_EQ(reads(xml("weather", {{"city", "a"}, {"days", "1"}, {"note", "null"}})),
            Json::parse(R"({"city":"a","days":1,"note":null})"));
  EXPECT_EQ(reads(xml("any", {{"x", "text"}, {"y", "[1]"}})), Json::parse(R"({"x":"text","y":[1]})"));
  EXPECT_EQ(reads(xml("now", {})), Json::object());
  EXPECT_EQ(reads(xml("weather", {{"city", "a"}, {"days", "1"}, {"note", "bare"}})), nullptr);
  EXPECT_EQ(reads(xml("weather", {{"city", "a"}, {"days", "1"}, {"unit", "K"}})), nullptr);
  EXPECT_EQ(reads(xml("weather", {{"city", "a</parameter>"}, {"days", "1"}})), nullptr);
}

TEST_P(HeldCalls, WhatCannotBeHeldIsSaid) {
  auto held = [](ToolFormat format, const char* schema, const char* name = "f") {
    const std::vector<CallableTool> tools = {{name, schema}};
    return can_hold(format, tools);
  };
  constexpr const char* kPlain = R"({"type":"object","properties":{"a":{"type":"string"}}})";
  EXPECT_FALSE(held(ToolFormat::none, kPlain));
  for (const ToolFormat own : {ToolFormat::pythonic, ToolFormat::gemma, ToolFormat::olmo}) {
    EXPECT_TRUE(held(own, kPlain, "a.b-c_d"));
    EXPECT_FALSE(held(own, kPlain, "a:b"));
    EXPECT_FALSE(held(own, R"({"type":"object","properties":{"a:b":{}}})"));
    EXPECT_FALSE(held(own, R"({"oneOf":[{"type":"object"}]})"));
    EXPECT_TRUE(held(own, R"({"type":"object","properties":{"a":{"type":"array","items":{"type":["string","null"]}},
        "b":{"type":"object","properties":{"c":{"enum":[1,"x",null]}},"additionalProperties":false},"d":{}}})"));
    // What is none of Gemma's values is JSON in Python's calls.
    for (const char* value : {R"({"type":"string","pattern":"^x"})", R"({"allOf":[{"type":"string"}]})",
                              R"({"type":"object","additionalProperties":{"type":"string"}})", R"({"enum":[[1]]})"})
      EXPECT_EQ(held(own, (std::string(R"({"type":"object","properties":{"a":)") + value + "}}").c_str()),
                own != ToolFormat::gemma)
          << value;
  }
  for (const ToolFormat json : {ToolFormat::hermes, ToolFormat::mistral, ToolFormat::kimi})
    EXPECT_TRUE(held(json, R"({"oneOf":[{"type":"object"}]})"));
  EXPECT_FALSE(held(ToolFormat::kimi, kPlain, "a b"));
  EXPECT_TRUE(held(ToolFormat::minimax, kPlain));
  for (const char* schema :
       {R"({"oneOf":[{"type":"object"}]})", R"({"type":"object","required":["a"]})", R"({"type":"array"})",
        R"({"type":"object","properties":{"a b":{}}})", R"({"type":"object","properties":{"a":true}})",
        R"({"type":"object","properties":{"a":{"$ref":"#/properties/b"},"b":{}}})"})
    EXPECT_FALSE(held(ToolFormat::minimax, schema)) << schema;
  // Texts of a form that a plain terminal does not hold are written as JSON.
  const std::vector<CallableTool> tools = {{"f", R"({"type":"object","properties":{"a":{"type":"string"},
      "b":{"type":"string","pattern":"^x"},"c":{"type":["string","null"]},"d":{"type":"string","enum":["x"]},
      "e":{"type":"string","enum":[""]}}})"}};
  EXPECT_EQ(bare_texts(tools), (TextParameters{{"f", "a"}, {"f", "d"}}));
}

// A choice without a member of its type is not held; one with others beside it is, without them.
TEST_P(HeldCalls, ChoicesAreOfTheirType) {
  auto held = [](const std::string& value) {
    const std::vector<CallableTool> tools = {{"f", R"({"type":"object","properties":{"a":)" + value + "}}"}};
    return can_hold(ToolFormat::gemma, tools);
  };
  for (const char* none : {R"({"type":"integer","enum":["a"]})", R"({"type":"string","const":1})",
                           R"({"type":["boolean","null"],"enum":[0,"true"]})", R"({"type":"integer","enum":[1.5]})"})
    EXPECT_FALSE(held(none)) << none;
  for (const char* some :
       {R"({"type":"integer","enum":["a",1]})", R"({"type":"string","const":"1"})", R"({"type":"number","enum":[1]})",
        R"({"type":["boolean","null"],"enum":[0,null]})", R"({"enum":["a"]})"}) {
    EXPECT_TRUE(held(some)) << some;
    const std::vector<CallableTool> tools = {
        {"f", std::string(R"({"type":"object","properties":{"a":)") + some + R"(},"additionalProperties":false})"}};
    const auto m = compiler->compile(calls_grammar(ToolFormat::gemma, tools, "", HowMany::one));
    EXPECT_TRUE(m.ok()) << some << ": " << m.status().to_string();
  }
}

// `levels` definitions, each any of ten references to the next: paths without number, and few schemas.
CallableTool doubling(int levels) {
  Json defs = Json::object();
  for (int level = 0; level < levels; ++level) {
    const Json next = {{"$ref", "#/$defs/d" + std::to_string(level + 1)}};
    defs["d" + std::to_string(level)] = {{"anyOf", Json(std::vector<Json>(10, next))}};
  }
  defs["d" + std::to_string(levels)] = {{"type", "boolean"}};
  const Json schema = {{"type", "object"}, {"properties", {{"a", {{"$ref", "#/$defs/d0"}}}}}, {"$defs", defs}};
  return {"f", schema.dump()};
}

TEST_P(HeldCalls, DefinitionsAreJudgedOnce) {
  const std::vector<CallableTool> wide = {doubling(15)}, deep = {doubling(40)};
  EXPECT_TRUE(can_hold(ToolFormat::gemma, wide));
  auto m = compiler->compile(calls_grammar(ToolFormat::gemma, wide, "", HowMany::one));
  ASSERT_TRUE(m.ok()) << m.status().to_string();
  EXPECT_TRUE(whole(std::move(*m), "<|tool_call>call:f{a:true}<tool_call|>"));
  EXPECT_FALSE(can_hold(ToolFormat::gemma, deep)) << "one in another, too many";
  // In whatever order they are met, and where one refers to itself.
  auto held = [](const char* defs) {
    const std::vector<CallableTool> tools = {
        {"f",
         std::string(R"({"type":"object","properties":{"a":{"$ref":"#/$defs/x"},"b":{"$ref":"#/$defs/y"}},"$defs":)") +
             defs + "}"}};
    return can_hold(ToolFormat::gemma, tools);
  };
  EXPECT_TRUE(held(R"({"x":{"type":"string"},"y":{"anyOf":[{"$ref":"#/$defs/x"},{"type":"null"}]}})"));
  EXPECT_FALSE(held(R"({"x":{"anyOf":[{"$ref":"#/$defs/y"},{"type":"null"}]},"y":{"$ref":"#/$defs/x"}})"));
  EXPECT_FALSE(held(R"({"x":{"type":"string"},"y":{"$ref":"#/$defs/z"}})"));
}

// The whole answer is a list of calls, or none of it is one.
TEST_P(HeldCalls, ListsOfPythonsCalls) {
  const auto f = ToolFormat::pythonic;
  const Json rome = Json::parse(kRome);
  const std::string one = "[weather(city=\"Rome\", days=2)]", two = "[weather(city='Rome', days=2), now()]";
  EXPECT_EQ(read(f, one), (Read{{"weather", rome}}));
  EXPECT_EQ(read(f, two), (Read{{"weather", rome}, {"now", Json::object()}}));
  for (const HowMany how_many : {HowMany::one, HowMany::some}) {
    EXPECT_TRUE(whole(matcher(f, how_many), one));
    EXPECT_EQ(whole(matcher(f, how_many), two), how_many == HowMany::some);
    for (const std::string& none : {std::string(), std::string("I"), one + ".", "x" + one, std::string("[]")})
      EXPECT_FALSE(whole(matcher(f, how_many), none)) << none;
  }
  for (const std::string& text : {std::string(), std::string("Free [text](x) \xC3\xA9"), "So: " + one, one, two,
                                  " \n" + two, std::string("[1, 2]"), std::string("[weather"), std::string("[a] (b)")})
    EXPECT_TRUE(whole(matcher(f), text)) << text;
  EXPECT_TRUE(whole(matcher(f, HowMany::any, R"({"type":"array"})"), two));
  EXPECT_TRUE(whole(matcher(f, HowMany::any, R"({"type":"array"})"), "[1]"));
  for (const char* bad : {"[nobody(", "[ weather (days", "[weather(city=\"Romes", "[weather(city=\"Rome\", days=3",
                          "[weather(city=\"Rome\")", "[now(a", "[weather(city=\"Rome\", days=2)] so"})
    EXPECT_FALSE(takes(*matcher(f), bad)) << bad;
  // A token without a text changes nothing of what is read.
  auto m = matcher(f);
  EXPECT_TRUE(m->consume(t->token_id("<|other|>")).ok());
  EXPECT_TRUE(takes(*m, one));
  m = matcher(f);
  EXPECT_TRUE(takes(*m, "Text"));
  EXPECT_TRUE(m->consume(t->token_id("<|other|>")).ok());
  EXPECT_TRUE(takes(*m, " [nobody()]"));
  m = matcher(f);
  EXPECT_TRUE(takes(*m, "["));
  EXPECT_FALSE(m->consume(t->token_id("<|other|>")).ok());
}

// Values in Python's words and in Gemma's, and what is read of them.
TEST_P(HeldCalls, ValuesInASyntaxOfTheirOwn) {
  const std::vector<CallableTool> tools = {{"f", R"({"type":"object","properties":{"s":{"type":"string"},
      "b":{"type":"boolean"},"n":{"type":["integer","null"],"maximum":9},"l":{"type":"array","items":{"type":"string"},
      "minItems":1,"maxItems":2},"o":{"type":"object","properties":{"k":{"type":"boolean"},"t":{"$ref":"#/$defs/t"}},
      "required":["k"],"additionalProperties":false},"e":{"enum":["x","y z",3,true]},"any":{}},
      "$defs":{"t":{"type":"array","items":{"$ref":"#/$defs/t"}}},"additionalProperties":false})"}};
  auto reads = [&](ToolFormat format, const std::string& text) -> Json {
    auto m = compiler->compile(calls_grammar(format, tools, "", HowMany::one));
    if (!m.ok()) return m.status().to_string();
    if (!whole(std::move(*m), text)) return nullptr;
    const Read calls = read(format, text);
    return calls.size() == 1 ? calls[0].second : Json("no call");
  };
  auto python = [&](const std::string& arguments) { return reads(ToolFormat::pythonic, "[f(" + arguments + ")]"); };
  auto gemma = [&](std::string arguments) {
    for (size_t at; (at = arguments.find('\'')) != std::string::npos;) arguments.replace(at, 1, "<|\"|>");
    return reads(ToolFormat::gemma, "<|tool_call>call:f{" + arguments + "}<tool_call|>");
  };
  EXPECT_EQ(python(""), Json::object());
  EXPECT_EQ(python("s=\"a\\n\\\"\xC3\xA9\", b=True, n=None"), Json::parse(R"({"s":"a\n\"\u00e9","b":true,"n":null})"));
  EXPECT_EQ(python(R"(s='it\'s "x"', n=9)"), Json::parse(R"({"s":"it's \"x\"","n":9})"));
  EXPECT_EQ(python(R"(l=["a", 'b'], o={"k": true, "t": [[]]}, e='y z', any=[1, {"q": null}])"),
            Json::parse(R"({"l":["a","b"],"o":{"k":true,"t":[[]]},"e":"y z","any":[1,{"q":null}]})"));
  EXPECT_EQ(python("e=True"), Json::parse(R"({"e":true})"));
  for (const char* bad : {"b=1", "n=10", "l=[]", "l=['a', 'b', 'c']", "e='z'", "o={}", "b=True, s='x'", "q=1", "s=x"})
    EXPECT_EQ(python(bad), nullptr) << bad;

  EXPECT_EQ(gemma(""), Json::object());
  EXPECT_EQ(gemma("s:'{a}, \"b\" \n',b:true,n:null"), Json::parse(R"({"s":"{a}, \"b\" \n","b":true,"n":null})"));
  EXPECT_EQ(gemma("s:'',l:['a','b'],o:{k:false,t:[[],[]]},e:'y z',any:{q:[1.5,'r',{}]}"),
            Json::parse(R"({"s":"","l":["a","b"],"o":{"k":false,"t":[[],[]]},"e":"y z","any":{"q":[1.5,"r",{}]}})"));
  EXPECT_EQ(gemma("e:3"), Json::parse(R"({"e":3})"));
  for (const char* bad : {"b:1", "n:10", "l:[]", "l:['a','b','c']", "e:'z'", "o:{}", "b:true,s:'x'", "q:1", "s:x"})
    EXPECT_EQ(gemma(bad), nullptr) << bad;
}

// Whatever is drawn: a call that the parser finds is one of the tools' and obeys its schema.
TEST_P(HeldCalls, WhatTheParserFindsObeys) {
  std::mt19937 random(11);
  int calls = 0;
  for (const Family& family : families()) {
    std::vector<std::string> pieces = kTags;
    for (
        const char* piece :
        {"<tool_call>", "</tool_call>", "\n", "weather", "now",      "any",          "Rome",         "2", "3", "<", "{",
         "}",           "\"city\"",     ":",  ",",       "\"days\"", "</parameter>", "</arg_value>", "x", " ", "</"})
      pieces.emplace_back(piece);
    for (int round = 0; round < 16; ++round) {
      auto m = matcher(family.format);
      std::string seen;
      for (int i = 0; i < 40; ++i) {
        if (random() % 24 == 0) (void)m->consume(t->token_id("<|other|>"));
        // The next of a call's own pieces more often than not, so that many are written to their end.
        bool fits = false;
        for (size_t tried = 0, first = random() % pieces.size(); tried <= pieces.size() && !fits; ++tried) {
          const size_t at = random() % family.one.size();
          const std::string piece = tried == 0 && random() % 3
                                        ? (seen.empty() ? family.one.substr(0, at) : family.one.substr(at))
                                        : pieces[(first + tried) % pieces.size()];
          if (piece.empty()) continue;
          auto trial = m->clone();
          fits = takes(*trial, piece);
          if (!fits) continue;
          m = std::move(trial);
          seen += piece;
        }
        if (!fits) break;
      }
      for (const auto& [name, arguments] : read(family.format, seen)) {
        ++calls;
        ASSERT_TRUE(arguments.is_object()) << seen;
        if (name == "weather") {
          EXPECT_TRUE(arguments.contains("city") && arguments["city"].is_string() &&
                      arguments["city"].get<std::string>().size() <= 16 && arguments.contains("days") &&
                      (arguments["days"] == 1 || arguments["days"] == 2))
              << seen;
        } else if (name == "now") {
          EXPECT_TRUE(arguments.empty()) << seen;
        } else {
          EXPECT_EQ(name, "any") << seen;
        }
      }
    }
  }
  EXPECT_GT(calls, 20);
}

}  // namespace
}  // namespace kvasir::text
