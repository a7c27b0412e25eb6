// What every protocol's generation request becomes: an engine::Request, its prompt not yet in tokens, and what is
// said beside it. One place judges it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/status.h"
#include "engine/engine.h"
#include "server/options.h"

namespace kvasir::server {

struct TextInput {
  std::string text;
  bool add_special = true;    // the tokenizer's bos
  bool parse_special = true;  // "<|im_end|>" is its token
};
using TokensInput = std::vector<int64_t>;
// Texts and ids in turn, as some clients mix them, and as a gap to be filled is written.
struct PiecesInput {
  std::vector<std::variant<std::string, int64_t>> pieces;
  bool parse_special = true;  // of the texts
};
struct ChatInput {
  std::string messages_json, tools_json, variables_json;  // OpenAI's forms; the last two may be empty
  bool add_generation_prompt = true;
  bool continue_final_message = false;  // the last message stays open: what ends it in the template is cut off
};
using PromptInput = std::variant<TextInput, TokensInput, ChatInput, PiecesInput>;

// Who calls its parameters what: server/parameters.h.
enum class Wire : uint8_t {
  completions,
  chat,
  messages,
  responses,
  llama,
  ollama,
  sglang,
  v1,
  kserve,
  vllm,            // VllmEngine
  vllm_inference,  // vLLM's own server
  ppl,
  embeddings
};
struct Parameter;

struct GenerateInput {
  // What a client says of itself, for the request's line in the log and nothing else.
  struct Said {
    std::string user, metadata, cache_key;
  };
  const char* protocol = "";  // "openai.chat", "kvasir.v1": for the log and the metrics
  Wire wire = Wire::v1;
  std::string model;  // empty: the one that is served
  PromptInput prompt;
  std::optional<PromptInput> prediction;  // of the answer
  engine::Request request;
  Said said;
  bool draw_seed = true;           // the client gave none
  int64_t choices_of_call = 0;     // all the choices of the call this is part of; 0: n
  int64_t default_max_tokens = 0;  // where none is set, as far as the context allows; 0: up to the context
  // Values of the client's that no member of `request` can hold, so that one place judges them; empty: a list without
  // entries where that is not the same as none.
  std::vector<std::pair<const Parameter*, std::optional<int64_t>>> unfit;
  // Parameters under another of their names than the protocol's usual one.
  std::vector<std::pair<const Parameter*, const char*>> names;
};

// Everything that can be said without a tokenizer.
Status check_fields(const GenerateInput& input, const ServerOptions& limits, const model::ModelInfo& info);

// A chat as its template writes it. May take long.
Result<std::string> prompt_text(const ChatInput& chat, const engine::Engine& engine);

// The prompt's token ids. May take long: call it on a worker. A text of more than `max_bytes` cannot fit the
// context whatever its tokens are, and is refused unread.
Result<std::vector<int32_t>> encode_prompt(const PromptInput& prompt, const engine::Engine& engine, size_t max_bytes);

// The tokens of each, as a text begins with it and as one goes on with it behind a blank. May take long, too.
Result<std::vector<std::vector<int32_t>>> encode_bad_words(const std::vector<std::string>& words,
                                                           const engine::Engine& engine);

// Whether prompt and max_tokens fit the context.
Status check_length(const GenerateInput& input, size_t prompt_tokens, const model::ModelInfo& info);

// Whether that is what a request was refused for: its prompt, or prompt and answer, are longer than the context.
bool over_context(const Status& refusal);

// What such a refusal says: tokens of the prompt, where they were counted (0: not), and of the context.
struct ContextUse {
  int64_t prompt = 0, context = 0;
};
ContextUse context_use(std::string_view refusal);

// "bytes are not UTF-8 from position 17" for the named field.
Status check_utf8(std::string_view text, const std::string& field);

}  // namespace kvasir::server
