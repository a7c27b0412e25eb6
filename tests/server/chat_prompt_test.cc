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

// Kimi's templates write the ids of calls, and the model numbers its calls; clients send ids of their own.
TEST_F(ChatPrompt, KimisCallsComeBackNumbered) {
  engine_.set_context(1000);
  const std::string loop =
      "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.arguments }};{% endfor %}"
      "{% if m.role == 'tool' %}{{ m.tool_call_id }}={{ m.content }};{% endif %}{% endfor %}";
  auto prompt = [&](const std::string& chat_template) {
    engine_.use_template(chat_template.c_str());
    whole("/v1/chat/completions", R"({"messages":[{"role":"user","content":"q"},
        {"role":"assistant","tool_calls":[
          {"id":"call_x","type":"function","function":{"name":"f","arguments":"{}"}},
          {"id":"call_y","type":"function","function":{"name":"g","arguments":"{}"}}]},
        {"role":"tool","tool_call_id":"call_y","content":"2"},{"role":"tool","tool_call_id":"call_x","content":"1"},
        {"role":"assistant","tool_calls":[{"id":"call_x","type":"function","function":{"name":"f","arguments":"{}"}}]},
        {"role":"tool","tool_call_id":"call_x","content":"3"}],"max_tokens":1})");
    std::string text;
    for (int32_t id : engine_.last().prompt) text += char(id);
    return text;
  };
  EXPECT_EQ(prompt(loop + "{# tools <|tool_calls_section_begin|> #}"),
            "functions.f:0{};functions.g:1{};functions.g:1=2;functions.f:0=1;functions.f:2{};functions.f:2=3;");
  EXPECT_EQ(prompt(loop + "{# tools #}"), "call_x{};call_y{};call_y=2;call_x=1;call_x{};call_x=3;");
}

// MiniMax's template goes through the arguments one by one, whatever form a client sends them back in.
TEST_F(ChatPrompt, MinimaxsCallsComeBackAsElements) {
  engine_.set_context(1000);
  engine_.use_template(
      "{% for m in messages %}{% for c in m.tool_calls or [] %}<minimax:tool_call>\n<invoke name=\"{{ c.function.name "
      "}}\">"
      "{% for k, v in c.function.arguments | items %}<parameter name=\"{{ k }}\">"
      "{{ v | tojson if v is not string else v }}</parameter>{% endfor %}</invoke>{% endfor %}{% endfor %}{# tools #}");
  for (const char* arguments : {R"("{\"a\":\"b c\",\"n\":[1]}")", R"({"a":"b c","n":[1]})"}) {
    whole("/v1/chat/completions",
          cat(R"({"messages":[{"role":"user","content":"q"},{"role":"assistant","tool_calls":[
              {"id":"x","type":"function","function":{"name":"f","arguments":)",
              arguments, R"(}}]},{"role":"tool","tool_call_id":"x","content":"1"}],"max_tokens":1})"));
    std::string text;
    for (int32_t id : engine_.last().prompt) text += char(id);
    EXPECT_EQ(text,
              "<minimax:tool_call>\n<invoke name=\"f\"><parameter name=\"a\">b c</parameter>"
              "<parameter name=\"n\">[1]</parameter></invoke>");
  }
}

}  // namespace
}  // namespace kvasir::server
