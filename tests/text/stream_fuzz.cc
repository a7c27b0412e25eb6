// Whatever bytes a model emits, in whatever pieces: text that comes out is UTF-8, is all there, and the
// tool parser loses none of it.
#include "core/check.h"
#include "model/text/tool_parser.h"
#include "model/text/utf8.h"
#include "tests/text/small_vocab.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvasir::text;
  static const TokenizerPtr tokenizer = *Tokenizer::from_gguf(small_byte_level_vocab());
  if (size < 2) return 0;
  const std::string stop(reinterpret_cast<const char*>(data + 2), std::min<size_t>(data[0] % 4, size - 2));
  const ToolFormat format = static_cast<ToolFormat>(data[1] % (int(ToolFormat::olmo) + 1));

  std::vector<int32_t> ids;
  std::string bytes;
  for (size_t i = 2; i < size; ++i) {
    ids.push_back(3 + data[i]);  // the token of that byte
    bytes.push_back(static_cast<char>(data[i]));
  }
  Detokenizer detokenizer(tokenizer, true, {stop});
  ToolParser parser(format);
  std::string text, content;
  bool stopped = false;
  auto take = [&](const Detokenizer::Piece& piece) {
    text += piece.text;
    stopped |= piece.stopped;
    content += parser.push(piece.text).content;
  };
  for (const int32_t id : ids) take(detokenizer.push(id));
  take(detokenizer.finish());
  content += parser.finish().content;

  std::string whole, again;
  append_utf8(bytes, true, whole);
  KVASIR_CHECK(append_utf8(text, true, again) == 0 && again == text, "text is UTF-8");
  KVASIR_CHECK(whole.compare(0, text.size(), text) == 0, "text is a beginning of the whole");
  KVASIR_CHECK(stopped || text == whole, "nothing is held for ever");
  KVASIR_CHECK(parser.calls() > 0 || content == text, "without calls, all text is content");
  return 0;
}
