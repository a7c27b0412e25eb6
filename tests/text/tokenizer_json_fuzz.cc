// tokenizer.json is a file from anywhere: it is refused, or it encodes and decodes.
#include "core/check.h"
#include "model/text/text.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvasir::text;
  auto t = Tokenizer::from_json({reinterpret_cast<const char*>(data), size});
  if (!t.ok()) return 0;
  auto ids = (*t)->encode("Hello, wörld 123 <|im_end|>\n", true, true);
  if (ids.ok()) (void)(*t)->decode(*ids, true);
  return 0;
}
