// The fields only chat has: messages, tools, tool_choice, response_format; and the grammars both have.
#pragma once

#include "server/http/fields.h"
#include "server/http/openai_request.h"

namespace kvasir::server::http {

// What the template is given besides messages and tools, and how the prompt ends.
void read_template_input(Fields& f, ChatInput& chat);
// The names and parameter schemas of OpenAI's `tools`.
Status check_tools(const Json& tools, const ServerOptions& limits);
void read_chat(Fields& f, const ServerOptions& limits, OpenAiCall& call);
// The same of several conversations, which have no tools.
void read_chats(Fields& f, const ServerOptions& limits, OpenAiCall& call);
void read_grammar(Fields& f, text::GrammarSpec& grammar);  // response_format and guided_*

}  // namespace kvasir::server::http
