// What a model thinks before it answers, as far as requests of all protocols have to do with it: how it is written, and
// how long it may be.
#pragma once

#include <optional>
#include <vector>

#include "engine/engine.h"
#include "model/text/reasoning_parser.h"
#include "server/generate.h"

namespace kvasir::server {

// As the operator says, or as the template has it.
text::ReasoningFormat reasoning_format(const ServerOptions& options, const engine::Engine& engine);

// Whether the prompt ends within thoughts, as templates write that open the tag themselves.
bool ends_in_thoughts(const std::vector<int32_t>& prompt, text::ReasoningFormat format,
                      const text::Tokenizer& tokenizer);

// Whether their tokens can be counted, and ended.
bool can_limit_thoughts(text::ReasoningFormat format);

// Makes of the request's budget, or the operator's, what holds; `prompt` as it will be submitted. Of a model that does
// not think a request's own budget is refused.
Status limit_thoughts(const ServerOptions& options, const engine::Engine& engine, GenerateInput& input);

}  // namespace kvasir::server
