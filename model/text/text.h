// Text in and out of token ids. Everything here may fail and never aborts: the Rust library behind it
// unwinds, and a panic comes back as Status::internal.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace kvasir::text {

class Tokenizer;
using TokenizerPtr = std::shared_ptr<const Tokenizer>;
class StopExpressions;

// What a GGUF file says of its vocabulary; model/formats fills it, so that text knows no file format.
struct GgufVocab {
  std::string model;  // tokenizer.ggml.model: "gpt2" (byte-level BPE), "llama" (SentencePiece), "t5" (its unigrams); or
                      // "sentencepiece", unigrams that are read as SentencePiece itself reads them
  std::string pre;    // tokenizer.ggml.pre: "smollm", "llama-bpe", "qwen2", ...
  std::vector<std::string> tokens;
  std::vector<float> scores;
  std::vector<int32_t> types;  // 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte
  std::vector<std::string> merges;
  int32_t bos = -1, eos = -1, unk = -1, eot = -1, pad = -1;
  bool add_bos = false, add_eos = false, add_space_prefix = true, remove_extra_spaces = false;
  std::vector<uint8_t> charsmap;  // SentencePiece's own table of characters to replace (unigrams); empty: none are
  std::string chat_template;
};

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  // `more_ends`: tokens that end an answer beside those the files name.
  static Result<TokenizerPtr> from_json(std::string_view tokenizer_json, std::string_view tokenizer_config_json = "",
                                        std::span<const int32_t> more_ends = {});
  static Result<TokenizerPtr> from_gguf(const GgufVocab& vocab);

  virtual int32_t vocab_size() const = 0;
  // parse_special: text such as <|im_end|> becomes its token (never for what a client calls plain text).
  virtual Result<std::vector<int32_t>> encode(std::string_view text, bool add_bos, bool parse_special) const = 0;
  virtual Result<std::string> decode(std::span<const int32_t> ids, bool skip_special) const = 0;
  virtual std::string token_text(int32_t id) const = 0;   // one token as it stands in the vocabulary
  virtual std::string token_bytes(int32_t id) const = 0;  // the bytes it adds to a text
  virtual bool is_special(int32_t id) const = 0;
  virtual int32_t token_id(std::string_view text) const = 0;  // -1: none
  virtual int32_t bos() const = 0;
  virtual const std::vector<int32_t>& end_of_generation() const = 0;  // eos, eot, eom ...
  virtual const std::string& chat_template() const = 0;
  // tokenizer_config.json as it came; empty: there was none.
  virtual const std::string& config_json() const {
    static const std::string none;
    return none;
  }
  // The whole as a tokenizer.json, for those who tokenize elsewhere.
  virtual Result<std::string> to_json() const { return unimplemented("this tokenizer has no tokenizer.json"); }
};

// Incremental detokenization: never cuts a UTF-8 character, never emits a wrong space; holds back what
// might become a stop string.
class Detokenizer {
 public:
  // `own_text`: tokens begin a text instead of going on with one, so the space that SentencePiece puts in front of a
  // text's first word is not shown. `expressions`: what they match ends the text, and stays in it; may be null.
  Detokenizer(TokenizerPtr tokenizer, bool skip_special, std::vector<std::string> stop_strings = {},
              bool include_stop = false, bool own_text = false,
              const std::shared_ptr<const StopExpressions>& expressions = nullptr);
  ~Detokenizer();
  Detokenizer(Detokenizer&&) noexcept;
  Detokenizer& operator=(Detokenizer&&) noexcept;

  struct Piece {
    std::string text;      // ready to be sent
    bool stopped = false;  // a stop string is complete, or an expression matches; nothing more will come
    std::string stop;      // which
  };
  Piece push(int32_t token);
  Piece finish();  // what was held back

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A chat template (minijinja, with fuel). messages and tools are JSON as OpenAI has them.
class ChatTemplate {
 public:
  virtual ~ChatTemplate() = default;
  static Result<std::shared_ptr<const ChatTemplate>> compile(std::string_view source, const Tokenizer& tokenizer);
  // `extra_json`: more template variables (enable_thinking, documents, ...), an object or empty.
  virtual Result<std::string> render(std::string_view messages_json, std::string_view tools_json,
                                     bool add_generation_prompt, std::string_view extra_json = "") const = 0;
  virtual const std::string& source() const = 0;
};

// Grammars as token masks (llguidance). compile() may be slow and has limits: call it off the step thread.
struct GrammarSpec {
  enum class Kind { none, json_object, json_schema, regex, lark, choice, tool_calls, structural_tag } kind = Kind::none;
  // Schema, regex, grammar or structural tag; lark: GBNF, too, where rules have ::=; tool_calls: see calls_grammar.
  std::string text;
  std::vector<std::string> choices;
};

class Matcher {  // one a sequence
 public:
  virtual ~Matcher() = default;
  virtual Status mask(std::span<uint32_t> bits) = 0;  // bit t set = token t allowed
  virtual Status consume(int32_t token) = 0;
  virtual bool finished() const = 0;  // only end of generation may follow
  // What must come next, as the tokenizer cuts that text: a guess, where it may be cut otherwise. Empty: there is a
  // choice.
  virtual Result<std::vector<int32_t>> forced() { return std::vector<int32_t>(); }
  // Whatever comes from here on is allowed: it need be asked and told no more.
  virtual bool indifferent() const { return false; }
  virtual std::unique_ptr<Matcher> clone() const = 0;
};

class GrammarCompiler {
 public:
  virtual ~GrammarCompiler() = default;
  static Result<std::shared_ptr<GrammarCompiler>> create(TokenizerPtr tokenizer);
  virtual Result<std::unique_ptr<Matcher>> compile(const GrammarSpec& spec) = 0;  // cached; thread-safe
};

}  // namespace kvasir::text
