#include "model/text/tool_parser.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvasir::text {
namespace {

struct Call {
  std::string name, arguments;
  bool operator==(const Call&) const = default;
};
struct Parsed {
  std::string content;
  std::vector<Call> calls;
};

Parsed parse(ToolFormat format, std::string_view text, size_t step) {
  ToolParser parser(format);
  Parsed all;
  auto take = [&all](const ToolParser::Out& out) {
    all.content += out.content;
    for (const ToolParser::CallDelta& d : out.calls) {
      if (!d.name.empty()) {
        EXPECT_EQ(d.index, static_cast<int>(all.calls.size()));
        all.calls.push_back({d.name, ""});
      }
      all.calls.at(d.index).arguments += d.arguments;
    }
  };
  for (size_t i = 0; i < text.size(); i += step) take(parser.push(text.substr(i, step)));
  take(parser.finish());
  EXPECT_EQ(parser.calls(), static_cast<int>(all.calls.size()));
  return all;
}

// The same outcome however the text is cut.
void expect(ToolFormat format, std::string_view text, std::string_view content, std::vector<Call> calls) {
  for (const size_t step : {1, 2, 3, 7, 1000}) {
    const Parsed got = parse(format, text, step);
    EXPECT_EQ(got.content, content) << text << " by " << step;
    EXPECT_EQ(got.calls, calls) << text << " by " << step;
  }
}

TEST(Hermes, CallsAndText) {
  expect(ToolFormat::hermes, "plain text < not a call", "plain text < not a call", {});
  expect(ToolFormat::hermes, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, \"}\"]}}\n</tool_call>", "",
         {{"f", R"({"a": [1, "}"]})"}});
  expect(ToolFormat::hermes,
         "Let me see. <tool_call>{\"arguments\": {\"x\": 1}, \"name\": \"late\"}</tool_call>\n<tool_call>\n"
         "{\"name\": \"g\", \"arguments\": {}}\n</tool_call>\n",
         "Let me see.", {{"late", R"({"x": 1})"}, {"g", "{}"}});
  expect(ToolFormat::hermes, "<tool_call>{\"name\": \"now\"}</tool_call>", "", {{"now", "{}"}});
  expect(ToolFormat::hermes, R"(<tool_call>{"name": "s", "arguments": "{\"a\": \"\\u00e9\"}"}</tool_call>)", "",
         {{"s", R"({"a": "\u00e9"})"}});
  expect(ToolFormat::hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call> done", " done",
         {{"f", "{}"}});
  expect(ToolFormat::hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {}}<tool_call>{\"name\": \"g\"}", "",
         {{"f", "{}"}, {"g", "{}"}});
}

TEST(Hermes, WhatIsNoCallStaysText) {
  expect(ToolFormat::hermes, "<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", {});
  expect(ToolFormat::hermes, "<tool_call>{\"name\": \"f\"", "<tool_call>{\"name\": \"f\"", {});
  expect(ToolFormat::hermes, "<tool_call>{\"name\": 3, \"arguments\": {}}",
         "<tool_call>{\"name\": 3, \"arguments\": {}}", {});
  expect(ToolFormat::hermes, "a <tool_ca", "a <tool_ca", {});
  expect(ToolFormat::hermes, "  \n", "  \n", {});
  expect(ToolFormat::hermes, "\n <tool_call>?", "\n <tool_call>?", {});
  expect(ToolFormat::llama3, "\n {?", "\n {?", {});
  expect(ToolFormat::llama3, "<|python_tag|>print(1)", "<|python_tag|>print(1)", {});
}

TEST(Hermes, CutArgumentsAreKept) {
  expect(ToolFormat::hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1", "", {{"f", "{\"a\": 1"}});
}

TEST(Hermes, ArgumentsStream) {
  ToolParser parser(ToolFormat::hermes);
  EXPECT_TRUE(parser.push("<tool_call>{\"name\": \"f\",").calls.empty());
  const auto first = parser.push(" \"arguments\": {\"city\": \"Os");
  ASSERT_EQ(first.calls.size(), 1u);
  EXPECT_EQ(first.calls[0].name, "f");
  EXPECT_EQ(first.calls[0].arguments, "{\"city\": \"Os");
  const auto second = parser.push("lo\"}}");
  ASSERT_EQ(second.calls.size(), 1u);
  EXPECT_EQ(second.calls[0].name, "");
  EXPECT_EQ(second.calls[0].arguments, "lo\"}");
}

TEST(Llama3, CallsOnlyWhereTheAnswerIsOne) {
  expect(ToolFormat::llama3, R"({"name": "f", "parameters": {"a": 1}})", "", {{"f", R"({"a": 1})"}});
  expect(
      ToolFormat::llama3,
      R"(<|python_tag|>{"type": "function", "name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": true}})",
      "", {{"f", "{}"}, {"g", R"({"b": true})"}});
  expect(ToolFormat::llama3, R"({"city": "Oslo", "n": 3} and more)", R"({"city": "Oslo", "n": 3} and more)", {});
  expect(ToolFormat::llama3, R"({"name": "Bob", "age": 3})", R"({"name": "Bob", "age": 3})", {});
  expect(ToolFormat::llama3, R"({"name": "Bob"})", R"({"name": "Bob"})", {});
  expect(ToolFormat::llama3, R"(Sure: {"name": "f", "parameters": {}})", R"(Sure: {"name": "f", "parameters": {}})",
         {});
}

TEST(Formats, KnownByTheTemplate) {
  EXPECT_EQ(tool_format_of("... <tool_call> ..."), ToolFormat::hermes);
  EXPECT_EQ(tool_format_of("{{ '<|start_header_id|>' }} {\"name\": , \"parameters\": }"), ToolFormat::llama3);
  EXPECT_EQ(tool_format_of("<|im_start|>"), ToolFormat::none);
  expect(ToolFormat::none, "<tool_call>{\"name\": \"f\"}</tool_call>", "<tool_call>{\"name\": \"f\"}</tool_call>", {});
}

}  // namespace
}  // namespace kvasir::text
