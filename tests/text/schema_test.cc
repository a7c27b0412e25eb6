// Random JSON schemas, random walks under their masks: whatever ends must be valid.
#include <gtest/gtest.h>
#include <time.h>

#include <algorithm>
#include <fstream>
#include <iostream>
#include <random>

#include "tests/text/schema_check.h"
#include "tests/text/small_vocab.h"
#include "tests/text/smollm2.h"

namespace kvasir::text {
namespace {

constexpr int kSchemas = 500, kMaxTokens = 400;

class Generator {
 public:
  explicit Generator(unsigned seed) : random_(seed) {}

  Json root() {
    Json schema = object(3);
    schema["$defs"]["leaf"] = scalar();
    return schema;
  }
  size_t below(size_t n) { return random_() % n; }
  bool chance(int percent) { return below(100) < static_cast<size_t>(percent); }

 private:
  Json any(int depth) {
    switch (below(depth > 0 ? 8 : 4)) {
      case 0: return {{"enum", {"red", 7, nullptr, true, "gr\u00fcn \"x\""}}};
      case 1: return {{"const", chance(50) ? Json("fixed") : Json{{"a", {1, 2}}}}};
      case 2: return {{"$ref", "#/$defs/leaf"}};
      case 4: return object(depth - 1);
      case 5: return array(depth - 1);
      case 6: return {{"anyOf", {any(depth - 1), {{"type", "null"}}, any(0)}}};
      default: return scalar();
    }
  }
  Json scalar() {
    switch (below(7)) {
      case 0: return {{"type", "boolean"}};
      case 1: return {{"type", "null"}};
      case 2: {
        const int low = static_cast<int>(below(2000)) - 1000;
        return {{"type", "integer"}, {"minimum", low}, {"maximum", low + static_cast<int>(below(500))}};
      }
      case 3: return {{"type", "number"}, {"minimum", -1.5}, {"maximum", 1000}};
      case 4: return {{"type", "string"}, {"pattern", "^[A-Z]{2}-[0-9]{1,4}$"}};
      case 5: return {{"type", {"string", "integer"}}, {"maxLength", 8}};
      default: {
        const size_t low = below(5);
        return {{"type", "string"}, {"minLength", low}, {"maxLength", low + below(30)}, {"description", "text"}};
      }
    }
  }
  Json array(int depth) {
    const size_t low = below(3);
    Json schema = {{"type", "array"}, {"items", any(depth)}, {"minItems", low}, {"maxItems", low + below(3)}};
    if (chance(25)) {
      schema["prefixItems"] = {scalar(), any(0)};
      schema["minItems"] = 2;
      schema["maxItems"] = 4;
    }
    return schema;
  }
  Json object(int depth) {
    static const char* names[] = {"name", "id", "a b", "\u00e9t\u00e9", "x\"y", "tags", "next", "1"};
    Json schema = {{"type", "object"}, {"properties", Json::object()}, {"required", Json::array()}};
    for (size_t i = 0, n = 1 + below(4); i < n; ++i) {
      const std::string name = names[below(std::size(names))];
      schema["properties"][name] = any(depth);
    }
    for (const auto& [name, sub] : schema["properties"].items()) {
      if (chance(60)) schema["required"].push_back(name);
    }
    schema["additionalProperties"] = chance(85) ? Json(false) : scalar();
    return schema;
  }

  std::mt19937 random_;
};

double thread_seconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

void walk_all(const TokenizerPtr& t) {
  auto compiler = *GrammarCompiler::create(t);
  std::vector<uint32_t> bits((t->vocab_size() + 31) / 32);
  std::vector<int32_t> allowed, closing;
  std::vector<double> mask_seconds;
  double compile_seconds = 0;
  int ended = 0, cut = 0;
  std::mt19937 random(42);
  const char* dump = std::getenv("KVASIR_DUMP_SCHEMAS");  // pairs for an outside validator
  std::ofstream pairs(dump ? dump : "/dev/null");

  for (int i = 0; i < kSchemas; ++i) {
    const Json schema = Generator(static_cast<unsigned>(i)).root();
    const double before = thread_seconds();
    auto made = compiler->compile({GrammarSpec::Kind::json_schema, schema.dump(), {}});
    compile_seconds += thread_seconds() - before;
    ASSERT_TRUE(made.ok()) << schema.dump() << "\n" << made.status().to_string();
    Matcher& m = **made;
    std::string text;
    int n = 0;
    for (; n < kMaxTokens && !m.finished(); ++n) {
      const double start = thread_seconds();
      ASSERT_TRUE(m.mask(bits).ok());
      mask_seconds.push_back(thread_seconds() - start);
      allowed.clear();
      closing.clear();
      for (int32_t id = 0; id < t->vocab_size(); ++id) {
        if (!(bits[id / 32] >> (id % 32) & 1)) continue;
        allowed.push_back(id);
        const std::string b = t->token_bytes(id);
        if (b == "\"" || b == "}" || b == "]" || b == "\"}" || t->is_special(id)) closing.push_back(id);
      }
      ASSERT_FALSE(allowed.empty()) << schema.dump() << "\n" << text;
      const bool close = !closing.empty() && random() % 3 == 0;
      const int32_t id = close ? closing[random() % closing.size()] : allowed[random() % allowed.size()];
      ASSERT_TRUE(m.consume(id).ok()) << schema.dump() << "\n" << text << "|" << t->token_text(id);
      if (!t->is_special(id)) text += t->token_bytes(id);
    }
    if (!m.finished()) {
      ++cut;
      continue;
    }
    ++ended;
    const Json value = Json::parse(text, nullptr, false);
    ASSERT_FALSE(value.is_discarded()) << schema.dump() << "\n" << text;
    EXPECT_TRUE(valid(schema, value, schema)) << schema.dump() << "\n" << text;
    if (dump) pairs << Json{{"schema", schema}, {"text", text}}.dump() << "\n";
  }
  std::sort(mask_seconds.begin(), mask_seconds.end());
  const auto at = [&](double q) { return mask_seconds[static_cast<size_t>(q * (mask_seconds.size() - 1))] * 1e6; };
  std::cout << ended << " texts valid, " << cut << " cut by length; compile " << compile_seconds / kSchemas * 1e3
            << " ms a schema; mask p50 " << at(0.5) << " us, p99 " << at(0.99) << " us, max " << at(1) << " us of "
            << mask_seconds.size() << "\n";
  EXPECT_GE(ended, kSchemas * 9 / 10);
  EXPECT_LT(at(0.5), 1000);
}

TEST(Schemas, WhateverEndsIsValidInTheDefaultModelsTokens) {
  Result<TokenizerPtr> t = smollm2();
  if (!t.ok()) GTEST_SKIP() << "the SmolLM2 model is not downloaded (./test fetches it)";
  walk_all(*t);
}

TEST(Schemas, WhateverEndsIsValidByteByByte) { walk_all(*Tokenizer::from_gguf(small_byte_level_vocab())); }

}  // namespace
}  // namespace kvasir::text
