// llama-server's /completion and /infill, read field by field into what every protocol becomes.
#pragma once

#include <string_view>
#include <vector>

#include "server/generate.h"
#include "server/http/llama_reply.h"

namespace kvasir::server::http {

struct LlamaCall {
  GenerateInput input;               // of each prompt; its `prompt` is filled from `prompts`
  std::vector<PromptInput> prompts;  // one engine request each
  LlamaShape shape;
};

// `tokenizer`, which may be null, reads the texts among the keys of logit_bias.
Result<LlamaCall> parse_llama(std::string_view body, const ServerOptions& limits, const text::Tokenizer* tokenizer);
Result<LlamaCall> parse_infill(std::string_view body, const ServerOptions& limits, const text::Tokenizer* tokenizer);

}  // namespace kvasir::server::http
