// Chat templates of a model file that somebody else made: what they may cost when they are read and when they are used.
#include <gmock/gmock.h>

#include "core/cat.h"
#include "tests/hostile/cost.h"
#include "tests/text/small_vocab.h"

namespace kvasir::text {
namespace {

using ::testing::HasSubstr;

std::string repeated(std::string_view text, int times) {
  std::string out;
  for (int i = 0; i < times; ++i) out += text;
  return out;
}

class HostileTemplates : public ::testing::Test {
 protected:
  TokenizerPtr tokenizer = *Tokenizer::from_gguf(small_byte_level_vocab());

  std::string render(const std::string& source) {
    std::string out;
    expect_bounded(source, [&] {
      auto compiled = ChatTemplate::compile(source, *tokenizer);
      if (!compiled.ok()) return void(out = compiled.status().to_string());
      auto text = (*compiled)->render(R"([{"role":"user","content":"hi"}])", "", true);
      out = text.ok() ? *text : text.status().to_string();
    });
    return out;
  }
  void expect_refused(const std::string& source) {
    const std::string said = render(source);
    EXPECT_TRUE(said.starts_with("INVALID_ARGUMENT") || said.starts_with("RESOURCE_EXHAUSTED"))
        << source.substr(0, 200) << ": " << said.substr(0, 200);
  }
  // `step` done over and over with ns.x, then `last` with what has become of it.
  static std::string grown(const std::string& first, const std::string& step,
                           const std::string& last = "{{ ns.x|length }}", int times = 90000) {
    return cat("{% set ns = namespace(x=", first, ") %}{% for i in range(", times, ") %}{% set ns.x = ", step,
               " %}{% endfor %}", last);
  }
};

TEST_F(HostileTemplates, DeepInTheirSource) {
  for (const char* deep : {"not ", "-", "(", "[", "{'a':", "f(", "x if "})
    expect_refused("{{ " + repeated(deep, 200000) + "1 }}");
  for (const char* chain : {"|e", ".a", "[0]", "()", "+1", "~1", " and 1", " if 1 else 1"})
    expect_refused("{{ x" + repeated(chain, 200000) + " }}");
  expect_refused(repeated("{% if x %}", 100000));
  expect_refused("{% if x %}" + repeated("{% elif x %}", 80000) + "{% endif %}");
  expect_refused(repeated("{% for x in y %}", 50000));
  // What people write is far from it.
  EXPECT_EQ(render("{{ " + repeated("(", 50) + "1" + repeated(")", 50) + " }}"), "1");
  EXPECT_EQ(render("{{ 0" + repeated("+1", 500) + " }}"), "500");
}

TEST_F(HostileTemplates, DeepInTheirValues) {
  expect_refused(grown("[]", "[ns.x]"));
  expect_refused(grown("[]", "[ns.x]", "{{ ns.x }}", 5000));
  expect_refused(grown("[]", "[ns.x]", "{{ ns.x|tojson }}", 5000));
  expect_refused(grown("1", "{'a': ns.x}"));
  expect_refused(grown("1", "(ns.x, 1)"));
  expect_refused(grown("1", "dict(a=ns.x)"));
  EXPECT_EQ(render(grown("[]", "[ns.x]", "{{ ns.x }}", 3)), "[[[[]]]]");
}

TEST_F(HostileTemplates, ThatHoldThemselves) {
  for (const char* use :
       {"{{ ns }}", "{{ ns|tojson }}", "{{ ns == ns }}", "{{ ns ~ '' }}", "{{ ns|string|length }}", ""}) {
    EXPECT_THAT(render(cat("{% set ns = namespace() %}{% set ns.a = ns %}", use)), HasSubstr("namespace"));
    expect_refused(cat("{% set ns = namespace() %}{% set ns.a = [{'b': ns}] %}", use));
    expect_refused(cat("{% set ns = namespace() %}{% for i in [ns] %}{% set ns.a = loop %}{% endfor %}", use));
  }
}

TEST_F(HostileTemplates, ThatDouble) {
  for (const char* step :
       {"ns.x ~ ns.x", "ns.x + ns.x", "ns.x * 2", "ns.x|replace('a', 'aa')", "ns.x.replace('a', 'aa')",
        "[ns.x, ns.x]|join", "[ns.x, ns.x]|join(ns.x)", "ns.x.join([ns.x, ns.x])",
        "(ns.x ~ '\\n' ~ ns.x)|indent(900, true)", "'%s%s'|format(ns.x, ns.x)", "[ns.x, ns.x]|string"})
    expect_refused(grown("'a'", step));
  for (const char* step :
       {"ns.x + ns.x", "ns.x * 2", "[ns.x, ns.x]", "{'a': ns.x, 'b': ns.x}", "ns.x|chain(ns.x)", "(ns.x + ns.x)|list"})
    expect_refused(grown("['a']", step, "{{ ns.x }}"));
  expect_refused("{% set x %}" + repeated("a", 1000) + "{% endset %}" +
                 repeated("{% set x %}{{ x }}{{ x }}{% endset %}", 60));
  expect_refused("{% macro f(x, n) %}{{ f(x ~ x, n - 1) if n else x }}{% endmacro %}{{ f('aaaaaaaaaa', 60) }}");
}

TEST_F(HostileTemplates, ThatMakeMuchOfLittleAtOnce) {
  for (const char* large :
       {"'%999999999d'|format(1)", "'%.999999999f'|format(1.5)", "'%*d'|format(999999999, 1)",
        "'{:999999999}'.format(1)", "'a' * 999999999", "['a'] * 99999999", "(['a'] * 9999999)|join('b')",
        "('a' * 9999999)|replace('a', 'b' * 9999999)", "('a' * 9999999)|replace('', 'bbbb')",
        "[1]|batch(99999999, 'x')|list", "[1]|slice(99999999)|list", "('a\\n' * 999999)|indent(99999)",
        "('a\\n' * 999999)|indent(width=99999)", "(' ' * 9999999)|list", "('a ' * 4999999).split(' ')",
        "([[1] * 999999] * 999999)|string", "([[1] * 99999] * 99999)|tojson(indent=16)"})
    expect_refused(cat("{{ (", large, ")|string|length }}"));
  expect_refused("{% for i in range(100000) %}" + std::string(900000, 'x') + "{% endfor %}");
  expect_refused(
      "{% set ns = namespace(l=[]) %}{% for i in range(90000) %}{% set ns.l = ns.l + ['a' * 999999] %}{% endfor %}");
}

TEST_F(HostileTemplates, ThatTakeTheirTime) {
  const std::string big = "{% set a = 'a' * 9999999 %}{% set b = 'a' * 9999999 %}";
  for (const char* slow : {"{% if a == b %}{% endif %}", "{% if a < b %}{% endif %}", "{% if 'b' in a %}{% endif %}",
                           "{{ a|length }}", "{% if a is eq b %}{% endif %}", "{{ a[-1] }}", "{{ a.count('b') }}"})
    expect_refused(cat(big, "{% for i in range(90000) %}", slow, "{% endfor %}"));
  // A long conversation is none of these.
  const std::string turns =
      "{% set ns = namespace(t='') %}{% for i in range(2000) %}{% set ns.t = ns.t ~ 'turn ' ~ i %}{% endfor %}";
  EXPECT_EQ(render(turns + "{{ ns.t|length }}"), "16890");
}

// Which form of a call a template writes is found by trying; one that never ends is tried once.
TEST_F(HostileTemplates, ThatTakeTheirTimeWhenTheyAreRead) {
  const std::string source =
      "{% set n = messages|length * 2000000 %}{% set a = 'a' * n %}{% set b = 'a' * n %}{% for m in messages %}{% if "
      "m.tool_calls %}"
      "{% for i in range(90000) %}{% if a == b %}{% endif %}{% endfor %}{% endif %}{% endfor %}";
  expect_bounded(source, [&] { EXPECT_TRUE(ChatTemplate::compile(source, *tokenizer).ok()); });
}

}  // namespace
}  // namespace kvasir::text
