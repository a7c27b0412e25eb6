// Ollama's request bodies, read field by field into what every protocol becomes.
#pragma once

#include <string_view>

#include "server/generate.h"
#include "server/http/pooled_reply.h"
#include "server/http/tool_use.h"

namespace kvasir::server::http {

struct OllamaCall {
  GenerateInput input;
  ToolUse tools;
  bool stream = true;
  bool chat = false;
  bool raw = false;      // the text as it is: no template, and no thoughts to tell apart
  bool nothing = false;  // no prompt, by which clients ask for the model to be loaded
};

Result<OllamaCall> parse_ollama_chat(std::string_view body, const ServerOptions& limits);
// `tokenizer` may be null; a model without a template reads the text as it is.
Result<OllamaCall> parse_ollama_generate(std::string_view body, const ServerOptions& limits,
                                         const text::Tokenizer* tokenizer, bool has_template);
// /api/embed, and the older /api/embeddings of one prompt.
Result<PooledCall> parse_ollama_embed(std::string_view body, const ServerOptions& limits);
Result<PooledCall> parse_ollama_embeddings(std::string_view body, const ServerOptions& limits);
// "model" or "name", as /api/show has it.
Result<std::string> parse_ollama_name(std::string_view body);

}  // namespace kvasir::server::http
