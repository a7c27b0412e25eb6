// Small vocabularies made in code: every byte, a few merges, the special tokens of ChatML.
#pragma once

#include <cstdio>

#include "model/text/text.h"

namespace kvasir::text {

inline std::string byte_level(std::string_view bytes) {  // as GPT-2 writes bytes in a vocabulary
  std::string out;
  for (const char ch : bytes) {
    const int b = static_cast<unsigned char>(ch);
    int code = b;
    if (b < 33) {
      code = 0x100 + b;
    } else if (b >= 127 && b <= 160) {
      code = 0x121 + (b - 127);
    } else if (b == 173) {
      code = 0x143;
    }
    if (code < 0x80) {
      out.push_back(static_cast<char>(code));
    } else {
      out.push_back(static_cast<char>(0xC0 | code >> 6));
      out.push_back(static_cast<char>(0x80 | (code & 0x3F)));
    }
  }
  return out;
}

inline GgufVocab small_byte_level_vocab() {
  GgufVocab v;
  v.model = "gpt2";
  v.pre = "gpt2";
  auto add = [&v](std::string text, int type) {
    v.tokens.push_back(std::move(text));
    v.types.push_back(type);
    return static_cast<int32_t>(v.tokens.size() - 1);
  };
  add("<|endoftext|>", 3);
  v.bos = add("<|im_start|>", 3);
  v.eos = add("<|im_end|>", 3);
  for (int b = 0; b < 256; ++b) add(byte_level(std::string(1, static_cast<char>(b))), 1);
  auto merge = [&](std::string_view a, std::string_view b) {
    v.merges.push_back(byte_level(a) + " " + byte_level(b));
    add(byte_level(std::string(a) + std::string(b)), 1);
  };
  merge("h", "e");
  merge("l", "l");
  merge("he", "ll");
  merge("hell", "o");
  merge(" ", "w");
  merge("\xC3", "\xA9");
  add("<think>", 4);
  return v;
}

inline GgufVocab small_spm_vocab() {
  GgufVocab v;
  v.model = "llama";
  auto add = [&v](std::string text, int type) {
    v.tokens.push_back(std::move(text));
    v.types.push_back(type);
    v.scores.push_back(-static_cast<float>(v.tokens.size()));
    return static_cast<int32_t>(v.tokens.size() - 1);
  };
  v.unk = add("<unk>", 2);
  v.bos = add("<s>", 3);
  v.eos = add("</s>", 3);
  for (int b = 0; b < 256; ++b) {
    char name[8];
    std::snprintf(name, sizeof name, "<0x%02X>", b);
    add(name, 6);
  }
  for (const char* piece :
       {"\u2581h", "el", "lo", "\u2581hel", "\u2581hello", "\u2581w", "or", "\u2581wor", "ld", "\u2581", "h",
        "e",       "l",  "o",  "w",         "r",           "d",       "<",  "s",         ">",  "/"}) {
    add(piece, 1);
  }
  v.add_bos = true;
  return v;
}

}  // namespace kvasir::text
