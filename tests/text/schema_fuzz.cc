// A client's schema, regex, Lark grammar or structural tag: refused, or its masks come.
#include "tests/fuzz/seeds.h"
#include "tests/text/small_vocab.h"

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  // The first byte chooses the kind of grammar.
  kvasir::write_seeds(
      *argc, *argv,
      {R"(B{"type":"object","properties":{"a":{"type":"integer","minimum":1,"maximum":99},"b":{"enum":["x",null,2]},"c":{"type":
"array","items":{"$ref":"#/$defs/d"},"minItems":1,"maxItems":3}},"required":["a"],"additionalProperties":false,"$defs":{"d":
{"anyOf":[{"type":"string","pattern":"^[a-c]{2,4}$"},{"type":"string","format":"date-time"},{"const":true}]}}})",
       R"(@(foo|ba[rz])+[^\d]{2,3}\w*\s?(?i:end)$)",
       "Astart: \"a\" (b | c)* d?\nb: /[0-9]+/ \",\"\nc: \"x\"i ~ 2..3\nd: %json {\"type\":\"null\"}\n%ignore / +/",
       "\xf0{\"type\":\"structural_tag\",\"format\":{\"type\":\"triggered_tags\",\"triggers\":[\"<f\"],\"tags\":[{"
       "\"begin\":\"<f=a>\","
       "\"content\":{\"type\":\"json_schema\",\"json_schema\":{\"type\":\"object\"}},\"end\":\"</f>\"}]}}"});
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvasir::text;
  static const TokenizerPtr tokenizer = *Tokenizer::from_gguf(small_byte_level_vocab());
  static const std::shared_ptr<GrammarCompiler> compiler = *GrammarCompiler::create(tokenizer);
  if (size == 0) return 0;
  const auto kind =
      data[0] >= 128 ? GrammarSpec::Kind::structural_tag : static_cast<GrammarSpec::Kind>(2 + data[0] % 3);
  auto made = compiler->compile({kind, std::string(reinterpret_cast<const char*>(data + 1), size - 1), {}});
  if (!made.ok()) return 0;
  std::vector<uint32_t> bits((tokenizer->vocab_size() + 31) / 32);
  for (int i = 0; i < 8 && !(*made)->finished(); ++i) {
    if (!(*made)->mask(bits).ok()) break;
    int32_t next = 0;
    while (next < tokenizer->vocab_size() && !(bits[next / 32] >> (next % 32) & 1)) ++next;
    if (next == tokenizer->vocab_size() || !(*made)->consume(next).ok()) break;
  }
  return 0;
}
