#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/text/small_vocab.h"

namespace kvasir::text {
namespace {

using ::testing::HasSubstr;

class ChatTemplateTest : public ::testing::Test {
 protected:
  TokenizerPtr t = *Tokenizer::from_gguf(small_byte_level_vocab());

  std::string render(std::string_view source, std::string_view messages = "[]", std::string_view tools = "",
                     std::string_view extra = "", bool generate = true) {
    auto compiled = ChatTemplate::compile(source, *t);
    if (!compiled.ok()) return compiled.status().to_string();
    Result<std::string> text = (*compiled)->render(messages, tools, generate, extra);
    return text.ok() ? *text : text.status().to_string();
  }
};

constexpr std::string_view kChatMl =
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

TEST_F(ChatTemplateTest, ChatMl) {
  EXPECT_EQ(render(kChatMl, R"([{"role":"user","content":"hi <b> & 'you'"}])"),
            "<|im_start|>user\nhi <b> & 'you'<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(render(kChatMl, R"([{"role":"user","content":"hi"}])", "", "", false), "<|im_start|>user\nhi<|im_end|>\n");
}

TEST_F(ChatTemplateTest, TextPartsBecomeOneText) {
  EXPECT_EQ(render("{{ messages[0].content }}",
                   R"([{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}])"),
            "a\nb");
}

TEST_F(ChatTemplateTest, TheDeveloperIsTheSystemToTemplatesThatKnowNone) {
  const char* messages = R"([{"role":"developer","content":"x"}])";
  EXPECT_EQ(render("{{ messages[0].role }}", messages), "system");
  EXPECT_EQ(render("{{ messages[0].role }}{# developer #}", messages), "developer");
}

TEST_F(ChatTemplateTest, ToolsAsPythonWritesJson) {
  EXPECT_EQ(render("{{ tools[0] | tojson }}", "[]", R"([{"type":"function","n":1.5,"l":[1,null,"<é>"]}])"),
            R"({"type": "function", "n": 1.5, "l": [1, null, "<é>"]})");
  const std::string out_of_order = R"([{"b":{"z":1,"a":"\u00e9\ud83d\ude00"},"a":[2]}])";
  EXPECT_EQ(render("{{ tools[0] | tojson(sort_keys=true) }}", "[]", out_of_order),
            "{\"a\": [2], \"b\": {\"a\": \"\xc3\xa9\xf0\x9f\x98\x80\", \"z\": 1}}");
  EXPECT_EQ(render("{{ tools[0].b | tojson(separators=(',', ':'), ensure_ascii=true) }}", "[]", out_of_order),
            R"({"z":1,"a":"\u00e9\ud83d\ude00"})");
  EXPECT_EQ(render("{{ tools | tojson(indent=2) }}", "[]", R"([{"a":1}])"), "[\n  {\n    \"a\": 1\n  }\n]");
  EXPECT_EQ(render("{% if tools %}y{% else %}n{% endif %}", "[]", "[]"), "n");
}

TEST_F(ChatTemplateTest, ArgumentsOfACallAreAnObject) {
  EXPECT_EQ(render("{{ messages[0].tool_calls[0].function.arguments.city }}",
                   R"([{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function",
                       "function":{"name":"w","arguments":"{\"city\":\"Oslo\"}"}}]}])"),
            "Oslo");
}

// Some templates add the arguments to a text, and some write calls only of messages that have no content.
TEST_F(ChatTemplateTest, ACallComesInTheFormTheTemplateWrites) {
  const char* messages = R"([{"role":"user","content":"q"},{"role":"assistant","content":"","tool_calls":[{"id":"1",
      "type":"function","function":{"name":"w","arguments":"{\"a\":[1,2]}"}}]}])";
  const std::string loop = "{% for m in messages %}{% if m.tool_calls %}", end = "{% endif %}{% endfor %}";
  const char* add = "{{ 'call ' + m.tool_calls[0].function.arguments + '!' }}";
  EXPECT_EQ(render(loop + add + end, messages), "call {\"a\": [1, 2]}!");
  EXPECT_EQ(render(loop + "{% if m.content is none %}" + add + "{% endif %}" + end, messages), "call {\"a\": [1, 2]}!");
  EXPECT_EQ(
      render(loop + "{{ m.tool_calls[0].function.arguments.items() | list | length }}{{ m.content }}" + end, messages),
      "1");
  EXPECT_EQ(render(loop + "{{ m.tool_calls[0].function.arguments | tojson }}" + end, messages), "{\"a\": [1, 2]}");
}

