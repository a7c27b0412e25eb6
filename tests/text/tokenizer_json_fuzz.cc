// tokenizer.json is a file from anywhere: it is refused, or it encodes and decodes.
#include "core/check.h"
#include "model/text/text.h"
#include "tests/fuzz/seeds.h"

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  kvasir::write_seeds(
      *argc, *argv,
      {R"({"version":"1.0","truncation":null,"padding":null,"added_tokens":[{"id":0,"content":"<|im_end|>","single_word":false,
"lstrip":false,"rstrip":true,"normalized":false,"special":true}],"normalizer":{"type":"NFC"},"pre_tokenizer":{"type":
"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":"\\p{N}{1,3}| ?\\p{L}+"},"behavior":"Isolated","invert":false},
{"type":"Digits","individual_digits":true},{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}]},
"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<|im_end|>","type_id":0}},{"Sequence":{"id":"A",
"type_id":0}}],"pair":[],"special_tokens":{"<|im_end|>":{"id":"<|im_end|>","ids":[0],"tokens":["<|im_end|>"]}}},"decoder":
{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true},"model":{"type":"BPE","dropout":null,"unk_token":
null,"continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,"ignore_merges":true,
"vocab":{"<|im_end|>":0,"H":1,"e":2,"l":3,"o":4,"He":5,"ll":6,"Hell":7},"merges":[["H","e"],["l","l"],["He","ll"]]}})",
       R"({"version":"1.0","added_tokens":[],"normalizer":{"type":"Sequence","normalizers":[{"type":"Prepend","prepend":"\u2581"},
{"type":"Replace","pattern":{"String":" "},"content":"\u2581"},{"type":"Lowercase"}]},"pre_tokenizer":{"type":"Metaspace",
"replacement":"\u2581","prepend_scheme":"first","split":true},"post_processor":null,"decoder":{"type":"Sequence","decoders":[
{"type":"Replace","pattern":{"String":"\u2581"},"content":" "},{"type":"ByteFallback"},{"type":"Fuse"},{"type":"Strip",
"content":" ","start":1,"stop":0}]},"model":{"type":"Unigram","unk_id":0,"byte_fallback":true,"vocab":[["<unk>",0.0],
["\u2581hello",-1.5],["h",-3.0],["<0x41>",-9.0]]}})",
       R"({"version":"1.0","added_tokens":[],"normalizer":{"type":"BertNormalizer","clean_text":true,"handle_chinese_chars":true,
"strip_accents":null,"lowercase":true},"pre_tokenizer":{"type":"BertPreTokenizer"},"post_processor":{"type":"BertProcessing",
"sep":["[SEP]",1],"cls":["[CLS]",0]},"decoder":{"type":"WordPiece","prefix":"##","cleanup":true},"model":{"type":"WordPiece",
"unk_token":"[UNK]","continuing_subword_prefix":"##","max_input_chars_per_word":100,"vocab":{"[CLS]":0,"[SEP]":1,"[UNK]":2,
"hel":3,"##lo":4}}})",
       R"({"version":"1.0","added_tokens":[],"pre_tokenizer":{"type":"WhitespaceSplit"},"model":{"type":"WordLevel","vocab":
{"Hello,":0,"[UNK]":1},"unk_token":"[UNK]"}})"});
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvasir::text;
  auto t = Tokenizer::from_json({reinterpret_cast<const char*>(data), size});
  if (!t.ok()) return 0;
  auto ids = (*t)->encode("Hello, wörld 123 <|im_end|>\n", true, true);
  if (ids.ok()) (void)(*t)->decode(*ids, true);
  return 0;
}
