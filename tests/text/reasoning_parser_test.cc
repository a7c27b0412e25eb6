// Thoughts told from the answer, wherever the text is cut.
#include "model/text/reasoning_parser.h"

#include <gtest/gtest.h>

namespace kvasir::text {
namespace {

ReasoningFormat format = ReasoningFormat::think;

ReasoningParser::Out read(bool begun, std::string_view text, size_t cut, size_t again) {
  ReasoningParser p(format, begun);
  ReasoningParser::Out all;
  auto add = [&](ReasoningParser::Out out) { all.reasoning += out.reasoning, all.content += out.content; };
  add(p.push(text.substr(0, cut)));
  add(p.push(text.substr(cut, again - cut)));
  add(p.push(text.substr(again)));
  add(p.finish());
  return all;
}

void expect(bool begun, std::string_view text, std::string_view reasoning, std::string_view content) {
  for (size_t cut = 0; cut <= text.size(); ++cut)
    for (size_t again = cut; again <= text.size(); ++again) {
      const auto out = read(begun, text, cut, again);
      ASSERT_EQ(out.reasoning, reasoning) << cut << ' ' << again;
      ASSERT_EQ(out.content, content) << cut << ' ' << again;
    }
}

TEST(ReasoningParser, WhereverItIsCut) {
  expect(false, "<think>\nwhy < so?\n</think>\n\nso </b>", "\nwhy < so?\n", "so </b>");
  expect(false, "\n<think></think>so", "", "so");
  expect(true, "why</think>so", "why", "so");
  expect(false, "no thoughts, <think> is a word", "", "no thoughts, <think> is a word");
  expect(false, " <thin", "", " <thin");
}

TEST(ReasoningParser, InAFamilysOwnTags) {
  format = ReasoningFormat::mistral;
  expect(false, "[THINK]why[/THINK]so", "why", "so");
  expect(false, "[THIN", "", "[THIN");
  format = ReasoningFormat::gemma;
  expect(false, "<|channel>thought\nwhy<channel|>so", "why", "so");
  expect(false, "<|channel>thought\n<channel|>so", "", "so");
  // Kimi may go from its thoughts right to its calls.
  format = ReasoningFormat::kimi;
  expect(false, "<think>a <|tool</think>so<|tool_calls_section_begin|>", "a <|tool", "so<|tool_calls_section_begin|>");
  expect(false, "<think>why<|tool_calls_section_begin|>x</think>", "why", "<|tool_calls_section_begin|>x</think>");
  expect(true, "why<|tool_calls_sect", "why<|tool_calls_sect", "");
  format = ReasoningFormat::seed;
  expect(false, "<seed:think>why</think></seed:think>so", "why</think>", "so");
  format = ReasoningFormat::think;
}

// gpt-oss: messages one after the other, calls in the form that the parser of calls reads.
TEST(ReasoningParser, Harmony) {
  format = ReasoningFormat::harmony;
  expect(false, "<|channel|>analysis<|message|>why <|x<|end|><|start|>assistant<|channel|>final<|message|>so < that",
         "why <|x", "so < that");
  expect(false,
         "<|channel|>analysis<|message|>w<|end|><|start|>assistant<|channel|>commentary to=functions.f "
         "<|constrain|>json<|message|>{\"a\":1}<|call|>",
         "w", "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":1}}</tool_call>");
  expect(false, " to=functions.f<|channel|>commentary json<|message|>{}", "",
         "<tool_call>{\"name\":\"f\",\"arguments\":{}");
  expect(false, "<|channel|>commentary<|message|>First.<|end|><|start|>assistant<|channel|>final<|message|>x<|return|>",
         "", "First.x");
  expect(false, "plain text", "", "plain text");
  expect(false, "<|channel|>anal", "", "");
  expect(true, "w<|end|>", "w", "");
  EXPECT_EQ(reasoning_format_of("<|start|>assistant<|channel|>final<|message|>{{ m }}<|end|>"), format);
  format = ReasoningFormat::think;
}

TEST(ReasoningParser, WhatEndsTooSoon) {
  expect(false, "<think>why</thi", "why</thi", "");
  expect(true, "why", "why", "");
  expect(true, "why</think>\n", "why", "");
  expect(false, "", "", "");
}

TEST(ReasoningParser, FoundByTheTemplate) {
  EXPECT_EQ(reasoning_format_of("{{ '<think>' }}...</think>"), ReasoningFormat::think);
  EXPECT_EQ(reasoning_format_of("<think></think><|tool_calls_section_begin|>"), ReasoningFormat::kimi);
  EXPECT_EQ(reasoning_format_of("<|tool_calls_section_begin|>"), ReasoningFormat::none);
  EXPECT_EQ(reasoning_format_named("kimi"), ReasoningFormat::kimi);
  EXPECT_EQ(reasoning_format_of("<seed:think></seed:think>"), ReasoningFormat::seed);
  EXPECT_EQ(reasoning_format_of("[THINK]{{ t }}[/THINK]"), ReasoningFormat::mistral);
  EXPECT_EQ(reasoning_format_named("seed"), ReasoningFormat::seed);
  EXPECT_FALSE(reasoning_format_named("auto"));
  EXPECT_EQ(reasoning_format_of("<|im_start|>"), ReasoningFormat::none);
  ReasoningParser none(ReasoningFormat::none, false);
  EXPECT_EQ(none.push("<think>a</think>b").content, "<think>a</think>b");
}

}  // namespace
}  // namespace kvasir::text
