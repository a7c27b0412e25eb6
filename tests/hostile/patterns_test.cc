// Regular expressions and Lark grammars made to grow.
#include "core/cat.h"
#include "model/text/stoppable.h"
#include "tests/hostile/follow.h"

namespace kvasir::text {
namespace {

class HostilePatterns : public Follow {};

TEST_F(HostilePatterns, RegularExpressions) {
  std::string nested = "a", wide;
  for (int i = 0; i < 200; ++i) nested = "(" + nested + ")*";
  for (int i = 0; i < 3000; ++i) wide += "(a|b)?";
  for (const std::string& regex : {std::string("(a+)+$"), std::string("(x{1000}){1000}"), std::string(".{0,100000}"),
                                   std::string("(a|b)*a(a|b){40}"), std::string("(((a{1,100}){1,100}){1,100}){1,100}"),
                                   nested, wide, std::string("[\\s\\S]*a[\\s\\S]{20}b"),
                                   std::string("(\\w{1,500}\\s?){1,500}"), std::string("(\\p{L}|\\p{N}|\\p{S}){5000}")})
    expect_bounded(Kind::regex, regex);
}

TEST_F(HostilePatterns, TerminalsThatMustMatchTogetherOrNot) {
  std::string all, none, late;
  for (int n = 5; n < 12; ++n) {
    const std::string one = cat("/(.*[a-", char('l' + n), "]){", n * 7, "}.*/");
    all += (all.empty() ? "" : " & ") + one;
    none += (none.empty() ? "~" : " & ~") + one;
    late += (late.empty() ? "" : " & ") + cat("/x|a{64}(.*[a-", char('l' + n), "]){", n * 7, "}.*/");
  }
  expect_bounded(Kind::lark, "start: A\nA: " + all + "\n");
  expect_bounded(Kind::lark, "start: A\nA: " + none + "\n");
  expect_bounded(Kind::lark, "start: A\nA: " + late + "\n");
  for (const char* first : {"", "y{64}"}) {  // the second from where a model has come to be, not from the beginning
    std::string products;
    for (int count : {97, 101, 103})
      products += cat(products.empty() ? "" : " & ", "/", first, "(x|(a{", count, "})+)/");
    expect_bounded(Kind::lark, "start: A\nA: " + products + "\n");
  }
  expect_bounded(Kind::lark, "start: A+\nA: /a*/ & ~(/(a|b)*a(a|b){30}/)\n");
}

TEST_F(HostilePatterns, AmbiguousRules) {
  for (const char* lark : {"start: start start | \"a\"", "start: /(a+)+/ start | start",
                           "start: (\"a\" | \"a\" \"a\")*", "start: s\ns: s s s | \"a\" | \"\""})
    expect_bounded(Kind::lark, lark);
}

// A client that leaves takes its compilation with it.
TEST_F(HostilePatterns, CompilationIsStopped) {
  const GrammarSpec slow{Kind::json_schema, R"({"type":"integer","multipleOf":9999991})", {}};
  int asked = 0;
  auto& stoppable = dynamic_cast<StoppableCompiler&>(*compiler);
  const Status stopped = stoppable.compile_unless([&] { return ++asked > 3; }, slow).status();
  EXPECT_EQ(stopped.code(), Code::cancelled) << stopped.to_string();
  EXPECT_EQ(asked, 4);
  EXPECT_EQ(compiler->compile(slow).status().code(), Code::invalid_argument) << "who left decided for others";
}

}  // namespace
}  // namespace kvasir::text
