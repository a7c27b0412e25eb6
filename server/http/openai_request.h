// OpenAI's request bodies, read field by field into what every protocol becomes. Types and shapes are judged
// here, values in server/generate.h.
#pragma once

#include <string>
#include <vector>

#include "server/generate.h"
#include "server/http/openai_reply.h"
#include "server/http/tool_use.h"
#include "server/options.h"

namespace kvasir::server::http {

struct OpenAiCall {
  GenerateInput input;               // of each prompt; its `prompt` is filled from `prompts`
  std::vector<PromptInput> prompts;  // one engine request each; chat has one
  ReplyShape shape;                  // chat, stream, logprobs, choices; the handler adds names and ids
  bool echo = false;                 // completions: the prompt stands in front
  ToolUse tools;
};

Result<OpenAiCall> parse_chat(std::string_view body, const ServerOptions& limits);
Result<OpenAiCall> parse_completion(std::string_view body, const ServerOptions& limits);

}  // namespace kvasir::server::http
