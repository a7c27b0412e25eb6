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

// Firefunction's template writes out a variable `functions`, a text, with tools or without.
TEST_F(ChatPrompt, ToolsAreATextWhereTheTemplateAsksForFunctions) {
  engine_.set_context(1000);
  auto prompt = [&](const char* chat_template, const std::string& more) {
    engine_.use_template(chat_template);
    whole("/v1/chat/completions", cat(R"({"messages":[{"role":"user","content":"x"}],"max_tokens":1)", more, "}"));
    std::string text;
    for (int32_t id : engine_.last().prompt) text += char(id);
    return text;
  };
  const std::string tools = R"(,"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}])";
  const char* fire = "functools: {%- filter trim -%} of functions {%- endfilter -%}{{ ':' + functions }}";
  EXPECT_EQ(prompt(fire, ""), "functools:of functions:");
  EXPECT_EQ(prompt(fire, tools), R"(functools:of functions:[
    {
        "name": "f",
        "parameters": {
            "type": "object"
        }
    }
])");
  EXPECT_EQ(prompt(fire, R"(,"chat_template_kwargs":{"functions":"mine"})"), "functools:of functions:mine");
  // Templates that ask for `tools` have a word of that name for something else, if they have one.
  EXPECT_EQ(prompt("{# functions #}functions {{ 'functions' }}{{ tools[0].function.name }}{{ functions }}", tools),
            "functions functionsf");
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
  // Mistral's want nine letters and digits, and no template has a use for the ids that a protocol made up.
  EXPECT_EQ(prompt(loop + "{# tools #}"), "call00000{};call00001{};call00001=2;call00000=1;call00002{};call00002=3;");
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

class AgentsPrompt : public ChatPrompt {
 protected:
  using Json = nlohmann::ordered_json;  // as clients write it: a template prints it in that order
  std::string prompt(const std::string& path, const Json& body) {
    whole(path, body.dump());
    std::string text;
    for (int32_t id : engine_.last().prompt) text += char(id);
    return text;
  }
};

// A template that has no place for calls and what tools answer: they are said in words, and turns alternate.
TEST_F(AgentsPrompt, CallsAreWrittenWhereTheTemplateHasNoPlaceForThem) {
  engine_.set_context(4000);
  engine_.use_template("{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}");
  const Json call =
      Json::parse(R"({"id":"x","type":"function","function":{"name":"f","arguments":"{\"a\":[1,\"\u00e9\"]}"}})");
  const Json messages = {{{"role", "user"}, {"content", "q"}},
                         {{"role", "assistant"}, {"content", "So"}, {"tool_calls", Json::array({call, call})}},
                         {{"role", "tool"}, {"tool_call_id", "x"}, {"content", "1"}},
                         {{"role", "tool"}, {"tool_call_id", "x"}, {"content", "2"}},
                         {{"role", "user"}, {"content", "on"}},
                         {{"role", "assistant"}, {"content", nullptr}, {"tool_calls", Json::array({call})}},
                         {{"role", "tool"}, {"tool_call_id", "x"}, {"content", "3"}}};
  const std::string written = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": [1, \"\xC3\xA9\"]}}</tool_call>";
  EXPECT_EQ(prompt("/v1/chat/completions", {{"messages", messages}, {"max_tokens", 1}}),
            "[user:q][assistant:So\n" + written + "\n" + written +
                "][user:<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>\non][assistant:" +
                written + "][user:<tool_response>\n3\n</tool_response>]");
  // A call that nobody has answered yet.
  const Json begun = {messages[0], messages[1]};
  EXPECT_EQ(prompt("/v1/chat/completions", {{"messages", begun}, {"max_tokens", 1}}),
            "[user:q][assistant:So\n" + written + "\n" + written + "]");
  // Who has a place for what tools answer gets that as it is.
  engine_.use_template(
      "{% for m in messages %}[{{ 'T' if m.role == 'tool' else m.role }}:{{ m.content }}]{% endfor %}");
  EXPECT_TRUE(
      prompt("/v1/chat/completions", {{"messages", messages}, {"max_tokens", 1}}).ends_with(written + "][T:3]"));
}

