// GBNF, the grammars of llama.cpp: what they allow, against all the words that a small grammar has.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>
#include <functional>
#include <random>
#include <set>

#include "core/cat.h"
#include "tests/text/small_vocab.h"

namespace kvasir::text {
namespace {

using ::testing::HasSubstr;

class Gbnf : public ::testing::Test {
 protected:
  TokenizerPtr t = *Tokenizer::from_gguf(small_byte_level_vocab());
  std::shared_ptr<GrammarCompiler> compiler = *GrammarCompiler::create(t);

  Result<std::unique_ptr<Matcher>> compile(std::string text) {
    return compiler->compile({GrammarSpec::Kind::lark, std::move(text), {}});
  }
  std::unique_ptr<Matcher> matcher(std::string text) {
    auto m = compile(text);
    EXPECT_TRUE(m.ok()) << m.status().to_string() << '\n' << text;
    return m.ok() ? std::move(*m) : nullptr;
  }
  std::string refusal(std::string text) { return compile(std::move(text)).status().to_string(); }

  // Byte by byte, and then the end.
  bool is_word(const Matcher& grammar, std::string_view text) {
    auto m = grammar.clone();
    for (const char c : text)
      if (!m->consume(t->token_id(byte_level(std::string(1, c)))).ok()) return false;
    std::vector<uint32_t> bits((t->vocab_size() + 31) / 32);
    EXPECT_TRUE(m->mask(bits).ok());
    const int32_t end = t->end_of_generation()[0];
    return bits[size_t(end) / 32] >> (end % 32) & 1;
  }
  void expect(const std::string& grammar, std::vector<std::string> words, std::vector<std::string> others) {
    auto m = matcher(grammar);
    if (!m) return;
    for (const std::string& word : words) EXPECT_TRUE(is_word(*m, word)) << grammar << "\n" << word;
    for (const std::string& word : others) EXPECT_FALSE(is_word(*m, word)) << grammar << "\n" << word;
  }
};

TEST_F(Gbnf, TextsClassesCountsAndGroups) {
  expect("root ::= \"a\" [0-9]+ \"b\"?", {"a1", "a12b"}, {"a", "ab", "a1bb", ""});
  expect("root ::= [^a-c\\n] | \"\\x61\\u0062\\\"\"", {"d", "ab\"", "\xC3\xA9", "]"}, {"a", "\n", "ab"});
  expect("root ::= \"x\"{2,3} (\"y\" | \"z\"{0})* [a-]{2}", {"xxa-", "xxxyyaa"}, {"xaa", "xxxxaa", "xxa"});
  expect("root ::= . .", {"ab", "\n\xE2\x82\xAC"}, {"a", "abc"});
  expect("# a comment\nroot ::= a-b | # another\n  \"c\"\n\na-b ::= \"d\"\n  \"e\"", {"de", "c"}, {"d", "ce"});
  expect("root ::= (\"a\" | ) \"b\"", {"ab", "b"}, {"a"});
}

TEST_F(Gbnf, JsonOfItsOwnRepository) {
  const std::string json = R"(root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
)";
  expect(json, {"{}", R"({"a": [1, -2.5e3,{"b":null}], "c" :"\u00e9\"x"})", "{\n  \"a\": true\n}"},
         {"[]", "{\"a\"}", "{\"a\":01}", "{\"a\":1,}", R"({"a":"\x"})"});
}

// Where words of two rules begin alike, or go on as what follows does: no reading is lost.
TEST_F(Gbnf, TheLongestReadingIsNotTheOnlyOne) {
  expect("root ::= \"(\" root \")\" | [a-z]* \"b\" root \"!\" | \"x\"", {"x", "(x)", "aabx!", "abbx!", "bx!"},
         {"b", "abx"});
  expect("root ::= \"ab\" \"x\" root | [a-c] \"b\" \"y\" | \"e\" root \"e\"", {"aby", "abxaby", "ecbye"},
         {"abx", "aye"});
  expect("root ::= s \"a\" | \"(\" root \")\"\ns ::= \"a\" s | \"a\"", {"aa", "(aaa)"}, {"a", "(a)"});
}

