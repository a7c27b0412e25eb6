// OpenAI's request bodies, read field by field into what every protocol becomes. Types and shapes are judged
// here, values in server/generate.h.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "server/generate.h"
#include "server/http/fields.h"
#include "server/http/openai_reply.h"
#include "server/http/tool_use.h"
#include "server/options.h"

namespace kvasir::server::http {

struct OpenAiCall {
  // So many of each prompt's tokens are read, and the others left out.
  struct Cut {
    int64_t tokens = 0;  // -1: as many as leave room for the answer
    bool first = false;  // those that it begins with, not those that it ends with
  };
  GenerateInput input;               // of each prompt; its `prompt` is filled from `prompts`
  std::vector<PromptInput> prompts;  // one engine request each; chat has one
  ReplyShape shape;                  // chat, stream, logprobs, choices; the handler adds names and ids
  bool echo = false;                 // completions: the prompt stands in front; chat: its last message
  std::vector<std::string> last;     // chat: the last message's text of each conversation, if it is the assistant's
  ToolUse tools;
  std::optional<Cut> cut;                // none: a prompt is read whole, and must fit
  std::optional<TokensInput> forwarded;  // of the one prompt, made of it elsewhere
};

// Leaves out of the prompts what `call.cut` says; they are then token ids. May take long.
Status cut_prompts(const Services& services, OpenAiCall& call);
// A string, a list of strings, token ids, or a list of those.
void read_prompts(Fields& f, const char* name, int most_prompts, std::vector<PromptInput>& out);
// What a client says of itself.
void read_said(Fields& f, GenerateInput::Said& said);

Result<OpenAiCall> parse_chat(std::string_view body, const ServerOptions& limits);
// vLLM's: `messages` is a list of conversations, each answered by a choice of its own.
Result<OpenAiCall> parse_chats(std::string_view body, const ServerOptions& limits);
Result<OpenAiCall> parse_completion(std::string_view body, const ServerOptions& limits);

}  // namespace kvasir::server::http
