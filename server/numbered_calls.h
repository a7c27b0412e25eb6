// The calls of a conversation for a template that writes each one's id: by their number in the conversation, so that a
// prompt is the same whatever ids a protocol made up. Kimi K2 expects the name, too (functions.NAME:0), and Mistral's
// templates ids of nine letters and digits.
#pragma once

#include "model/text/text.h"
#include "server/generate.h"

namespace kvasir::server {

// The chat with such ids for the client's own, in calls and in what tools answered; as it is for other templates.
ChatInput with_numbered_calls(ChatInput chat, const text::ChatTemplate& chat_template);

}  // namespace kvasir::server
