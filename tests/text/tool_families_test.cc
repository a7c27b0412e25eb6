// How families write their calls, cut at every byte, and what only looks like one.
#include <gtest/gtest.h>

#include <random>

#include "model/text/tool_parser.h"

namespace kvasir::text {
namespace {

struct Read {
  std::string content;
  std::vector<std::pair<std::string, std::string>> calls;
  bool operator==(const Read&) const = default;
};

Read read(ToolFormat format, std::initializer_list<std::string_view> pieces) {
  ToolParser parser(format, {{"find", "zip"}});
  Read all;
  auto add = [&](const ToolParser::Out& out) {
    all.content += out.content;
    for (const auto& call : out.calls) {
      if (size_t(call.index) >= all.calls.size()) all.calls.emplace_back(call.name, "");
      all.calls[size_t(call.index)].second += call.arguments;
    }
  };
  for (std::string_view piece : pieces) add(parser.push(piece));
  add(parser.finish());
  return all;
}

void expect(ToolFormat format, std::string_view text, const Read& want) {
  for (size_t cut = 0; cut <= text.size(); ++cut) {
    const Read got = read(format, {text.substr(0, cut), text.substr(cut)});
    ASSERT_EQ(got.content, want.content) << text << " cut at " << cut;
    ASSERT_EQ(got.calls, want.calls) << text << " cut at " << cut;
  }
}
void expect_once(ToolFormat format, std::string_view text, const Read& want) {
  const Read got = read(format, {text});
  EXPECT_TRUE(got == want) << got.content.substr(0, 100);
}
// Not a call: the text as it is.
void expect_text(ToolFormat format, std::string_view text) { expect(format, text, {std::string(text), {}}); }

TEST(ToolFamilies, Xml) {
  const auto f = ToolFormat::xml;
  expect(f,
         "Sure.\n<tool_call>\n<function=weather>\n<parameter=city>\nNew York\n</parameter>\n<parameter=days>\n3\n"
         "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
         {"Sure.", {{"weather", R"({"city":"New York","days":3})"}, {"now", "{}"}}});
  expect(f, "<tool_call><function=f><parameter=a>{\"b\": [1]}</parameter></function></tool_call>",
         {"", {{"f", R"({"a":{"b":[1]}})"}}});
  expect(f,
         "<tool_call><function=find><parameter=zip>123</parameter><parameter=n>123</parameter></function></tool_call>",
         {"", {{"find", R"({"zip":"123","n":123})"}}});
  expect_text(f, "a < b, <tool_call> and <tool_cal");
  expect_text(f, "\n <tool_call> \n</tool_call>\n");
  const std::string deep = std::string(100000, '[');
  expect_once(f, "<tool_call><function=f><parameter=a>" + deep + "</parameter></function></tool_call>",
              {"", {{"f", "{\"a\":\"" + deep + "\"}"}}});
  expect_text(f, "<tool_call>\n<function=weather>\n<parameter=city>\nNew");
  expect_text(f, "<tool_call>\nnothing\n</tool_call>");
}

TEST(ToolFamilies, Seed) {
  expect(ToolFormat::seed,
         "So: <seed:tool_call>\n<function=f>\n<parameter=a>True</parameter>\n</function>\n</seed:tool_call>",
         {"So:", {{"f", R"({"a":true})"}}});
  expect_text(ToolFormat::seed, "<tool_call><function=f></function></tool_call>");
}

TEST(ToolFamilies, List) {
  const auto f = ToolFormat::list;
  expect(f, R"(<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>)", {"", {{"f", R"({"a":1})"}}});
  expect(f, R"(<|tool_call|> [{"name": "f", "arguments": {}}, {"name": "g", "parameters": {}}])",
         {"", {{"f", "{}"}, {"g", "{}"}}});
  expect(f, R"(<|tool_call|>{"name": "f", "arguments": {}}<|/tool_call|><|tool_call|>{"name": "g"}<|/tool_call|>)",
         {"", {{"f", "{}"}, {"g", "{}"}}});
  expect_text(f, "<|tool_call|>f{}");
  expect_text(f, "<|tool_call|>[]<|/tool_call|>");
}

TEST(ToolFamilies, Functools) {
  const auto f = ToolFormat::functools;
  expect(f, R"( functools[{"name": "f", "arguments": {"a": 1}}])", {"", {{"f", R"({"a":1})"}}});
  expect(f, R"(So: functools[ {"name": "f", "arguments": {}}, {"name": "g", "arguments": {}} ])",
         {"So:", {{"f", "{}"}, {"g", "{}"}}});
  expect_text(f, "from functools import cache");
  expect_text(f, "functools[]");
  expect_text(f, R"(functools[{"name": "f")");
}

TEST(ToolFamilies, Glm) {
  const auto f = ToolFormat::glm;
  expect(f,
         "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
         "<arg_value>2</arg_value>\n</tool_call>",
         {"", {{"weather", R"({"city":"Oslo","days":2})"}}});
  expect(f, "<tool_call>find<arg_key>zip</arg_key><arg_value>123</arg_value></tool_call>",
         {"", {{"find", R"({"zip":"123"})"}}});
  expect(f, "ok <tool_call>now\n</tool_call>", {"ok", {{"now", "{}"}}});
  expect_text(f, "<tool_call>{\"name\": \"f\"}</tool_call>");
  expect_text(f, "<tool_call>f<arg_key>a</arg_key></tool_call>");
}

TEST(ToolFamilies, Gemma) {
  const auto f = ToolFormat::gemma;
  expect(
      f,
      "Sure.<|tool_call>call:weather{city:<|\"|>New {York}, \"x\"<|\"|>,days:3,at:[1.5,null,<|\"|>a<|\"|>]}<tool_call|>"
      "<|tool_call>call:now{}<tool_call|>",
      {"Sure.", {{"weather", R"({"city":"New {York}, \"x\"","days":3,"at":[1.5,null,"a"]})"}, {"now", "{}"}}});
  expect(f, "<|tool_call>call:f{o:{<|\"|>k y<|\"|>:true,b:{}},l:[]}<tool_call|>",
         {"", {{"f", R"({"o":{"k y":true,"b":{}},"l":[]})"}}});
  for (const char* text :
       {"<|tool_call>call:f{a:b}<tool_call|>", "<|tool_call>call:f{a:1", "<|tool_call>f{}<tool_call|>",
        "<|tool_call>call:f{a:<|\"|>x}<tool_call|>", "<|tool_call>call:f{a:1}}<tool_call|>",
        "<|tool_call>call:f{a:1 b:2}<tool_call|>", "a <|tool_cal and <|tool_call|>"})
    expect_text(f, text);
  const std::string deep = "<|tool_call>call:f{a:" + std::string(100000, '[') + "}<tool_call|>";
  expect_once(f, deep, {deep, {}});
}

TEST(ToolFamilies, Olmo) {
  const auto f = ToolFormat::olmo;
  expect(f, "Sure.\n<function_calls>weather(city=\"New York\", days=3)\nnow()</function_calls>",
         {"Sure.", {{"weather", R"({"city":"New York","days":3})"}, {"now", "{}"}}});
  expect(f,
         "<function_calls>\nf(a={\"b\": [true, null]}, c='it\\'s', d=\"\\u00e9\\ud83c\\udf89\\u0\")\n</function_calls>",
         {"", {{"f", "{\"a\":{\"b\":[true,null]},\"c\":\"it's\",\"d\":\"\xC3\xA9\xF0\x9F\x8E\x89\\\\u0\"}"}}});
  for (const char* text : {"<function_calls></function_calls>", "<function_calls>f(a=1",
                           "<function_calls>f(1)</function_calls>", "<function_calls>f(a=1), g()</function_calls>",
                           "<function_calls>[f()]</function_calls>", "a <function_cal and <functions>"})
    expect_text(f, text);
  EXPECT_EQ(tool_format_of("{{ '<function_calls>' + c + '</function_calls>' }}"), f);
  EXPECT_EQ(tool_format_named("olmo"), f);
}

TEST(ToolFamilies, Kimi) {
  const auto f = ToolFormat::kimi;
  const std::string open = "<|tool_calls_section_begin|>", close = "<|tool_calls_section_end|>";
  auto call = [](std::string_view id, std::string_view arguments) {
    return std::string("<|tool_call_begin|>")
        .append(id)
        .append("<|tool_call_argument_begin|>")
        .append(arguments)
        .append("<|tool_call_end|>");
  };
  expect(f,
         "Let me see." + open + call("functions.weather:0", R"({"city": "Oslo", "days": 3})") +
             call("functions.now:1", "{}") + close,
         {"Let me see.", {{"weather", R"({"city":"Oslo","days":3})"}, {"now", "{}"}}});
  expect(f, open + "\n" + call("functions.a.b:12\n", "\n{}\n") + "\n" + close, {"", {{"a.b", "{}"}}});
  expect(f, open + call("now", "{}") + close, {"", {{"now", "{}"}}});  // without its number
  for (const std::string& text :
       {open + close, open + call("functions.f:0", "{\"a\":") + close, open + call("functions.f:0", "[]") + close,
        open + call("functions.:0", "{}") + close, open + "<|tool_call_begin|>functions.f:0{}<|tool_call_end|>" + close,
        open + call("functions.f:0", "{}"), std::string("a <|tool_calls_sect and <|tool_call_begin|>")})
    expect_text(f, text);
  const std::string deep = open + call("functions.f:0", "{\"a\":" + std::string(100000, '[')) + close;
  expect_once(f, deep, {deep, {}});
}

TEST(ToolFamilies, Minimax) {
  const auto f = ToolFormat::minimax;
  const std::string open = "<minimax:tool_call>\n", close = "</minimax:tool_call>";
  expect(f,
         "Sure.\n\n" + open +
             "<invoke name=\"find\">\n<parameter name=\"zip\">0123</parameter>\n<parameter name=\"n\">3</parameter>\n"
             "</invoke>\n<invoke name=\"now\">\n</invoke>\n" +
             close,
         {"Sure.", {{"find", R"({"zip":"0123","n":3})"}, {"now", "{}"}}});
  // A text is all that stands between its tags: a file's last line break is part of it.
  expect(f, open + "<invoke name=\"find\"><parameter name=\"zip\">a\nb < c\n</parameter></invoke>" + close,
         {"", {{"find", R"({"zip":"a\nb < c\n"})"}}});
  expect(f, open + "<invoke name=\"f\"><parameter name=\"a\">[1, {\"b\": null}]</parameter></invoke>" + close,
         {"", {{"f", R"({"a":[1,{"b":null}]})"}}});
  for (const std::string& text :
       {open + close, open + "<invoke name=\"f\">\n" + close, open + "<invoke name=\"f\"></invoke>",
        open + "<invoke name=\"\"></invoke>" + close, open + "<invoke name=f></invoke>" + close,
        open + "<invoke name=\"f\"><parameter name=\"a b\">1</parameter></invoke>" + close,
        std::string("<tool_call><invoke name=\"f\"></invoke></tool_call> <minimax:tool")})
    expect_text(f, text);
}

TEST(ToolFamilies, Mistral) {
  const auto f = ToolFormat::mistral;
  expect(f, R"([TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}])",
         {"", {{"f", R"({"a":1})"}, {"g", "{}"}}});
  expect(f, R"(Well.[TOOL_CALLS]f[ARGS]{"a": "x"}[TOOL_CALLS]g[CALL_ID]123[ARGS]{})",
         {"Well.", {{"f", R"({"a":"x"})"}, {"g", "{}"}}});
  expect_text(f, "[TOOL_CALLS] [{\"name\": \"f\"");
  expect_text(f, "[TOOL_CALL] is no tag");
}

TEST(ToolFamilies, Deepseek) {
  const auto f = ToolFormat::deepseek;
  expect(f,
         "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"city\": \"Oslo\"}\n```"
         "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
         "<｜tool▁calls▁end｜>",
         {"", {{"weather", R"({"city":"Oslo"})"}, {"now", "{}"}}});
  expect(f,
         "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Oslo\"}<｜tool▁call▁end｜>"
         "<｜tool▁calls▁end｜>",
         {"Hm.", {{"weather", R"({"city":"Oslo"})"}}});
  expect_text(f, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function");
  expect_text(f, "<｜tool▁calls▁begin｜>no call<｜tool▁calls▁end｜>");
}

TEST(ToolFamilies, Pythonic) {
  const auto f = ToolFormat::pythonic;
  expect(
      f, R"([weather(city="New \"York\"", days=3, on=True, at=[1.5, None], more={'a': -2}), now()])",
      {"",
       {{"weather", R"({"city":"New \"York\"","days":3,"on":true,"at":[1.5,null],"more":{"a":-2}})"}, {"now", "{}"}}});
  expect(f, R"([f(a='it\'s \d+ \\ \n')])", {"", {{"f", R"({"a":"it's \\d+ \\ \n"})"}}});
  expect_text(f, "\n[1]");
  expect(f, "\n[f()]\n", {"", {{"f", "{}"}}});
  for (const char* text : {"[1, 2]", "[f(]", "[f(a)]", "[f(a=b)]", "[f()] and more", "no [f()]", "[", "[f(a='x)]",
                           "[f()", "[]", "[f(a=[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[["})
    expect_text(f, text);
}

// Pieces of every syntax in any order: nothing is lost where there is no call, and no cut changes what is read.
TEST(ToolFamilies, WhateverComes) {
  constexpr std::string_view kPieces[] = {"<tool_call>",
                                          "</tool_call>",
                                          "<function=f>",
                                          "</function>",
                                          "<parameter=a>",
                                          "</parameter>",
                                          "f",
                                          "<arg_key>",
                                          "</arg_key>",
                                          "<arg_value>",
                                          "</arg_value>",
                                          "[TOOL_CALLS]",
                                          "[",
                                          "]",
                                          "{\"name\":\"f\"",
                                          "}",
                                          "[ARGS]",
                                          "{}",
                                          " ",
                                          "\n",
                                          "(",
                                          ")",
                                          "a=1",
                                          ",",
                                          "'",
                                          "<|tool_call|>",
                                          "<|/tool_call|>",
                                          "<｜tool▁calls▁begin｜>",
                                          "<｜tool▁call▁begin｜>",
                                          "<｜tool▁sep｜>",
                                          "<｜tool▁call▁end｜>",
                                          "<｜tool▁calls▁end｜>",
                                          "<seed:tool_call>",
                                          "</seed:tool_call>",
                                          "<|tool_calls_section_begin|>",
                                          "<|tool_calls_section_end|>",
                                          "<|tool_call_begin|>functions.f:0",
                                          "<|tool_call_argument_begin|>",
                                          "<|tool_call_end|>",
                                          "<minimax:tool_call>",
                                          "</minimax:tool_call>",
                                          "<invoke name=\"f\">",
                                          "<parameter name=\"a\">",
                                          "</invoke>",
                                          "<",
                                          "text"};
  std::mt19937 random(7);
  for (int i = 0; i < 20000; ++i) {
    std::string text;
    for (size_t n = random() % 12; n > 0; --n) text += kPieces[random() % std::size(kPieces)];
    const auto format = ToolFormat(random() % (int(ToolFormat::olmo) + 1));
    const Read all = read(format, {text});
    if (all.calls.empty()) ASSERT_EQ(all.content, text) << int(format);
    const size_t cut = random() % (text.size() + 1), again = cut + random() % (text.size() - cut + 1);
    const std::string_view t = text;
    ASSERT_TRUE(read(format, {t.substr(0, cut), t.substr(cut, again - cut), t.substr(again)}) == all)
        << text << " of " << int(format) << " cut at " << cut << ", " << again;
  }
}

TEST(ToolFamilies, FoundByTheTemplateAndByName) {
  EXPECT_EQ(tool_format_of("<tool_call>\n<function=..."), ToolFormat::xml);
  EXPECT_EQ(tool_format_of("<tool_call>{name}<arg_key>"), ToolFormat::glm);
  EXPECT_EQ(tool_format_of("[AVAILABLE_TOOLS][TOOL_CALLS]"), ToolFormat::mistral);
  EXPECT_EQ(tool_format_of("<｜tool▁calls▁begin｜>"), ToolFormat::deepseek);
  EXPECT_EQ(tool_format_of("[func_name1(params_name1=params_value1)]"), ToolFormat::pythonic);
  EXPECT_EQ(tool_format_of("<tool_call>"), ToolFormat::hermes);
  EXPECT_EQ(tool_format_of("{{- '<|tool_call>call:' + name + '{' -}}"), ToolFormat::gemma);
  EXPECT_EQ(tool_format_of("<seed:tool_call>\n<function="), ToolFormat::seed);
  EXPECT_EQ(tool_format_of("write <|tool_call|> followed by a list"), ToolFormat::list);
  EXPECT_EQ(tool_format_of("a list formatted as functools[{...}]"), ToolFormat::functools);
  EXPECT_EQ(tool_format_of("<|tool_calls_section_begin|>{% for call in calls %}"), ToolFormat::kimi);
  EXPECT_EQ(tool_format_of("{% set open = '<minimax:tool_call>' %}"), ToolFormat::minimax);
  EXPECT_EQ(tool_format_named("kimi"), ToolFormat::kimi);
  EXPECT_EQ(tool_format_named("minimax"), ToolFormat::minimax);
  EXPECT_EQ(tool_format_named("glm"), ToolFormat::glm);
  EXPECT_FALSE(tool_format_named("auto"));
}

}  // namespace
}  // namespace kvasir::text