TEST_F(ChatTemplateTest, AsPythonHasIt) {
  EXPECT_EQ(render("{{ none is iterable }}{{ [1] is iterable }}{{ 'a' is iterable }}{{ 1 is iterable }}"),
            "FalseTrueTrueFalse");
  EXPECT_EQ(render("{{ 'a\\n\\nb\\n' | indent(2) }}|"), "a\n\n  b\n|");
  EXPECT_EQ(render("{{ 'a\\n\\nb' | indent(width=1, first=true, blank=true) }}|"), " a\n \n b|");
  EXPECT_EQ(render("{{ 'a\\nb' | indent(1, true) }}|"), " a\n b|");
  EXPECT_EQ(render("{{ 'a' | indent }}|{{ '' | indent }}|"), "a||");
}

TEST_F(ChatTemplateTest, SwitchesDocumentsAndPython) {
  EXPECT_EQ(render("{{ enable_thinking }}", "[]", "", R"({"enable_thinking":false})"), "False");
  EXPECT_EQ(render("{% for d in documents %}{{ loop.index }}:{{ d.title }};{% endfor %}", "[]", "",
                   R"({"documents":[{"title":"A"},{"title":"B"}]})"),
            "1:A;2:B;");
  EXPECT_EQ(
      render("{{ ' ab '.strip() + 'x'.upper() }}{{ 'a-b'.split('-')[-1] }}{{ {'a': 1}.items() | list | length }}"),
      "abXb1");
  EXPECT_EQ(
      render("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}"),
      "3");
  EXPECT_EQ(render("{{ bos_token }}{{ eos_token }}"), "<|im_start|><|im_end|>");
  EXPECT_EQ(render("{% for i in [1,2,3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}"), "13");
  EXPECT_EQ(render("{% generation %}x{% endgeneration %}"), "x");
  EXPECT_EQ(render("  {% if true %}\nline\n  {% endif %}\nend\n"), "line\nend");
  EXPECT_THAT(render("{{ strftime_now('%Y') }}"), ::testing::StartsWith("20"));
}

TEST_F(ChatTemplateTest, RefusalsSayWhy) {
  EXPECT_THAT(render("{{ raise_exception('only user and assistant roles') }}"),
              HasSubstr("only user and assistant roles"));
  EXPECT_THAT(render(""), HasSubstr("--chat-template"));
  EXPECT_THAT(render("{% for %}"), HasSubstr("does not compile"));
  EXPECT_THAT(render("x", "{"), HasSubstr("messages is not JSON"));
  EXPECT_THAT(render("x", "3"), HasSubstr("messages must be a list"));
  EXPECT_THAT(render("x", "[]", "", "[1]"), HasSubstr("chat_template_kwargs must be an object"));
  EXPECT_THAT(render("{% include 'other' %}"), HasSubstr("other"));
}

TEST_F(ChatTemplateTest, LoopsRunOutOfFuel) {
  const std::string loops =
      "{% for a in range(90000) %}{% for b in range(90000) %}{% for c in range(90000) %}{% endfor %}{% endfor %}"
      "{% endfor %}";
  EXPECT_THAT(render(loops), HasSubstr("RESOURCE_EXHAUSTED"));
  EXPECT_THAT(render("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"), HasSubstr("recursion"));
  EXPECT_THAT(render("{{ " + std::string(20000, '(')), HasSubstr("does not compile"));
  EXPECT_THAT(render("{{ " + std::string(5000, '[') + " }}"), HasSubstr("does not compile"));
  // Output is bounded too.
  EXPECT_THAT(render("{% for i in range(100000) %}{{ messages[0].content }}{% endfor %}",
                     R"([{"role":"user","content":")" + std::string(10000, 'x') + R"("}])"),
              HasSubstr("RESOURCE_EXHAUSTED"));
}

TEST_F(ChatTemplateTest, DeepJsonIsRefused) {
  const std::string deep = std::string(100000, '[') + std::string(100000, ']');
  EXPECT_THAT(render("x", deep), HasSubstr("INVALID_ARGUMENT"));
}

}  // namespace
}  // namespace kvasir::text