TEST_F(Gbnf, RulesMayNameThemselves) {
  expect("root ::= expr\nexpr ::= expr [-+] term | term\nterm ::= [0-9]+ | \"(\" expr \")\"", {"1+2-3", "(1)-(22+3)"},
         {"1+", "()", "1 + 2"});
  expect("root ::= \"a\" root \"b\" | \"\"", {"", "ab", "aaabbb"}, {"a", "aab"});
}

TEST_F(Gbnf, Tokens) {
  auto m = matcher("root ::= <|im_start|> \"a\" <[1]>* <think>");  // 1 is <|im_start|>, too
  ASSERT_TRUE(m);
  EXPECT_FALSE(m->clone()->consume(t->token_id("<think>")).ok());
  for (const char* token : {"<|im_start|>", "a", "<|im_start|>", "<think>"})
    EXPECT_TRUE(m->consume(t->token_id(token)).ok()) << token;
  EXPECT_TRUE(m->finished());
  EXPECT_THAT(refusal("root ::= <nobody>"), HasSubstr("names <nobody>, which is no token"));
  EXPECT_FALSE(compile("root ::= <[9999]>").ok());
}

TEST_F(Gbnf, MistakesAreNamed) {
  EXPECT_THAT(refusal("root ::= \"a\" other"), HasSubstr("no rule 'other'"));
  EXPECT_THAT(refusal("start ::= \"a\""), HasSubstr("no rule 'root'"));
  EXPECT_THAT(refusal("root ::= \"a\"\nroot ::= \"b\""), HasSubstr("two rules 'root'"));
  EXPECT_THAT(refusal("root ::= \"a\"\n  (\"b\""), HasSubstr("line 2: a bracket is not closed"));
  EXPECT_THAT(refusal("root ::= \"a"), HasSubstr("a text is not closed"));
  EXPECT_THAT(refusal("root ::= [a"), HasSubstr("not closed by ]"));
  EXPECT_THAT(refusal("root ::= [b-a]"), HasSubstr("ends before it begins"));
  EXPECT_THAT(refusal("root ::= []"), HasSubstr("no character"));
  EXPECT_THAT(refusal("root ::= \"\\q\""), HasSubstr("'\\q' stands for nothing"));
  EXPECT_THAT(refusal("root ::= \"a\"{3,1}"), HasSubstr("a count must be"));
  EXPECT_THAT(refusal("root ::= \"a\"{99999999999}"), HasSubstr("a count must be"));
  EXPECT_THAT(refusal("root ::= \"a\" ; \"b\""), HasSubstr("';' stands for nothing"));
  EXPECT_THAT(refusal("root ::= !<think>"), HasSubstr("'!' stands for nothing"));
  EXPECT_THAT(refusal("root ::= \"\\uD800\""), HasSubstr("hexadecimal"));
  EXPECT_FALSE(compile("root ::= root").ok());
}

TEST_F(Gbnf, WhatWouldTakeForEverIsRefused) {
  std::string doubling = "root ::= r40\nr0 ::= \"\"\n", letters = "root ::= r40 root | r40\nr0 ::= \"a\"?\n";
  for (int i = 1; i <= 40; ++i)
    for (std::string* g : {&doubling, &letters}) *g += cat("r", i, " ::= r", i - 1, " r", i - 1, "\n");
  std::string deep = "root ::= ", many = "root ::= r0\n";
  for (int i = 0; i < 5'000; ++i) deep += "(", many += cat("r", i, " ::= \"a\" r", (i + 1) % 5'000, " | \"b\"*\n");
  for (const std::string& g : {doubling, letters, deep, many, std::string("root ::= ([a-z]{0,9999} root?){0,9999}")}) {
    const std::clock_t began = std::clock();
    (void)compile(g);
    EXPECT_LT(double(std::clock() - began) / CLOCKS_PER_SEC, 2) << g.substr(0, 60);
  }
}

// Random small grammars over a, b and c: a word is one of the grammar's if it is among those made from its rules.
class Random {
 public:
  using Words = std::set<std::string>;
  static constexpr size_t kLongest = 5;

