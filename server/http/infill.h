// A gap to be filled: the text before and after it, in the tokens a model was taught for that.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "model/text/text.h"
#include "server/generate.h"

namespace kvasir::server::http {

struct Gap {
  std::string prefix, suffix;
  std::vector<std::pair<std::string, std::string>> files;  // beside it: name and text
};

bool fills_gaps(const text::Tokenizer& tokenizer);
// Refused by `field`'s name where the model has no such tokens.
Result<PromptInput> infill_prompt(const Gap& gap, const text::Tokenizer* tokenizer, const char* field);

}  // namespace kvasir::server::http
