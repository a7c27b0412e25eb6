// JSON schemas of a few bytes whose automata are as large as a product.
#include <nlohmann/json.hpp>

#include "core/cat.h"
#include "tests/hostile/follow.h"

namespace kvasir::text {
namespace {

using Json = nlohmann::json;

class HostileSchemas : public Follow {
 protected:
  void expect_schema(const Json& schema) {
    expect_bounded(Kind::json_schema, schema.dump());
    expect_bounded(Kind::json_schema, Json{{"type", "object"}, {"properties", {{"a", schema}}}}.dump());
    const Json tools = {{"form", "hermes"},
                        {"tools", {{{"name", "f"}, {"parameters", {{"properties", {{"a", schema}}}}}}}}};
    expect_bounded(Kind::tool_calls, tools.dump());
    const Json tag = {{"type", "structural_tag"}, {"format", {{"type", "json_schema"}, {"json_schema", schema}}}};
    expect_bounded(Kind::structural_tag, tag.dump());
  }
};

TEST_F(HostileSchemas, MultiplesOfLargeNumbers) {
  expect_schema({{"type", "integer"}, {"multipleOf", 9999991}});
  expect_schema({{"type", "number"}, {"multipleOf", 0.0009999991}});
  expect_schema({{"type", "integer"}, {"multipleOf", 9999991}, {"minimum", -1e9}, {"maximum", 1e15}});
}

TEST_F(HostileSchemas, MultiplesOfSeveral) {
  Json all = Json::array();
  for (int n : {991, 997, 1009, 1013}) all.push_back({{"type", "integer"}, {"multipleOf", n}});
  expect_schema({{"allOf", all}});
  for (Json& one : all) one["multipleOf"] = one["multipleOf"].get<double>() / 1000;
  for (Json& one : all) one["type"] = "number";
  expect_schema({{"allOf", all}});
}

TEST_F(HostileSchemas, PatternsThatMustAllMatch) {
  Json all = Json::array();
  for (int n = 5; n < 12; ++n)
    all.push_back({{"type", "string"}, {"pattern", cat("^(.*[a-", char('l' + n), "]){", n * 7, "}.*$")}});
  expect_schema({{"allOf", all}});
  Json late = Json::array();  // harmless until 64 characters are there
  for (int n = 5; n < 12; ++n)
    late.push_back({{"type", "string"}, {"pattern", cat("^(x|a{64}(.*[a-", char('l' + n), "]){", n * 7, "}.*)$")}});
  expect_schema({{"allOf", late}});
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

}  // namespace
}  // namespace kvasir::text
