#include "engine/validate.h"

#include "core/cat.h"

namespace kvasir::engine {
namespace {

Status bad(const char* field, std::string message) { return invalid_argument(std::move(message)).with_field(field); }

Status check_tokens(const char* field, const std::vector<int32_t>& tokens, int32_t vocab) {
  for (size_t i = 0; i < tokens.size(); ++i)
    if (tokens[i] < 0 || tokens[i] >= vocab)
      return bad(field, cat(field, "[", i, "] is ", tokens[i], "; the model's token ids are 0 to ", vocab - 1));
  return {};
}

}  // namespace

Status validate(const Request& r, const RequestLimits& limits) {
  if (r.prompt.empty()) return bad("prompt", "the prompt has no tokens; it needs at least one");
  KVASIR_TRY(check_tokens("prompt", r.prompt, limits.vocab_size));
  KVASIR_TRY(check_tokens("stop_token_ids", r.stop_tokens, limits.vocab_size));
  KVASIR_TRY(check_tokens("allowed_token_ids", r.allowed_tokens, limits.vocab_size));
  KVASIR_TRY(r.sampling.validate(limits.vocab_size));
  if (r.n < 1 || r.n > limits.max_choices)
    return bad("n", cat("n is ", r.n, "; it must be 1 to ", limits.max_choices, " on this server"));

  int64_t prompt = int64_t(r.prompt.size()), context = limits.context_length;
  if (prompt > context)
    return bad("prompt", cat("the prompt has ", prompt, " tokens; the model's context is ", context));
  if (r.max_tokens) {
    if (*r.max_tokens < 0) return bad("max_tokens", cat("max_tokens is ", *r.max_tokens, "; it must be at least 0"));
    if (*r.max_tokens > context - prompt)
      return bad("max_tokens",
                 cat("the prompt's ", prompt, " tokens and max_tokens ", *r.max_tokens,
                     " exceed the model's context of ", context, "; at most ", context - prompt, " can be asked for"));
  } else if (prompt == context) {
    return bad("prompt", cat("the prompt fills the model's context of ", context, " tokens and leaves none to draw"));
  }
  int64_t most = r.max_tokens.value_or(context - prompt);
  if (r.min_tokens < 0 || r.min_tokens > most)
    return bad("min_tokens", cat("min_tokens is ", r.min_tokens, "; it must be 0 to ", most, " here"));

  for (const std::string& s : r.stop_strings)
    if (s.empty()) return bad("stop", "a stop string is empty; leave it out instead");
  if (!limits.has_text && (r.detokenize || !r.stop_strings.empty()))
    return bad(r.detokenize ? "detokenize" : "stop",
               "this model has no tokenizer: ask for token ids, without text or stop strings");
  if (!r.stop_strings.empty() && !r.detokenize)
    return bad("stop", "stop strings need text; they cannot be used with token ids only");
  if (r.grammar.kind != text::GrammarSpec::Kind::none && !limits.has_grammars)
    return bad("grammar", "this model has no tokenizer, which a grammar needs");
  return {};
}

}  // namespace kvasir::engine
