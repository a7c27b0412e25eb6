// The token ids of a prompt that is to fit the context.
#pragma once

#include "server/generate.h"

namespace kvasir::server {

// As encode_prompt(), for a prompt that is refused with more than `max_tokens`: a large one is read no further than
// that.
Result<std::vector<int32_t>> encode_prompt_within(size_t max_tokens, const PromptInput& prompt,
                                                  const engine::Engine& engine, size_t max_bytes);

}  // namespace kvasir::server
