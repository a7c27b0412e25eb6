// A chat as its template writes it, with the last message left open where it is to be continued.
#pragma once

#include <string>

#include "model/text/text.h"
#include "server/generate.h"

namespace kvasir::server {

Result<std::string> render_chat(const ChatInput& chat, const text::ChatTemplate& chat_template);

}  // namespace kvasir::server
