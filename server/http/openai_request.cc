#include "server/http/openai_request.h"

#include <algorithm>
#include <charconv>
#include <limits>

#include "core/cat.h"
#include "core/utf8.h"
#include "server/http/fields.h"
#include "server/http/openai_chat_fields.h"

namespace kvasir::server::http {
namespace {

constexpr size_t kMostStops = 1024;  // before anyone counts them against the limit

void read_logit_bias(Fields& f, GenerateInput& input) {
  const Json* bias = f.raw("logit_bias");
  if (!bias) return;
  if (!bias->is_object()) return f.fail("logit_bias", "must be an object of token ids and numbers");
  for (const auto& [key, value] : bias->items()) {
    int64_t id = -1;
    auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
    if (error != std::errc() || end != key.data() + key.size())
      return f.fail("logit_bias", cat("has the key '", key.substr(0, 30), "', which is no token id"));
    if (!value.is_number()) return f.fail("logit_bias", cat("of token ", id, " must be a number"));
    input.logit_bias.emplace_back(id, value.get<float>());
  }
}

// All 64 bits of it, with a sign or without.
void read_seed(Fields& f, GenerateInput& input) {
  const Json* seed = f.raw("seed");
  if (!seed) return;
  if (seed->is_number_unsigned())
    input.seed = seed->get<uint64_t>();
  else if (int64_t value = 0; f.integer("seed", &value))
    input.seed = static_cast<uint64_t>(value);
}

void read_stream_options(Fields& f, ReplyShape& shape) {
  f.boolean("stream", &shape.stream);
  const Json* options = f.raw("stream_options");
  if (!options) return;
  Fields inner(*options, "stream_options");
  inner.boolean("include_usage", &shape.include_usage);
  if (inner.boolean("continuous_usage_stats", &shape.usage_so_far) && shape.usage_so_far && !shape.include_usage)
    inner.fail("continuous_usage_stats", "needs include_usage: true");
  inner.unserved("include_obfuscation", "nothing is added to chunks");
  if (Status s = inner.finish(); !s.ok()) f.fail("stream_options", "is wrong: " + s.message());
  if (!shape.stream) f.fail("stream_options", "is only allowed with stream: true");
}

// Said about the caller: it goes into the request's line of the log. `prompt_cache_key` asks a fleet to send alike
// prompts to one machine; here is one machine, whose cache a tenant's requests share without being asked.
void read_said(Fields& f, GenerateInput::Said& said) {
  auto text = [&](std::string_view name, size_t most, std::string* out) {
    if (f.string(name, out) && out->size() > most)
      f.fail(name, cat("has ", out->size(), " bytes; at most ", most, " are taken"));
  };
  std::string identifier;
  text("user", 512, &said.user);
  text("safety_identifier", 512, &identifier);
  if (!identifier.empty()) said.user = identifier;  // OpenAI's newer name for it
  text("prompt_cache_key", 512, &said.cache_key);
  std::string retention;  // what is done anyway; 24 h cannot be promised
  f.enumeration("prompt_cache_retention", &retention, {"in_memory", "in-memory"});
  const Json* metadata = f.raw("metadata");
  if (!metadata) return;
  if (!metadata->is_object()) return f.fail("metadata", "must be an object of strings");
  if (metadata->size() > 16) return f.fail("metadata", cat("has ", metadata->size(), " pairs; at most 16 are taken"));
  for (const auto& [key, value] : metadata->items())
    if (utf8_characters(key) > 64 || !value.is_string() || utf8_characters(value.get_ref<const std::string&>()) > 512)
      return f.fail("metadata", cat("has the key '", utf8_prefix(key, 64),
                                    "'; keys have at most 64 characters, values are strings of at most 512"));
  said.metadata = metadata->dump();
}

int32_t clamp32(int64_t v) {
  return static_cast<int32_t>(
      std::clamp<int64_t>(v, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()));
}

// Known elsewhere and not served: refused by name with what to use, unless they ask for nothing or say what is so
// anyway.
constexpr struct {
  const char *name, *why, *usual = "false";
} kUnserved[] = {
    {"store", "nothing a client sends is kept"},
    {"functions", "use tools"},
    {"function_call", "use tool_choice", "\"none\""},
    {"audio", "this model writes text only"},
    {"prediction", "predicted outputs are not offered"},
    {"web_search_options", "this server searches nothing"},
    {"verbosity", "the model has no such switch; say it in a message", "\"medium\""},
    {"suffix", "this model fills no gaps"},
    {"use_beam_search", "use n or best_of"},
    {"length_penalty", "it is of beam search", "1.0"},
    {"early_stopping", "it is of beam search"},
    {"spaces_between_special_tokens", "text is what the tokens say", "true"},
    {"return_hidden_states", "hidden states are not sent; logprobs are"},
    {"return_token_strs", "use logprobs, whose entries have each token's text"},
    {"logprob_token_ids", "use logprobs and top_logprobs"},
    {"stop_regex", "use stop, or a constraint such as regex"},
    {"bad_words", "use logit_bias of -100"},
    {"truncate_prompt_tokens", "shorten the prompt: /tokenize says its length"},
    {"kv_transfer_params", "this server does not move caches between machines"},
    {"lora_path", "no adapter is loaded"},
};

void read_identity(Fields& f, GenerateInput& in) {
  f.string("request_id", &in.request.id);  // vLLM's name for it, and SGLang's
  f.string("rid", &in.request.id);
}

// What chat and completions have in common.
void read_common(Fields& f, const ServerOptions& limits, OpenAiCall& call) {
  GenerateInput& in = call.input;
  engine::Request& r = in.request;
  model::SamplingParams& s = r.sampling;
  s = limits.sampling;
  f.string("model", &in.model);
  f.number("temperature", &s.temperature);
  f.number("top_p", &s.top_p);
  f.number("presence_penalty", &s.presence_penalty);
  f.number("frequency_penalty", &s.frequency_penalty);
  read_logit_bias(f, in);
  int64_t value = 0;
  read_seed(f, in);
  f.integer("n", &in.n);
  if (f.integer("max_tokens", &value)) in.max_tokens = value;
  f.strings("stop", &r.stop_strings, kMostStops);
  read_stream_options(f, call.shape);
  // Beyond OpenAI, under the names other servers use.
  if (f.integer("top_k", &value)) s.top_k = value == -1 ? 0 : clamp32(value);
  f.number("min_p", &s.min_p);
  f.number("typical_p", &s.typical_p);
  f.number("repetition_penalty", &s.repetition_penalty);
  f.integers("stop_token_ids", &in.stop_tokens);
  if (f.has("allowed_token_ids")) f.integers("allowed_token_ids", &in.allowed_tokens.emplace());
  f.boolean("ignore_eos", &r.ignore_eos);
  if (f.integer("min_tokens", &value)) r.min_tokens = clamp32(value);
  f.boolean("include_stop_str_in_output", &r.include_stop);
  f.boolean("skip_special_tokens", &r.skip_special);
  if (f.integer("priority", &value)) r.priority = clamp32(value);
  f.string("cache_salt", &r.cache_salt);
  read_grammar(f, r.grammar);
  read_said(f, in.said);
  for (const auto& [name, why, usual] : kUnserved) f.unserved(name, why, usual);
  read_identity(f, in);
  f.boolean("return_token_ids", &call.shape.token_ids);
  f.boolean("no_stop_trim", &r.include_stop);  // SGLang's name for it
  if (f.integer("prompt_logprobs", &in.prompt_logprobs) && in.prompt_logprobs < 0)
    f.fail("prompt_logprobs",
           cat("is ", in.prompt_logprobs, "; it must be at least 0, all of the vocabulary is not sent"));
  std::string tier;
  f.enumeration("service_tier", &tier, {"auto", "default"});
}

// A string, a list of strings, token ids, or a list of those.
void read_prompts(Fields& f, const ServerOptions& limits, OpenAiCall& call) {
  const Json* prompt = f.raw("prompt");
  if (!prompt) return f.fail("prompt", "is missing; give a string, a list of strings, or token ids");
  size_t most = static_cast<size_t>(limits.max_choices);
  auto is_ids = [](const Json& j) { return j.is_array() && !j.empty() && j[0].is_number(); };
  if (is_ids(*prompt)) {
    TokensInput ids;
    f.integers("prompt", &ids);
    call.prompts.emplace_back(std::move(ids));
  } else if (prompt->is_array() && !prompt->empty() && is_ids((*prompt)[0])) {
    if (prompt->size() > most) return f.fail("prompt", cat("has ", prompt->size(), " entries; the limit is ", most));
    for (const Json& one : *prompt) {
      Json object{{"prompt", one}};
      Fields inner(object);
      TokensInput ids;
      inner.integers("prompt", &ids);
      if (Status s = inner.finish(); !s.ok()) return f.fail("prompt", "must be all of one kind: " + s.message());
      call.prompts.emplace_back(std::move(ids));
    }
  } else {
    std::vector<std::string> texts;
    f.strings("prompt", &texts, most);
    for (std::string& t : texts) call.prompts.emplace_back(TextInput{std::move(t)});
  }
  if (f.ok() && call.prompts.empty()) f.fail("prompt", "is empty");
}

}  // namespace

Result<OpenAiCall> parse_chat(std::string_view body, const ServerOptions& limits) {
  KVASIR_ASSIGN(Json json, parse_json(body));
  Fields f(json);
  OpenAiCall call;
  call.input.protocol = "openai.chat";
  call.shape.chat = true;
  read_common(f, limits, call);
  int64_t value = 0;
  if (f.integer("max_completion_tokens", &value)) {
    call.input.max_tokens = value;
    call.input.max_tokens_field = "max_completion_tokens";
  }
  bool logprobs = false;
  int64_t top = 0;
  f.boolean("logprobs", &logprobs);
  if (f.integer("top_logprobs", &top) && !logprobs) f.fail("top_logprobs", "is only allowed with logprobs: true");
  if (top < 0) f.fail("top_logprobs", cat("is ", top, "; it must be at least 0, all of the vocabulary is not sent"));
  if (logprobs) call.input.logprobs = top;
  call.input.logprobs_field = "top_logprobs";
  f.unserved("echo", "the prompt is the client's own; completions have it");
  read_chat(f, limits, call);
  KVASIR_TRY(f.finish());
  call.shape.logprobs = static_cast<int>(call.input.logprobs);
  call.shape.choices = call.shape.best_of = clamp32(call.input.n);
  return call;
}

Result<OpenAiCall> parse_completion(std::string_view body, const ServerOptions& limits) {
  KVASIR_ASSIGN(Json json, parse_json(body));
  Fields f(json);
  OpenAiCall call;
  GenerateInput& in = call.input;
  in.protocol = "openai.completions";
  read_common(f, limits, call);
  in.default_max_tokens = 16;  // OpenAI's
  if (f.integer("logprobs", &in.logprobs) && in.logprobs < 0)
    f.fail("logprobs", cat("is ", in.logprobs, "; it must be at least 0"));
  f.boolean("echo", &call.echo);
  if (call.echo) in.prompt_logprobs = std::max(in.prompt_logprobs, in.logprobs);
  call.shape.choices = call.shape.best_of = clamp32(in.n);
  int64_t best_of = in.n;
  if (f.integer("best_of", &best_of)) {
    // Later the engine is asked for best_of, so nobody else looks at n.
    if (in.n < 1) f.fail("n", cat("is ", in.n, "; it must be at least 1"));
    if (best_of < in.n) f.fail("best_of", cat("is ", best_of, "; it must be at least n, which is ", in.n));
    if (call.shape.stream && best_of > in.n) f.fail("best_of", "above n cannot be streamed");
    call.shape.best_of = clamp32(best_of);
    in.n = best_of;
  }
  read_prompts(f, limits, call);
  KVASIR_TRY(f.finish());
  call.shape.logprobs = static_cast<int>(in.logprobs);
  call.shape.special_shown = !in.request.skip_special;
  if (call.shape.best_of > call.shape.choices && in.logprobs < 0) in.logprobs = 0;  // what best is measured by
  in.choices_of_call = in.n * static_cast<int64_t>(call.prompts.size());
  return call;
}

}  // namespace kvasir::server::http
