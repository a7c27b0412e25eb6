// The tokenizer of the default model, from its GGUF file; an error where the file was not downloaded.
#pragma once

#include <cstdlib>

#include "model/formats/gguf_model.h"

namespace kvasir::text {

inline Result<TokenizerPtr> smollm2() {
  const char* home = std::getenv("HOME");
  const std::string path = std::string(home ? home : "") + "/.cache/kvasir/models/SmolLM2-135M-Instruct.Q4_1.gguf";
  KVASIR_ASSIGN(const auto gguf, model::Gguf::open(path));
  KVASIR_ASSIGN(const GgufVocab vocab, model::gguf_vocab(*gguf));
  return Tokenizer::from_gguf(vocab);
}

}  // namespace kvasir::text
