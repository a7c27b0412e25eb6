#include "server/generate.h"

#include <algorithm>
#include <charconv>

#include "core/cat.h"
#include "core/utf8.h"
#include "model/text/bounded.h"
#include "server/continued_chat.h"
#include "server/described_tools.h"
#include "server/json_text.h"
#include "server/numbered_calls.h"
#include "server/parameters.h"
#include "server/prompt.h"
#include "server/written_calls.h"

namespace kvasir::server {
namespace {

// Stands in each refusal of what is too long, which over_context() knows it by.
constexpr std::string_view kContextHolds = "the context holds ";

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

Status check_token(const char* field, int64_t id, size_t place, const model::ModelInfo& info) {
  if (id >= 0 && id < info.vocab_size) return {};
  return invalid_argument(
             cat(field, " token ", place, " is ", id, "; it must be an id from 0 to ", info.vocab_size - 1))
      .with_field(field);
}

Status check_tokens(const char* field, const TokensInput& ids, const model::ModelInfo& info) {
  if (ids.size() > size_t(info.context_length))
    return invalid_argument(cat("the ", field, " has ", ids.size(), " tokens; ", kContextHolds, info.context_length))
        .with_field(field);
  for (size_t i = 0; i < ids.size(); ++i) KVASIR_TRY(check_token(field, ids[i], i, info));
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

namespace {

// A search draws nothing, so what shapes draws would be without effect.
Status check_no_draws(const GenerateInput& in) {
  const model::SamplingParams& s = in.request.sampling;
  const char* said = nullptr;
  for (const model::SamplingNumber& n : model::kSamplingNumbers)
    if (s.*n.to != model::SamplingParams{.temperature = 0}.*n.to) said = n.name;
  if (s.top_k != 0) said = "top_k";
  if (!s.logit_bias.empty()) said = "logit_bias";
  if (!s.logprob_token_ids.empty()) said = "logprob_token_ids";
  if (s.post_sampling_probs) said = "post_sampling_probs";
  if (!in.request.bad_words.empty()) said = "bad_words";
  if (!said) return {};
  const char* name = name_of(in, parameter(said));
  return invalid_argument(cat(name, " is of draws, and beam search draws nothing: leave it out")).with_field(name);
}

}  // namespace

Status check_fields(const GenerateInput& in, const ServerOptions& limits, const model::ModelInfo& info) {
  KVASIR_TRY(check_parameters(in, limits, info));
  if (in.request.beams) KVASIR_TRY(check_no_draws(in));
  if (in.choices_of_call > limits.max_choices)
    return invalid_argument(cat("the call asks for ", in.choices_of_call, " choices (prompts x n or best_of); at most ",
                                limits.max_choices, " are taken"))
        .with_field("n");
  if (in.request.id.size() > 256)
    return invalid_argument(cat("request_id has ", in.request.id.size(), " bytes; at most 256 are taken"))
        .with_field("request_id");
  KVASIR_TRY(check_grammar(in.request.grammar));
  if (in.request.deadline && *in.request.deadline <= std::chrono::steady_clock::now())
    return {Code::deadline_exceeded, "the deadline had passed when the request came"};
  if (auto* ids = std::get_if<TokensInput>(&in.prompt)) {
    KVASIR_TRY(check_tokens("prompt", *ids, info));
  } else if (auto* mixed = std::get_if<PiecesInput>(&in.prompt)) {
    for (size_t i = 0; i < mixed->pieces.size(); ++i)
      if (auto* id = std::get_if<int64_t>(&mixed->pieces[i])) KVASIR_TRY(check_token("prompt", *id, i, info));
  } else if (auto* text = std::get_if<TextInput>(&in.prompt)) {
    KVASIR_TRY(check_utf8(text->text, "prompt"));
  }
  if (in.prediction)
    if (auto* ids = std::get_if<TokensInput>(&*in.prediction)) KVASIR_TRY(check_tokens("prediction", *ids, info));
  return {};
}

namespace {

Status check_depth(const char* field, std::string_view json) {
  if (int depth = json_depth(json); depth > kMostJsonDepth)
    return invalid_argument(cat(field, " nests ", depth, " deep; the limit is ", kMostJsonDepth)).with_field(field);
  return {};
}

struct PromptLimits {
  size_t bytes, tokens;
};

// A text in tokens. Where there are too many the rest of a large text is not read, so that nobody knows their number.
Result<std::vector<int32_t>> encode_text(const TextInput& text, const engine::Engine& engine, PromptLimits limits) {
  KVASIR_TRY(check_utf8(text.text, "prompt"));
  const text::TokenizerPtr tokenizer = engine.tokenizer();
  const auto* bounded = dynamic_cast<const text::BoundedTokenizer*>(tokenizer.get());
  if (!bounded) return tokenizer->encode(text.text, text.add_special, text.parse_special);
  const text::EncodeLimits within{.most_tokens = limits.tokens};
  KVASIR_ASSIGN(auto ids, bounded->encode_within(within, text.text, text.add_special, text.parse_special));
  if (ids.size() <= limits.tokens || text.text.size() <= within.piece_bytes) return ids;
  return invalid_argument(cat("the prompt has more than ", limits.tokens, " tokens; ", kContextHolds,
                              engine.info().context_length, "; shorten the prompt"))
      .with_field("prompt");
}

// The first text begins the prompt; the others go on in it.
Result<std::vector<int32_t>> encode_pieces(const PiecesInput& mixed, const engine::Engine& engine,
                                           PromptLimits limits) {
  std::vector<int32_t> ids;
  for (const auto& piece : mixed.pieces) {
    if (auto* id = std::get_if<int64_t>(&piece)) {
      ids.push_back(int32_t(*id));
      continue;
    }
    KVASIR_ASSIGN(auto more,
                  encode_text({std::get<std::string>(piece), ids.empty(), mixed.parse_special}, engine, limits));
    ids.insert(ids.end(), more.begin(), more.end());
  }
  return ids;
}

}  // namespace

Result<std::string> prompt_text(const ChatInput& chat, const engine::Engine& engine) {
  KVASIR_TRY(check_depth("messages", chat.messages_json));
  KVASIR_TRY(check_depth("tools", chat.tools_json));
  KVASIR_TRY(check_depth("template variables", chat.variables_json));
  // Each message is a token at least: rendering more than the context holds would be for nothing.
  if (size_t n = json_entries(chat.messages_json); n > size_t(engine.info().context_length))
    return invalid_argument(
               cat("messages has ", n, " entries; ", kContextHolds, engine.info().context_length, " tokens"))
        .with_field("messages");
  auto chat_template = engine.chat_template();
  if (!chat_template)
    return failed_precondition("this model has no chat template; send a prompt to the completions method instead");
  const ChatInput told = with_calls_written(with_tools_described(chat, *chat_template), *chat_template);
  return render_chat(with_numbered_calls(told, *chat_template), *chat_template);
}

Result<std::vector<int32_t>> encode_prompt(const PromptInput& prompt, const engine::Engine& engine, size_t max_bytes) {
  return encode_prompt_within(SIZE_MAX, prompt, engine, max_bytes);
}

Result<std::vector<int32_t>> encode_prompt_within(size_t max_tokens, const PromptInput& prompt,
                                                  const engine::Engine& engine, size_t max_bytes) {
  const PromptLimits limits{max_bytes, max_tokens};
  if (auto* ids = std::get_if<TokensInput>(&prompt)) return std::vector<int32_t>(ids->begin(), ids->end());
  if (!engine.tokenizer())
    return failed_precondition("this model came without a tokenizer; send token ids instead of text");
  auto fits = [&](const std::string& text) -> Status {
    if (text.size() <= limits.bytes) return {};
    return invalid_argument(cat("the prompt has ", text.size(), " bytes; ", kContextHolds, engine.info().context_length,
                                " tokens, which have at most ", limits.bytes))
        .with_field("prompt");
  };
  if (auto* text = std::get_if<TextInput>(&prompt)) {
    KVASIR_TRY(fits(text->text));
    return encode_text(*text, engine, limits);
  }
  if (auto* mixed = std::get_if<PiecesInput>(&prompt)) {
    std::string all;
    for (const auto& piece : mixed->pieces)
      if (auto* text = std::get_if<std::string>(&piece)) all += *text;
    KVASIR_TRY(fits(all));
    return encode_pieces(*mixed, engine, limits);
  }
  // The template wrote the special tokens, bos too.
  TextInput chat{.text = {}, .add_special = false, .parse_special = true};
  KVASIR_ASSIGN(chat.text, prompt_text(std::get<ChatInput>(prompt), engine));
  KVASIR_TRY(fits(chat.text));
  return encode_text(chat, engine, limits);
}

Result<std::vector<std::vector<int32_t>>> encode_bad_words(const std::vector<std::string>& words,
                                                           const engine::Engine& engine) {
  std::vector<std::vector<int32_t>> out;
  if (words.empty()) return out;
  const text::TokenizerPtr tokenizer = engine.tokenizer();
  if (!tokenizer)
    return failed_precondition("this model came without a tokenizer; use logit_bias instead of bad_words")
        .with_field("bad_words");
  for (const std::string& word : words)
    for (const char* before : {"", " "}) {
      KVASIR_ASSIGN(auto ids, tokenizer->encode(before + word, false, false));
      if (!ids.empty() && std::find(out.begin(), out.end(), ids) == out.end()) out.push_back(std::move(ids));
    }
  return out;
}

namespace {

// A whole answer, and what is said of a prompt, are held until they are sent: up to kFew beside each token as long as
// the context is, above that all together kMost.
Status check_logprobs(const GenerateInput& in, int64_t prompt, const model::ModelInfo& info) {
  constexpr int64_t kFew = 100, kMost = 32 << 20;
  const engine::Request& r = in.request;
  auto beside = [&](int32_t wanted) { return std::clamp<int64_t>(wanted, 0, info.vocab_size); };
  const int64_t of_prompt = beside(r.prompt_logprobs), of_answer = beside(r.sampling.logprobs);
  if (std::max(of_prompt, of_answer) <= kFew) return {};
  const int64_t usual = in.default_max_tokens > 0 ? in.default_max_tokens : info.context_length - prompt;
  const int64_t longest = std::min(r.max_tokens.value_or(usual), info.context_length - prompt);
  const int64_t answer = longest * r.n, all = prompt * of_prompt + answer * of_answer;
  if (all <= kMost) return {};
  const char* name = name_of(in, parameter(of_answer > kFew ? "logprobs" : "prompt_logprobs"));
  return invalid_argument(cat(name, " asks for ", all, " log-probabilities in all (", of_prompt, " of each of ", prompt,
                              " prompt tokens, ", of_answer, " of each of up to ", answer,
                              " tokens of answers); at most ", kMost,
                              " are held: ask for fewer, or for a shorter answer"))
      .with_field(name);
}

// llama-server's and Ollama's name of an answer's length: there the context ends what is asked to be longer.
bool is_cut_at_context(std::string_view name) { return name == "n_predict" || name == "num_predict"; }

}  // namespace

Status check_length(const GenerateInput& in, size_t prompt_tokens, const model::ModelInfo& info) {
  int64_t prompt = int64_t(prompt_tokens), context = info.context_length;
  const std::optional<int64_t>& most = in.request.max_tokens;
  if (prompt == 0) return invalid_argument("the prompt is empty; send at least one token").with_field("prompt");
  bool generates = !most || *most > 0;
  if (prompt + (generates ? 1 : 0) > context)
    return invalid_argument(cat("the prompt has ", prompt, " tokens; ", kContextHolds, context,
                                generates ? ", of which at least one is for the answer" : "", "; shorten the prompt"))
        .with_field("prompt");
  const std::string_view name = name_of(in, parameter("max_tokens"));
  if (most && *most > context - prompt && !is_cut_at_context(name)) {
    return invalid_argument(cat(name, " is ", *most, "; the prompt has ", prompt, " tokens and ", kContextHolds,
                                context, ", so it may be at most ", context - prompt))
        .with_field(std::string(name));
  }
  return check_logprobs(in, prompt, info);
}

bool over_context(const Status& refusal) {
  return refusal.code() == Code::invalid_argument && !refusal.field().empty() &&
         refusal.message().find(kContextHolds) != std::string::npos;
}

ContextUse context_use(std::string_view refusal) {
  auto number_behind = [&](std::string_view words) {
    int64_t out = 0;
    const size_t at = refusal.find(words);
    if (at == refusal.npos) return out;
    const char* digits = refusal.data() + at + words.size();
    const auto [end, error] = std::from_chars(digits, refusal.data() + refusal.size(), out);
    return error == std::errc() ? out : 0;
  };
  return {std::max(number_behind("prompt has "), number_behind("prompt has more than ")), number_behind(kContextHolds)};
}

}  // namespace kvasir::server
