// Tools for a chat template that has no place for them: the system message describes them.
#pragma once

#include "model/text/text.h"
#include "server/generate.h"

namespace kvasir::server {

// The chat as it is where the template asks for `tools` itself.
ChatInput with_tools_described(ChatInput chat, const text::ChatTemplate& chat_template);

}  // namespace kvasir::server
