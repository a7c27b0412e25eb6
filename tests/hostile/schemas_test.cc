// JSON schemas of a few bytes whose automata are as large as a product.
#include <nlohmann/json.hpp>

#include "core/cat.h"
#include "model/text/tool_parser.h"
#include "tests/hostile/follow.h"

namespace kvasir::text {
namespace {

using Json = nlohmann::json;

class HostileSchemas : public Follow {
 protected:
  void expect_schema(const Json& schema) { expect_bounded(Kind::json_schema, schema.dump()); }
  void expect_everywhere(const Json& schema) {
    expect_bounded(Kind::json_schema, Json{{"type", "object"}, {"properties", {{"a", schema}}}}.dump());
    const Json tools = {{"form", "hermes"},
                        {"tools", {{{"name", "f"}, {"parameters", {{"properties", {{"a", schema}}}}}}}}};
    expect_bounded(Kind::tool_calls, tools.dump());
    const Json tag = {{"type", "structural_tag"}, {"format", {{"type", "json_schema"}, {"json_schema", schema}}}};
    expect_bounded(Kind::structural_tag, tag.dump());
  }
};

TEST_F(HostileSchemas, WhereverASchemaStands) { expect_everywhere({{"type", "integer"}, {"multipleOf", 9999991}}); }

TEST_F(HostileSchemas, MultiplesOfLargeNumbers) {
  expect_schema({{"type", "integer"}, {"multipleOf", 9999991}});
  expect_schema({{"type", "number"}, {"multipleOf", 0.0009999991}});
  expect_schema({{"type", "integer"}, {"multipleOf", 9999991}, {"minimum", -1e9}, {"maximum", 1e15}});
}

TEST_F(HostileSchemas, MultiplesOfSeveral) {
  auto all_of = [](std::initializer_list<int> divisors, double scale, const char* type) {
    Json all = Json::array();
    for (int n : divisors) all.push_back({{"type", type}, {"multipleOf", scale == 1 ? Json(n) : Json(n * scale)}});
    return Json{{"allOf", all}};
  };
  expect_schema(all_of({9991, 997}, 1, "integer"));
  expect_schema(all_of({991, 997, 1009, 1013}, 1, "integer"));
  expect_schema(all_of({991, 997}, .001, "number"));
}

// The first text that all of them take is as long as the product of their counts, but for one that hides it.
TEST_F(HostileSchemas, PatternsThatMustAllMatch) {
  for (const char* first : {"", "y{64}"}) {
    Json all = Json::array();
    for (int count : {97, 101, 103})
      all.push_back({{"type", "string"}, {"pattern", cat("^", first, "(x|(a{", count, "})+)$")}});
    expect_schema({{"allOf", all}});
  }
  Json wide = Json::array();
  for (int n = 5; n < 12; ++n)
    wide.push_back({{"type", "string"}, {"pattern", cat("^(x|a{64}(.*[a-", char('l' + n), "]){", n * 7, "}.*)$")}});
  expect_schema({{"allOf", wide}});
  Json ends = Json::array();
  for (int n = 9; n < 15; ++n) ends.push_back({{"type", "string"}, {"pattern", cat("(a|b)*a(a|b){", n, "}$")}});
  expect_schema({{"allOf", ends}});
}

TEST_F(HostileSchemas, NamesThatMayNotOverlap) {
  Json names;
  for (int n = 0; n < 12; ++n) names[cat("(a|b)*a(a|b){", n + 9, "}", char('c' + n), "$")] = {{"type", "integer"}};
  expect_schema({{"type", "object"}, {"patternProperties", names}});
}

TEST_F(HostileSchemas, LargeCounts) {
  expect_schema({{"type", "string"}, {"minLength", 1000000}, {"maxLength", 2000000}, {"pattern", "^(a|bb|ccc)+$"}});
  expect_schema({{"type", "array"}, {"items", {{"multipleOf", 99991}, {"type", "integer"}}}, {"minItems", 30000}});
}

// Few definitions, each of which refers to the next several times: paths without number. Of calls in Gemma's syntax,
// too, whose schemas are judged before they are compiled.
TEST_F(HostileSchemas, DefinitionsThatReferToEachOther) {
  Json defs = {{"d15", {{"type", "boolean"}}}};
  for (int n = 0; n < 15; ++n)
    defs[cat("d", n)] = {{"anyOf", Json(std::vector<Json>(10, {{"$ref", cat("#/$defs/d", n + 1)}}))}};
  const Json schema = {{"type", "object"}, {"properties", {{"a", {{"$ref", "#/$defs/d0"}}}}}, {"$defs", defs}};
  expect_schema(schema);
  const std::vector<CallableTool> tools = {{"f", schema.dump()}};
  kvasir::expect_bounded("can_hold", [&] { EXPECT_TRUE(can_hold(ToolFormat::gemma, tools)); });
  expect_bounded(Kind::tool_calls, calls_grammar(ToolFormat::gemma, tools, "", HowMany::one).text);
}

}  // namespace
}  // namespace kvasir::text
