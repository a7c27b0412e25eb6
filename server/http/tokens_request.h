// vLLM's requests whose prompt is token ids and whose answer is token ids: /inference/v1/generate reads one, the render
// routes write what one would be for a chat or a text.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "server/generate.h"
#include "server/http/fields.h"
#include "server/http/tokens_reply.h"
#include "server/options.h"

namespace kvasir::server::http {

struct TokensCall {
  GenerateInput input;
  TokensShape shape;
};

Result<TokensCall> parse_tokens(std::string_view body, const ServerOptions& limits);

// A request for the answer to `prompt`, with what `body`, one of OpenAI's, says of the draws, and the constraint that
// was made of it.
Json tokens_request(const Json& body, const GenerateInput& input, const std::vector<int32_t>& prompt,
                    const std::string& model);

}  // namespace kvasir::server::http
