// What every protocol's generation request becomes before it is an engine::Request: the same fields under
// one set of names, with room for values that are wrong, so that one place judges them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
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
struct ChatInput {
  std::string messages_json, tools_json, variables_json;  // OpenAI's forms; the last two may be empty
  bool add_generation_prompt = true;
  bool continue_final_message = false;  // the last message stays open: what ends it in the template is cut off
};
using PromptInput = std::variant<TextInput, TokensInput, ChatInput>;

struct GenerateInput {
  // What a client says of itself, for the request's line in the log and nothing else.
  struct Said {
    std::string user, metadata, cache_key;
  };
  const char* protocol = "";  // "openai.chat", "kvasir.v1": for the log and the metrics
  std::string model;          // empty: the one that is served
  PromptInput prompt;
  // Everything that is not below is taken from here as it is, and checked.
  engine::Request request;
  Said said;
  std::optional<uint64_t> seed;  // unset: one is drawn
  int64_t n = 1;
  int64_t choices_of_call = 0;  // all the choices of the call this is part of; 0: n
  std::optional<int64_t> max_tokens;
  int64_t default_max_tokens = 0;               // where none is set, as far as the context allows; 0: up to the context
  int64_t logprobs = -1, prompt_logprobs = -1;  // -1: none
  std::vector<int64_t> stop_tokens;
  std::vector<std::pair<int64_t, float>> logit_bias;
  std::optional<std::vector<int64_t>> allowed_tokens;  // unset: all
  // What this protocol calls the fields whose names differ.
  const char* max_tokens_field = "max_tokens";
  const char* stop_tokens_field = "stop_token_ids";
  const char* logprobs_field = "logprobs";
};

// Everything that can be said without a tokenizer.
Status check_fields(const GenerateInput& input, const ServerOptions& limits, const model::ModelInfo& info);

// The prompt's token ids. May take long: call it on a worker. A text of more than `max_bytes` cannot fit the
// context whatever its tokens are, and is refused unread.
Result<std::vector<int32_t>> encode_prompt(const PromptInput& prompt, const engine::Engine& engine, size_t max_bytes);

// Whether prompt and max_tokens fit the context.
Status check_length(const GenerateInput& input, size_t prompt_tokens, const model::ModelInfo& info);

// Whether that is what a request was refused for: its prompt, or prompt and answer, are longer than the context.
bool over_context(const Status& refusal);

// "bytes are not UTF-8 from position 17" for the named field.
Status check_utf8(std::string_view text, const std::string& field);

}  // namespace kvasir::server
