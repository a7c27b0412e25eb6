// OpenAI's /v1/responses: its body, read field by field into what every protocol becomes.
#pragma once

#include <string>
#include <string_view>

#include "server/generate.h"
#include "server/http/fields.h"
#include "server/http/tool_use.h"

namespace kvasir::server::http {

struct ResponsesCall {
  GenerateInput input;  // without its prompt, which begins with what is kept under `previous`
  ToolUse tools;
  bool stream = false, store = false, background = false;
  bool messages = false;                   // enable_response_messages
  bool timings = false, progress = false;  // llama-server's
  std::string previous;                    // previous_response_id
  Json instructions;                       // null: none
  Json items;                              // of `input`, as items
  ChatInput chat;                          // all but its messages
  Json echoed;                             // fields of the request that an answer shows again
};

Result<ResponsesCall> parse_responses(std::string_view body, const ServerOptions& limits);

// Items of an input, or of an answer, as messages that templates know, behind those that are there.
Status append_items(const Json& items, Json& messages);

}  // namespace kvasir::server::http
