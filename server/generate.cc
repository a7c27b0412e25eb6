#include "server/generate.h"

#include <cmath>

#include "core/cat.h"
#include "core/utf8.h"
#include "server/continued_chat.h"
#include "server/described_tools.h"
#include "server/json_text.h"

namespace kvasir::server {
namespace {

// Stands in each refusal of what is too long, which over_context() knows it by.
constexpr std::string_view kContextHolds = "the context holds ";

// "temperature is -1; it must be from 0 to 100": the field, the value, the limit.
template <class T>
Status refuse(const std::string& field, const T& value, const std::string& limit) {
  return invalid_argument(cat(field, " is ", value, "; it must be ", limit)).with_field(field);
}

Status in_range(const char* field, float value, float low, float high) {
  if (value >= low && value <= high) return {};  // a NaN is not
  return refuse(field, value, cat("a number from ", low, " to ", high));
}

Status check_sampling(const GenerateInput& in, const ServerOptions& limits, const model::ModelInfo& info) {
  const model::SamplingParams& s = in.request.sampling;
  KVASIR_TRY(in_range("temperature", s.temperature, 0, 100));
  KVASIR_TRY(in_range("top_p", s.top_p, 0, 1));
  if (s.top_p == 0) return refuse("top_p", 0, "more than 0 and at most 1");
  KVASIR_TRY(in_range("min_p", s.min_p, 0, 1));
  KVASIR_TRY(in_range("typical_p", s.typical_p, 0, 1));
  if (s.typical_p == 0) return refuse("typical_p", 0, "more than 0 and at most 1");
  if (s.top_k < 0) return refuse("top_k", s.top_k, "0 (off) or more");
  if (!(s.repetition_penalty > 0 && s.repetition_penalty <= 100))
    return refuse("repetition_penalty", s.repetition_penalty, "more than 0 and at most 100; 1 is off");
  if (!limits.penalties && (s.repetition_penalty != 1 || s.presence_penalty != 0 || s.frequency_penalty != 0))
    return invalid_argument("penalties are turned off on this server (enable_penalty); leave them out")
        .with_field(s.repetition_penalty != 1 ? "repetition_penalty"
                    : s.presence_penalty != 0 ? "presence_penalty"
                                              : "frequency_penalty");
  KVASIR_TRY(in_range("presence_penalty", s.presence_penalty, -2, 2));
  KVASIR_TRY(in_range("frequency_penalty", s.frequency_penalty, -2, 2));
  if (in.logprobs < -1 || in.logprobs > limits.max_logprobs)
    return refuse(in.logprobs_field, in.logprobs, cat("from 0 to ", limits.max_logprobs));
  if (in.prompt_logprobs < -1 || in.prompt_logprobs > limits.max_logprobs)
    return refuse("prompt_logprobs", in.prompt_logprobs, cat("from 0 to ", limits.max_logprobs));
  if (in.logit_bias.size() > size_t(limits.max_logit_bias))
    return invalid_argument(
               cat("logit_bias has ", in.logit_bias.size(), " entries; at most ", limits.max_logit_bias, " are taken"))
        .with_field("logit_bias");
  for (const auto& [token, bias] : in.logit_bias) {
    if (token < 0 || token >= info.vocab_size)
      return refuse("logit_bias", token, cat("a token id from 0 to ", info.vocab_size - 1));
    if (!(bias >= -100 && bias <= 100))
      return invalid_argument(cat("logit_bias of token ", token, " is ", bias, "; it must be from -100 to 100"))
          .with_field("logit_bias");
  }
  return {};
}

Status check_allowed(const GenerateInput& in, const model::ModelInfo& info) {
  if (!in.allowed_tokens) return {};
  auto refuse_all = [](const std::string& what) {
    return invalid_argument("allowed_token_ids " + what).with_field("allowed_token_ids");
  };
  if (in.allowed_tokens->empty())
    return refuse_all("is empty, so nothing could be drawn; leave it out to allow every id");
  if (in.allowed_tokens->size() > size_t(info.vocab_size))
    return refuse_all(cat("has ", in.allowed_tokens->size(), " entries; the model has ", info.vocab_size, " ids"));
  for (int64_t id : *in.allowed_tokens)
    if (id < 0 || id >= info.vocab_size)
      return refuse("allowed_token_ids", id, cat("a token id from 0 to ", info.vocab_size - 1));
  return {};
}

Status check_stops(const GenerateInput& in, const ServerOptions& limits, const model::ModelInfo& info) {
  const auto& strings = in.request.stop_strings;
  if (strings.size() > size_t(limits.max_stop))
    return invalid_argument(cat("stop has ", strings.size(), " strings; at most ", limits.max_stop, " are taken"))
        .with_field("stop");
  for (size_t i = 0; i < strings.size(); ++i) {
    if (strings[i].empty())
      return invalid_argument(cat("stop[", i, "] is empty; leave it out instead")).with_field("stop");
    if (strings[i].size() > size_t(limits.max_stop_bytes))
      return invalid_argument(
                 cat("stop[", i, "] has ", strings[i].size(), " bytes; at most ", limits.max_stop_bytes, " are taken"))
          .with_field("stop");
    KVASIR_TRY(check_utf8(strings[i], "stop"));
  }
  if (in.stop_tokens.size() > size_t(limits.max_stop))
    return invalid_argument(cat(in.stop_tokens_field, " has ", in.stop_tokens.size(), " ids; at most ", limits.max_stop,
                                " are taken"))
        .with_field(in.stop_tokens_field);
  for (int64_t id : in.stop_tokens)
    if (id < 0 || id >= info.vocab_size)
      return refuse(in.stop_tokens_field, id, cat("a token id from 0 to ", info.vocab_size - 1));
  return {};
}

// What a grammar's compiler would have to visit; its own limits are on what it makes of it.
Status check_grammar(const text::GrammarSpec& grammar) {
  using Kind = text::GrammarSpec::Kind;
  if (grammar.kind != Kind::json_schema && grammar.kind != Kind::structural_tag) return {};
  const bool schema = grammar.kind == Kind::json_schema;
  if (int depth = json_depth(grammar.text); depth > kMostJsonDepth)
    return invalid_argument(cat("the ", schema ? "JSON schema" : "structural tag", " nests ", depth,
                                " deep; the limit is ", kMostJsonDepth))
        .with_field(schema ? "json_schema" : "structural_tag");
  return {};
}

}  // namespace

Status check_utf8(std::string_view text, const std::string& field) {
  for (size_t i = 0; i < text.size();) {
    const size_t n = utf8_length(text.substr(i));
    if (n == 0) return invalid_argument(cat(field, " is not UTF-8 from byte ", i, " on")).with_field(field);
    i += n;
  }
  return {};
}

Status check_fields(const GenerateInput& in, const ServerOptions& limits, const model::ModelInfo& info) {
  KVASIR_TRY(check_sampling(in, limits, info));
  KVASIR_TRY(check_allowed(in, info));
  KVASIR_TRY(check_stops(in, limits, info));
  if (in.n < 1 || in.n > limits.max_choices) return refuse("n", in.n, cat("from 1 to ", limits.max_choices));
  if (in.choices_of_call > limits.max_choices)
    return invalid_argument(cat("the call asks for ", in.choices_of_call, " choices (prompts x n or best_of); at most ",
                                limits.max_choices, " are taken"))
        .with_field("n");
  if (in.max_tokens && *in.max_tokens < 0) return refuse(in.max_tokens_field, *in.max_tokens, "0 or more");
  if (in.request.min_tokens < 0) return refuse("min_tokens", in.request.min_tokens, "0 or more");
  if (in.max_tokens && in.request.min_tokens > *in.max_tokens)
    return refuse("min_tokens", in.request.min_tokens, cat("at most ", in.max_tokens_field, ", ", *in.max_tokens));
  if (in.request.id.size() > 256)
    return invalid_argument(cat("request_id has ", in.request.id.size(), " bytes; at most 256 are taken"))
        .with_field("request_id");
  KVASIR_TRY(check_grammar(in.request.grammar));
  if (in.request.cache_salt.size() > 256)
    return invalid_argument(cat("cache_salt has ", in.request.cache_salt.size(), " bytes; at most 256 are taken"))
        .with_field("cache_salt");
  if (in.request.deadline && *in.request.deadline <= std::chrono::steady_clock::now())
    return {Code::deadline_exceeded, "the deadline had passed when the request came"};
  if (auto* ids = std::get_if<TokensInput>(&in.prompt)) {
    if (ids->size() > size_t(info.context_length))
      return invalid_argument(cat("the prompt has ", ids->size(), " tokens; ", kContextHolds, info.context_length))
          .with_field("prompt");
    for (size_t i = 0; i < ids->size(); ++i)
      if ((*ids)[i] < 0 || (*ids)[i] >= info.vocab_size)
        return invalid_argument(
                   cat("prompt token ", i, " is ", (*ids)[i], "; it must be an id from 0 to ", info.vocab_size - 1))
            .with_field("prompt");
  } else if (auto* text = std::get_if<TextInput>(&in.prompt)) {
    KVASIR_TRY(check_utf8(text->text, "prompt"));
  }
  return {};
}

namespace {

Status check_depth(const char* field, std::string_view json) {
  if (int depth = json_depth(json); depth > kMostJsonDepth)
    return invalid_argument(cat(field, " nests ", depth, " deep; the limit is ", kMostJsonDepth)).with_field(field);
  return {};
}

}  // namespace

Result<std::vector<int32_t>> encode_prompt(const PromptInput& prompt, const engine::Engine& engine, size_t max_bytes) {
  if (auto* ids = std::get_if<TokensInput>(&prompt)) return std::vector<int32_t>(ids->begin(), ids->end());
  text::TokenizerPtr tokenizer = engine.tokenizer();
  if (!tokenizer) return failed_precondition("this model came without a tokenizer; send token ids instead of text");
  auto fits = [&](const std::string& text) -> Status {
    if (text.size() <= max_bytes) return {};
    return invalid_argument(cat("the prompt has ", text.size(), " bytes; ", kContextHolds, engine.info().context_length,
                                " tokens, which have at most ", max_bytes))
        .with_field("prompt");
  };
  if (auto* text = std::get_if<TextInput>(&prompt)) {
    KVASIR_TRY(fits(text->text));
    KVASIR_TRY(check_utf8(text->text, "prompt"));
    return tokenizer->encode(text->text, text->add_special, text->parse_special);
  }
  const ChatInput& chat = std::get<ChatInput>(prompt);
  KVASIR_TRY(check_depth("messages", chat.messages_json));
  KVASIR_TRY(check_depth("tools", chat.tools_json));
  KVASIR_TRY(check_depth("template variables", chat.variables_json));
  auto chat_template = engine.chat_template();
  if (!chat_template)
    return failed_precondition("this model has no chat template; send a prompt to the completions method instead");
  KVASIR_ASSIGN(std::string text, render_chat(with_tools_described(chat, *chat_template), *chat_template));
  KVASIR_TRY(fits(text));
  return tokenizer->encode(text, false, true);  // the template wrote the special tokens, bos too
}

Status check_length(const GenerateInput& in, size_t prompt_tokens, const model::ModelInfo& info) {
  int64_t prompt = int64_t(prompt_tokens), context = info.context_length;
  if (prompt == 0) return invalid_argument("the prompt is empty; send at least one token").with_field("prompt");
  bool generates = !in.max_tokens || *in.max_tokens > 0;
  if (prompt + (generates ? 1 : 0) > context)
    return invalid_argument(cat("the prompt has ", prompt, " tokens; ", kContextHolds, context,
                                generates ? ", of which at least one is for the answer" : "", "; shorten the prompt"))
        .with_field("prompt");
  if (in.max_tokens && *in.max_tokens > context - prompt)
    return invalid_argument(cat(in.max_tokens_field, " is ", *in.max_tokens, "; the prompt has ", prompt,
                                " tokens and ", kContextHolds, context, ", so it may be at most ", context - prompt))
        .with_field(in.max_tokens_field);
  return {};
}

bool over_context(const Status& refusal) {
  return refusal.code() == Code::invalid_argument && !refusal.field().empty() &&
         refusal.message().find(kContextHolds) != std::string::npos;
}

}  // namespace kvasir::server
