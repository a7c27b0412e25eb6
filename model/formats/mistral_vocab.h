// Mistral's own files of a vocabulary, and SentencePiece's, for folders that have no tokenizer.json.
#pragma once

#include <string>
#include <string_view>

#include "core/status.h"
#include "model/text/text.h"

namespace kvasir::model {

// Of a tokenizer: "v7m1" is 7; 0: it is no version.
int version_number(std::string_view version);

// tekken.json as the tokenizer.json that says the same: byte-level BPE whose merges are all ways to make a token of two
// others, in the order of the tokens they make.
struct Tekken {
  std::string tokenizer_json;
  int version = 0;      // of the chats that it is for (text/mistral_template.h); 0: it does not say
  bool thinks = false;  // it has tokens for the model's thoughts
};
Result<Tekken> read_tekken(std::string_view text, const std::string& name);

// SentencePiece's tokenizer.model of BPE or unigrams, as a GGUF file has it. Other kinds are refused with what to put
// there.
Result<text::GgufVocab> vocab_from_sentencepiece(std::string_view bytes, const std::string& name);

}  // namespace kvasir::model
