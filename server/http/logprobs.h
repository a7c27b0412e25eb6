// The two forms OpenAI gives log-probabilities in.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/request.h"
#include "model/text/text.h"

namespace kvasir::server::http {

// JSON has no infinity; OpenAI's own floor for "as good as never" is -9999.
float finite_logprob(float logprob);
// A token's text; a special token adds none, and its name says what it is.
std::string token_shown(const text::Tokenizer& tokenizer, int32_t id);

// What a token is called: by its text, or as vLLM's return_tokens_as_token_ids has it, "token_id:N".
enum class TokenNames : uint8_t { texts, ids };

// [{"token":..,"logprob":..,"bytes":[..],"top_logprobs":[..]},..]
void append_token_logprobs(std::string& out, const text::Tokenizer& tokenizer,
                           const std::vector<engine::TokenOut>& tokens, TokenNames names);

// {"content":[{"token":..,"logprob":..,"bytes":[..],"top_logprobs":[..]},..],"refusal":null}
void append_chat_logprobs(std::string& out, const text::Tokenizer& tokenizer,
                          const std::vector<engine::TokenOut>& tokens, TokenNames names);

// {"tokens":[..],"token_logprobs":[..],"top_logprobs":[{..}],"text_offset":[..]}; moves `offset` on, by
// characters of the text, in which special tokens stand for the first `special_shown` tokens only. The first token of
// an echoed prompt has no log-probability.
void append_completion_logprobs(std::string& out, const text::Tokenizer& tokenizer,
                                const std::vector<engine::TokenOut>& tokens, int64_t& offset, bool first_has_none,
                                size_t special_shown, TokenNames names);

// llama-server's: {"id":..,"token":..,"bytes":[..],"logprob":..,"top_logprobs":[..]}; of probabilities after sampling
// with `prob` and `top_probs`, from 0 to 1.
nlohmann::ordered_json token_probabilities(const text::Tokenizer& tokenizer, const engine::TokenOut& token,
                                           bool post_sampling);

// vLLM's: of each token of the prompt {"id":{"logprob":..,"rank":..,"decoded_token":..}}, its own and the likeliest;
// null for the first, which nothing came before.
void append_prompt_logprobs(std::string& out, const text::Tokenizer& tokenizer,
                            const std::vector<engine::TokenOut>& tokens);

}  // namespace kvasir::server::http
