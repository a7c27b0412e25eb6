// Calls and their results for a chat template without fields for them: written as text in the form in which the model
// was told to call (described_tools.h). So it sees its earlier calls, and the prompt begins with the whole prompt of
// the turn before.
#pragma once

#include "model/text/text.h"
#include "server/generate.h"

namespace kvasir::server {

// The chat as it is where the template writes calls, or knows who a tool is.
ChatInput with_calls_written(ChatInput chat, const text::ChatTemplate& chat_template);

}  // namespace kvasir::server