// One conversation is one prompt, whichever protocol brings it: ids, a line of the agent's that changes with each call,
// text around calls, and tools that may not be called now.
TEST_F(AgentsPrompt, OneConversationIsOnePromptOverEveryProtocol) {
  engine_.set_context(4000);
  engine_.use_template(
      "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}[{{ m.role }}:{{ m.content }}"
      "{% for c in m.tool_calls or [] %}({{ c.id }} {{ c.function.name }}{{ c.function.arguments | tojson }}){% endfor "
      "%}"
      "{{ m.tool_call_id }}]{% endfor %}");
  const Json schema = {{"type", "object"}, {"properties", {{"a", {{"type", "integer"}}}}}};
  const char* choices[] = {"auto", "none", "required"};
  std::string first;
  for (int turn = 0; turn < 3; ++turn) {
    const std::string header = cat("x-anthropic-billing-header: cch=", turn), choice = choices[turn];
    const std::string chat =
        prompt("/v1/chat/completions",
               {{"max_tokens", 1},
                {"tool_choice", choice},
                {"tools",
                 {{{"type", "function"}, {"function", {{"name", "f"}, {"description", "d"}, {"parameters", schema}}}}}},
                {"messages",
                 {{{"role", "system"},
                   {"content", {{{"type", "text"}, {"text", header}}, {{"type", "text"}, {"text", "be"}}}}},
                  {{"role", "user"}, {"content", "q"}},
                  {{"role", "assistant"},
                   {"content", "before after"},
                   {"tool_calls",
                    {{{"id", cat("c", turn)},
                      {"type", "function"},
                      {"function", {{"name", "f"}, {"arguments", "{\"a\":1}"}}}}}}},
                  {{"role", "tool"}, {"tool_call_id", cat("c", turn)}, {"content", "r"}}}}});
    first = first.empty() ? chat : first;
    EXPECT_EQ(chat, first) << choice;
    EXPECT_TRUE(chat.ends_with("[system:be][user:q][assistant:before after(call00000 f{\"a\": 1})][tool:rcall00000]"))
        << chat;
    EXPECT_EQ(chat,
              prompt("/v1/responses",
                     {{"max_output_tokens", 1},
                      {"tool_choice", choice},
                      {"instructions", header + "\nbe"},
                      {"tools", {{{"type", "function"}, {"name", "f"}, {"description", "d"}, {"parameters", schema}}}},
                      {"input",
                       {{{"role", "user"}, {"content", "q"}},
                        {{"type", "message"},
                         {"role", "assistant"},
                         {"content", {{{"type", "output_text"}, {"text", "before"}}}}},
                        {{"type", "function_call"}, {"call_id", "z"}, {"name", "f"}, {"arguments", "{\"a\":1}"}},
                        {{"type", "message"},
                         {"role", "assistant"},
                         {"content", {{{"type", "output_text"}, {"text", " after"}}}}},
                        {{"type", "function_call_output"}, {"call_id", "z"}, {"output", "r"}}}}}));
    const char* kinds[] = {"auto", "none", "any"};
    EXPECT_EQ(chat, prompt("/v1/messages",
                           {{"max_tokens", 1},
                            {"tool_choice", {{"type", kinds[turn]}}},
                            {"system", {{{"type", "text"}, {"text", header}}, {{"type", "text"}, {"text", "be"}}}},
                            {"tools", {{{"name", "f"}, {"description", "d"}, {"input_schema", schema}}}},
                            {"messages",
                             {{{"role", "user"}, {"content", "q"}},
                              {{"role", "assistant"},
                               {"content",
                                {{{"type", "text"}, {"text", "before"}},
                                 {{"type", "tool_use"}, {"id", "t"}, {"name", "f"}, {"input", {{"a", 1}}}},
                                 {{"type", "text"}, {"text", " after"}}}}},
                              {{"role", "user"},
                               {"content", {{{"type", "tool_result"}, {"tool_use_id", "t"}, {"content", "r"}}}}}}}}));
  }
}

// `allowed_tools` is there so that a prompt keeps all its tools: the others are held off by the grammar.
TEST_F(AgentsPrompt, AllowedToolsChangeNoPrompt) {
  engine_.set_context(4000);
  engine_.use_template("{% for t in tools %}<{{ t.function.name }}>{% endfor %}{{ messages[0].content }}");
  const Json tools = {{{"type", "function"}, {"function", {{"name", "f"}}}},
                      {{"type", "function"}, {"function", {{"name", "g"}}}}};
  const Json body = {{"max_tokens", 1}, {"messages", {{{"role", "user"}, {"content", "q"}}}}, {"tools", tools}};
  EXPECT_EQ(prompt("/v1/chat/completions", body), "<f><g>q");
  EXPECT_EQ(engine_.last().grammar.kind, text::GrammarSpec::Kind::none);
  Json some = body;
  some["tool_choice"] = {{"type", "allowed_tools"},
                         {"allowed_tools", {{"mode", "auto"}, {"tools", Json::array({tools[1]})}}}};
  EXPECT_EQ(prompt("/v1/chat/completions", some), "<f><g>q");
  EXPECT_EQ(Json::parse(engine_.last().grammar.text),
            Json::parse(R"({"form":"hermes","tools":[{"name":"g","parameters":{"type":"object"}}]})"));
}

}  // namespace
}  // namespace kvasir::server
