// The fields only chat has: messages, tools, tool_choice, response_format; and the grammars both have.
#pragma once

#include "server/http/fields.h"
#include "server/http/openai_request.h"

namespace kvasir::server::http {

void read_ending(Fields& f, ChatInput& chat);  // how the prompt of a chat ends
void read_chat(Fields& f, const ServerOptions& limits, OpenAiCall& call);
void read_grammar(Fields& f, text::GrammarSpec& grammar);  // response_format and guided_*

}  // namespace kvasir::server::http
