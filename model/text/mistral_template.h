// The chats of folders as Mistral publishes them, which come without a template: what mistral-common makes of messages,
// by the version that a tokenizer's file says. Each version's differs from the one before in where the system's words,
// tools, calls and results stand.
#pragma once

#include <string>

namespace kvasir::text {

// Of versions 1, 2, 3, 7, 11 and 13; empty: there is none such. `thinks`: the vocabulary has [THINK] (from 13 on).
std::string mistral_template(int version, bool thinks);

}  // namespace kvasir::text
