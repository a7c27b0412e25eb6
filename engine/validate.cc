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

// A search compares whole answers, so what is decided while an answer grows has no place in it.
Status check_beams(const Request& r, const RequestLimits& limits) {
  const BeamOptions& b = *r.beams;
  if (b.width < 1 || b.width > limits.max_choices)
    return bad("beam_width",
               cat("beam_width is ", b.width, "; it must be 1 to ", limits.max_choices, " on this server"));
  if (r.n > b.width)
    return bad("n", cat("n is ", r.n, "; a search of ", b.width, " beams has at most that many answers"));
  if (!(b.length_penalty >= -10 && b.length_penalty <= 10))
    return bad("length_penalty", cat("length_penalty is ", b.length_penalty, "; it must be from -10 to 10"));
  if (r.max_tokens && *r.max_tokens == 0)
    return bad("max_tokens", "max_tokens is 0; beam search needs an answer to search for");
  if (r.thoughts)
    return bad("thinking_token_budget", "beam search counts no thoughts; leave thinking_token_budget out");
  if (!r.stop_regex.empty())
    return bad("stop_regex", "beam search ends at tokens, not where text matches; leave stop_regex out");
  if (r.grammar.kind != text::GrammarSpec::Kind::none)
    return bad("grammar", "beam search cannot follow a grammar; leave one of them out");
  if (!r.stop_strings.empty())
    return bad("stop", "beam search ends at tokens, not at strings: use stop_token_ids, or leave stop out");
  if (!r.allowed_tokens.empty())
    return bad("allowed_token_ids", "beam search looks at all tokens; leave allowed_token_ids out");
  if (r.min_tokens > 0) return bad("min_tokens", "beam search ends where it finds an end; leave min_tokens out");
  return {};
}

// A prompt as a whole has neither choices nor an answer.
Status check_pooled(const Request& r, const RequestLimits& limits) {
  if (r.n != 1) return bad("n", cat("n is ", r.n, "; a prompt has one embedding"));
  if (r.max_tokens != 0) return bad("max_tokens", "an embedding has no answer: max_tokens must be 0");
  if (r.beams || r.prompt_logprobs >= 0 || r.grammar.kind != text::GrammarSpec::Kind::none)
    return bad("grammar", "an embedding has no answer: leave beams, grammars and prompt_logprobs out");
  KVASIR_TRY(check_tokens("scored", r.scored, limits.vocab_size));
  if (r.classified && limits.labels == 0) return failed_precondition("this model has no classification head");
  const bool embeds = r.scored.empty() && !r.classified;
  if (embeds && !limits.no_embeddings.empty())
    return Status(Code::unimplemented, cat("embeddings of this model are not served: ", limits.no_embeddings));
  if (!r.scored.empty() && limits.encoder)
    return failed_precondition("an encoder draws no tokens, so none can be scored");
  if (r.dimensions && (*r.dimensions < 1 || *r.dimensions > limits.hidden))
    return bad("dimensions",
               cat("dimensions is ", *r.dimensions, "; this model's embeddings have 1 to ", limits.hidden));
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
  if (r.pooled) KVASIR_TRY(check_pooled(r, limits));
  if (!r.pooled && limits.encoder)
    return failed_precondition("this model is an encoder: it answers /v1/embeddings, and generates no text");

  if (limits.encodes && r.prompt_logprobs >= 0)
    return bad(
        "prompt_logprobs",
        "this model is an encoder-decoder: its encoder reads the prompt, whose tokens have no log-probabilities; "
        "leave prompt_logprobs out (and logprobs beside echo)");

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
  if (limits.max_input > 0 && prompt > limits.max_input)
    return bad("prompt", cat("the prompt has ", prompt, " tokens; this server takes ", limits.max_input,
                             " (max_input_tokens_per_request)"));
  if (limits.max_output > 0 && r.max_tokens.value_or(0) > limits.max_output)
    return bad("max_tokens", cat("max_tokens is ", *r.max_tokens, "; this server gives ", limits.max_output,
                                 " (max_output_tokens_per_request)"));
  if (limits.max_total > 0 && prompt + r.max_tokens.value_or(1) > limits.max_total)
    return bad(r.max_tokens ? "max_tokens" : "prompt",
               cat("the prompt's ", prompt, " tokens and max_tokens ", r.max_tokens.value_or(1), " exceed the ",
                   limits.max_total, " this server takes (max_total_tokens_per_request)"));
  int64_t most = r.max_tokens.value_or(context - prompt);
  if (r.min_tokens < 0 || r.min_tokens > most)
    return bad("min_tokens", cat("min_tokens is ", r.min_tokens, "; it must be 0 to ", most, " here"));

  if (r.beams) KVASIR_TRY(check_beams(r, limits));
  for (const std::string& s : r.stop_strings)
    if (s.empty()) return bad("stop", "a stop string is empty; leave it out instead");
  if (!r.stop_regex.empty() && (!limits.has_text || !r.detokenize))
    return bad("stop_regex", limits.has_text ? "stop_regex needs text; it cannot be used with token ids only"
                                             : "this model has no tokenizer: leave stop_regex out");
  if (!limits.has_text && (r.detokenize || !r.stop_strings.empty()))
    return bad(r.detokenize ? "detokenize" : "stop",
               "this model has no tokenizer: ask for token ids, without text or stop strings");
  if (!r.stop_strings.empty() && !r.detokenize)
    return bad("stop", "stop strings need text; they cannot be used with token ids only");
  if (r.constrained() && !limits.has_grammars)
    return bad("grammar", "this model has no tokenizer, which a grammar needs");
  return {};
}

}  // namespace kvasir::engine
