// Calls and their results for a chat template that has no place for them: in the words in which the model was told to
// call (described_tools.h), so that it sees what it did, and its prompt begins as the one before did.
#pragma once

#include "model/text/text.h"
#include "server/generate.h"

namespace kvasir::server {

// The chat as it is where the template writes calls, or knows who a tool is.
ChatInput with_calls_written(ChatInput chat, const text::ChatTemplate& chat_template);

}  // namespace kvasir::server
