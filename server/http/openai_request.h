// OpenAI's request bodies, read field by field into what every protocol becomes. Types and shapes are judged
// here, values in server/generate.h.
#pragma once

#include <string>
#include <vector>

#include "server/generate.h"
#include "server/http/fields.h"
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

// A string, a list of strings, token ids, or a list of those.
void read_prompts(Fields& f, const char* name, int most_prompts, std::vector<PromptInput>& out);
// What a client says of itself.
void read_said(Fields& f, GenerateInput::Said& said);

Result<OpenAiCall> parse_chat(std::string_view body, const ServerOptions& limits);
Result<OpenAiCall> parse_completion(std::string_view body, const ServerOptions& limits);

}  // namespace kvasir::server::http
