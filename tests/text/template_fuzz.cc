// A chat template is any text, and so are the messages: a zero byte divides them.
#include "tests/text/small_vocab.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvasir::text;
  static const TokenizerPtr tokenizer = *Tokenizer::from_gguf(small_byte_level_vocab());
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t at = std::min(input.find('\0'), input.size());
  const std::string_view rest = at < input.size() ? input.substr(at + 1) : std::string_view();
  auto compiled = ChatTemplate::compile(input.substr(0, at), *tokenizer);
  if (!compiled.ok()) return 0;
  (void)(*compiled)->render(rest.empty() ? R"([{"role":"user","content":"hi"}])" : rest, "", true);
  return 0;
}
