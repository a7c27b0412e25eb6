// What a chat becomes before the model reads it, whichever way it is asked for.
#include "tests/server/http_fixture.h"

namespace kvasir::server {
namespace {

class ChatPrompt : public HttpFixture {};

// Whoever counts a prompt's tokens counts those that chat sends.
TEST_F(ChatPrompt, TokenizeSaysWhatChatReads) {
  const std::string chat =
      R"("messages":[{"role":"developer","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
                     {"role":"user","content":"c"}],
         "documents":[{"title":"D"}],"chat_template_kwargs":{"mood":"calm"})";
  engine_.set_context(1000);
  engine_.use_template(
      "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ documents[0].title }}{{ mood }}");
  for (const std::string& tools :
       {std::string(), std::string(R"(,"tools":[{"type":"function","function":{"name":"f"}}])")}) {
    Json ids = whole("/tokenize", cat("{", chat, tools, "}"))["tokens"];
    whole("/v1/chat/completions", cat("{", chat, tools, R"(,"max_tokens":1})"));
    EXPECT_EQ(ids.get<std::vector<int32_t>>(), engine_.last().prompt);
    std::string text;
    for (int32_t id : engine_.last().prompt) text += char(id);
    EXPECT_TRUE(text.starts_with("system:a\nb")) << text;
    EXPECT_TRUE(text.ends_with("user:c;Dcalm")) << text;
    EXPECT_EQ(text.find("\"name\":\"f\"") != std::string::npos, !tools.empty()) << text;
  }
}

// A template given with --chat-template, or beside the tokenizer, decides how tools are written; not the tokenizer's.
TEST_F(ChatPrompt, ToolsAreThoseOfTheTemplateInUse) {
  engine_.use_template("{% for t in tools %}[{{ t.function.name }}]{% endfor %}{{ messages[0].content }}");
  whole("/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}],"max_tokens":1,
      "tools":[{"type":"function","function":{"name":"f"}}]})");
  EXPECT_EQ(engine_.last().prompt, (std::vector<int32_t>{'[', 'f', ']', 'x'}));
}

}  // namespace
}  // namespace kvasir::server
