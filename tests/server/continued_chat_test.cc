// The last message left open: what a template writes up to its end, and nothing after.
#include "server/continued_chat.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/server/fake_engine.h"

namespace kvasir::server {
namespace {

constexpr const char* kChatMl =
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

std::string written(const char* chat_template, const std::string& messages, bool go_on = true) {
  ByteTokenizer tokenizer;
  auto compiled = text::ChatTemplate::compile(chat_template, tokenizer);
  EXPECT_TRUE(compiled.ok());
  ChatInput chat;
  chat.messages_json = messages;
  chat.continue_final_message = go_on;
  chat.add_generation_prompt = !go_on;
  auto text = render_chat(chat, **compiled);
  return text.ok() ? *text : text.status().to_string();
}

TEST(ContinuedChat, WhatEndsTheMessageIsCutOff) {
  const std::string chat = R"([{"role":"user","content":"Hi"},{"role":"assistant","content":"Hi"}])";
  EXPECT_EQ(written(kChatMl, chat), "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHi");
  EXPECT_EQ(written(kChatMl, chat, false),
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHi<|im_end|>\n<|im_start|>assistant\n");
}

TEST(ContinuedChat, BlanksAtTheEndAreTheTemplates) {
  const std::string chat = R"([{"role":"assistant","content":"\n 1. é \n"}])";
  EXPECT_EQ(written(kChatMl, chat), "<|im_start|>assistant\n\n 1. é \n");
  EXPECT_EQ(written("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", chat), "[1. é");
  EXPECT_EQ(written(kChatMl, R"([{"role":"assistant","content":""}])"), "<|im_start|>assistant\n");
}

TEST(ContinuedChat, NoTextOfAClientsIsTakenForTheEnd) {
  EXPECT_EQ(written("{% for m in messages %}{{ m.content }}/{% endfor %}",
                    R"([{"role":"user","content":"kvasir-continues-here-0-"},
                        {"role":"assistant","content":"kvasir-continues-here kvasir"}])"),
            "kvasir-continues-here-0-/kvasir-continues-here kvasir");
}

TEST(ContinuedChat, WhatCannotGoOnIsRefused) {
  using ::testing::HasSubstr;
  EXPECT_THAT(written(kChatMl, R"([{"role":"user","content":"x"}])"), HasSubstr("its role is \"user\""));
  EXPECT_THAT(written(kChatMl, R"([{"role":"assistant","content":"x","tool_calls":[{}]}])"), HasSubstr("tool_calls"));
  EXPECT_THAT(written(kChatMl, R"([{"role":"assistant","content":[]}])"), HasSubstr("must be text"));
  EXPECT_THAT(written(kChatMl, R"([{"role":"assistant"}])"), HasSubstr("must be text"));
  EXPECT_THAT(written(kChatMl, "[]"), HasSubstr("needs messages"));
  EXPECT_THAT(written(kChatMl, "[3]"), HasSubstr("needs messages"));
  EXPECT_THAT(
      written("{{ messages[0].content }}", R"([{"role":"user","content":"x"},{"role":"assistant","content":"y"}])"),
      HasSubstr("does not write the last message out"));
}

}  // namespace
}  // namespace kvasir::server