  explicit Random(uint32_t seed) : draw_(seed) {
    const int rules = 1 + pick(4);
    for (int r = 0; r < rules; ++r) bodies_.push_back(node(3, rules));
  }
  std::string text() const {
    std::string out;
    for (size_t r = 0; r < bodies_.size(); ++r) out += cat(name(int(r)), " ::= ", bodies_[r].text, '\n');
    return out;
  }
  // Of up to kLongest letters.
  Words words() const {
    std::vector<Words> of(bodies_.size());
    for (bool more = true; more;) {
      more = false;
      for (size_t r = 0; r < of.size(); ++r) {
        Words made = bodies_[r].words(of);
        more |= made.size() > of[r].size();
        of[r] = std::move(made);
      }
    }
    return of[0];
  }

 private:
  struct Node {
    std::string text;
    std::function<Words(const std::vector<Words>&)> words;
  };
  static std::string name(int r) { return r == 0 ? "root" : cat("rule-", r); }
  int pick(int n) { return int(draw_() % uint32_t(n)); }

  static Words joined(const Words& a, const Words& b) {
    Words out;
    for (const std::string& x : a)
      for (const std::string& y : b)
        if (x.size() + y.size() <= kLongest) out.insert(x + y);
    return out;
  }

  Node node(int depth, int rules) {
    switch (depth > 0 ? pick(7) : pick(3)) {
      case 0: {
        const std::string s(size_t(1 + pick(2)), char('a' + pick(3)));
        return {cat('"', s, '"'), [s](auto&) { return Words{s}; }};
      }
      case 1: {
        const int from = pick(3), to = from + pick(3 - from);
        Words all;
        for (int c = from; c <= to; ++c) all.insert(std::string(1, char('a' + c)));
        return {cat('[', char('a' + from), '-', char('a' + to), ']'), [all](auto&) { return all; }};
      }
      case 2: {
        const int r = pick(rules);
        return {name(r), [r](auto& of) { return of[size_t(r)]; }};
      }
      case 3: {
        Node inner = node(depth - 1, rules);
        const int least = pick(2), most = pick(3);  // 2: any number
        const char* sign = most == 2 ? (least ? "+" : "*") : least ? "{1,2}" : "?";
        return {cat('(', inner.text, ')', sign), [=](auto& of) {
                  Words one = inner.words(of), all, now{""};
                  const size_t times = most == 2 ? kLongest + 1 : least ? 2 : 1;
                  for (size_t i = 0; i <= times; ++i) {
                    if (i >= size_t(least)) all.insert(now.begin(), now.end());
                    now = joined(now, one);
                  }
                  return all;
                }};
      }
      case 4: {
        Node a = node(depth - 1, rules), b = node(depth - 1, rules);
        return {cat('(', a.text, " | ", b.text, ')'), [=](auto& of) {
                  Words all = a.words(of), more = b.words(of);
                  all.insert(more.begin(), more.end());
                  return all;
                }};
      }
      default: {
        Node a = node(depth - 1, rules), b = node(depth - 1, rules);
        return {cat(a.text, ' ', b.text), [=](auto& of) { return joined(a.words(of), b.words(of)); }};
      }
    }
  }

  std::mt19937 draw_;
  std::vector<Node> bodies_;
};

TEST_F(Gbnf, RandomGrammarsHaveTheirWordsAndNoOthers) {
  std::vector<std::string> all{""};
  for (size_t i = 0; all[i].size() < Random::kLongest; ++i)
    for (const char c : {'a', 'b', 'c'}) all.push_back(all[i] + c);
  int seen = 0;
  for (uint32_t seed = 0; seed < 400; ++seed) {
    const Random grammar(seed);
    const Random::Words words = grammar.words();
    if (words.empty()) continue;
    auto m = matcher(grammar.text());
    if (!m) break;
    ++seen;
    for (const std::string& s : all)
      ASSERT_EQ(is_word(*m, s), words.contains(s)) << "seed " << seed << ", '" << s << "'\n" << grammar.text();
  }
  EXPECT_GT(seen, 200);
}

}  // namespace
}  // namespace kvasir::text
