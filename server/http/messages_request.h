// Anthropic's request body, read field by field into what every protocol becomes.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "server/generate.h"
#include "server/http/tool_use.h"

namespace kvasir::server::http {

struct MessagesCall {
  GenerateInput input;
  ToolUse tools;
  bool stream = false;
  std::optional<int64_t> thinking_budget;  // Anthropic's own, of no meaning to a model that does not think
};

// `counting`: /v1/messages/count_tokens, which has no max_tokens.
Result<MessagesCall> parse_messages(std::string_view body, const ServerOptions& limits, bool counting);

}  // namespace kvasir::server::http
