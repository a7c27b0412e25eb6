// The calls of a conversation for a template that writes each one's id, where the model expects its name and number
// (Kimi K2: functions.NAME:0, counted through the whole conversation).
#pragma once

#include "model/text/text.h"
#include "server/generate.h"

namespace kvasir::server {

// The chat with such ids for the client's own, in calls and in what tools answered; as it is for other templates.
ChatInput with_numbered_calls(ChatInput chat, const text::ChatTemplate& chat_template);

}  // namespace kvasir::server
