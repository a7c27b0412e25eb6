#include "server/http/openai_request.h"

#include <algorithm>

#include "core/cat.h"
#include "core/utf8.h"
#include "server/http/fields.h"
#include "server/http/llama_fields.h"
#include "server/http/openai_chat_fields.h"
#include "server/parameters.h"

namespace kvasir::server::http {
namespace {

void read_stream_options(Fields& f, const ServerOptions& limits, ReplyShape& shape) {
  f.boolean("stream", &shape.stream);
  shape.include_usage = shape.usage_so_far = limits.enable_force_include_usage && shape.stream;
  const Json* options = f.raw("stream_options");
  if (!options) return;
  Fields inner(*options, "stream_options");
  bool at_end = false, so_far = false;
  inner.boolean("include_usage", &at_end);
  inner.boolean("continuous_usage_stats", &so_far);
  shape.include_usage |= at_end;
  shape.usage_so_far |= at_end && so_far;  // of usage that is not told there is nothing to tell before
  inner.unserved("include_obfuscation", "nothing is added to chunks");
  if (Status s = inner.finish(); !s.ok()) f.fail("stream_options", "is wrong: " + s.message());
  if (!shape.stream) f.fail("stream_options", "is only allowed with stream: true");
}

}  // namespace

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

namespace {

// Known elsewhere and not served: refused by name with what to use, unless they ask for nothing or say what is so
// anyway.
constexpr struct {
  const char *name, *why, *usual = "false";
} kUnserved[] = {
    {"store", "nothing a client sends is kept"},
    {"functions", "use tools"},
    {"function_call", "use tool_choice", "\"none\""},
    {"audio", "this model writes text only"},
    {"web_search_options", "this server searches nothing"},
    {"verbosity", "the model has no such switch; say it in a message", "\"medium\""},
    {"suffix", "this model fills no gaps"},
    {"spaces_between_special_tokens", "text is what the tokens say", "true"},
    {"return_hidden_states", "hidden states are not sent; logprobs are"},
    {"return_token_strs", "use logprobs, whose entries have each token's text"},
};

// A search of n beams (vLLM's way to say it), or of beam_width of which the n best are answers (transformers').
bool searches(Fields& f) {
  bool search = false;
  return (f.boolean("use_beam_search", &search) && search) || f.has("beam_width");
}

void read_beams(Fields& f, GenerateInput& in) {
  engine::BeamOptions beams;
  int64_t width = in.request.n;
  f.integer("beam_width", &width);
  beams.width = int32_t(std::clamp<int64_t>(width, 0, INT32_MAX));  // the engine says what it must be
  f.number("length_penalty", &beams.length_penalty);
  using Early = engine::BeamOptions::Early;
  if (const Json* early = f.raw("early_stopping")) {
    if (early->is_boolean())
      beams.early = early->get<bool>() ? Early::yes : Early::no;
    else if (*early == "never")
      beams.early = Early::never;
    else
      f.fail("early_stopping", "must be true, false or \"never\"");
  }
  in.request.beams = beams;
}

// vLLM's way to let a long prompt in.
void read_cut(Fields& f, OpenAiCall& call) {
  int64_t tokens = 0;
  std::string side;
  const bool cut = f.integer("truncate_prompt_tokens", &tokens);
  const bool sided = f.enumeration("truncation_side", &side, {"left", "right"});
  if (sided && !cut) return f.fail("truncation_side", "needs truncate_prompt_tokens, which says how many are kept");
  if (!cut) return;
  if (tokens != -1 && tokens < 1)
    return f.fail("truncate_prompt_tokens", cat("is ", tokens, "; it must be 1 or more, or -1 for what fits"));
  call.cut = OpenAiCall::Cut{tokens, side == "right"};
}

// What a router hands on between machines. Its prompt as token ids saves that work here; caches are not moved.
void read_transfer(Fields& f, OpenAiCall& call) {
  const Json* given = f.raw("kv_transfer_params");
  if (!given) return;
  Fields inner(*given, "kv_transfer_params");
  TokensInput ids;
  if (inner.integers("prompt_token_ids", &ids)) call.forwarded = std::move(ids);
  if (given->is_object())
    for (const auto& [name, value] : given->items())
      if (name != "prompt_token_ids") inner.unserved(name, "this server does not move caches between machines");
  if (Status s = inner.finish(); !s.ok()) f.fail("kv_transfer_params", "is wrong: " + s.message());
}

// The ids take the place of the one prompt there is, whatever its text says.
void take_forwarded(Fields& f, OpenAiCall& call) {
  if (!call.forwarded || !f.ok()) return;
  if (call.prompts.size() != 1)
    return f.fail("kv_transfer_params",
                  cat("has prompt_token_ids, which are of one prompt; there are ", call.prompts.size()));
  if (call.forwarded->empty()) return f.fail("kv_transfer_params", "has prompt_token_ids without an entry");
  call.prompts[0] = *std::move(call.forwarded);
}

void read_identity(Fields& f, GenerateInput& in) {
  f.string("request_id", &in.request.id);  // vLLM's name for it, and SGLang's
  f.string("rid", &in.request.id);
}

// What chat and completions have in common.
// OpenAI's predicted outputs: a text, or parts of one. Token ids are ours.
void read_prediction(Fields& f, std::optional<PromptInput>& out) {
  const Json* prediction = f.raw("prediction");
  if (!prediction) return;
  const std::string type = prediction->is_object() ? text_of(*prediction, "type") : "";
  if (type != "content") return f.fail("prediction", "must be {\"type\":\"content\",\"content\":...}");
  const Json content = prediction->value("content", Json());
  TextInput text{"", false, false};
  if (content.is_string()) {
    text.text = content.get<std::string>();
  } else if (content.is_array() && !content.empty() && content[0].is_number()) {
    const Json object{{"prediction.content", content}};
    Fields inner(object);
    TokensInput ids;
    inner.integers("prediction.content", &ids);
    if (Status s = inner.finish(); !s.ok()) return f.fail("prediction.content", "must be token ids: " + s.message());
    out = std::move(ids);
    return;
  } else if (content.is_array()) {
    for (const Json& part : content) {
      if (!part.is_object() || text_of(part, "type") != "text" || !part.value("text", Json()).is_string())
        return f.fail("prediction.content", "has a part that is not {\"type\":\"text\",\"text\":...}");
      text.text += text_of(part, "text");
    }
  } else {
    return f.fail("prediction.content", "must be a string, a list of text parts or token ids");
  }
  if (!text.text.empty()) out = std::move(text);
}

void read_common(Fields& f, const ServerOptions& limits, OpenAiCall& call) {
  read_prediction(f, call.input.prediction);
  GenerateInput& in = call.input;
  const bool beams = searches(f);
  in.request.sampling = beams ? model::SamplingParams{.temperature = 0} : limits.sampling;
  f.string("model", &in.model);
  f.string("lora_path", &in.request.adapter);  // SGLang's name for an adapter's name
  f.parameters(in);
  if (beams) {
    read_beams(f, in);
  } else {
    f.unserved("length_penalty", "it is of beam search: set use_beam_search", "1.0");
    f.unserved("early_stopping", "it is of beam search: set use_beam_search");
  }
  read_llama_sampling(f, in);
  read_llama_cache(f, in);
  f.boolean("timings_per_token", &call.shape.timings);
  f.boolean("return_progress", &call.shape.progress);
  read_stream_options(f, limits, call.shape);
  read_grammar(f, in.request.grammar);
  read_said(f, in.said);
  for (const auto& [name, why, usual] : kUnserved) f.unserved(name, why, usual);
  read_identity(f, in);
  read_cut(f, call);
  f.boolean("return_token_ids", &call.shape.token_ids);
  in.request.every_token = call.shape.token_ids;  // also the one that ended the answer
  call.shape.ids_as_tokens = limits.return_tokens_as_token_ids;
  f.boolean("return_tokens_as_token_ids", &call.shape.ids_as_tokens);
  call.shape.metrics = limits.enable_per_request_metrics;
  read_transfer(f, call);
  std::string tier;
  f.enumeration("service_tier", &tier, {"auto", "default"});
}

}  // namespace

void read_prompts(Fields& f, const char* name, int most_prompts, std::vector<PromptInput>& out) {
  const Json* prompt = f.raw(name);
  if (!prompt) return f.fail(name, "is missing; give a string, a list of strings, or token ids");
  const auto most = static_cast<size_t>(most_prompts);
  auto is_ids = [](const Json& j) { return j.is_array() && !j.empty() && j[0].is_number(); };
  if (is_ids(*prompt)) {
    TokensInput ids;
    f.integers(name, &ids);
    out.emplace_back(std::move(ids));
  } else if (prompt->is_array() && !prompt->empty() && is_ids((*prompt)[0])) {
    if (prompt->size() > most) return f.fail(name, cat("has ", prompt->size(), " entries; the limit is ", most));
    for (const Json& one : *prompt) {
      Json object{{name, one}};
      Fields inner(object);
      TokensInput ids;
      inner.integers(name, &ids);
      if (Status s = inner.finish(); !s.ok()) return f.fail(name, "must be all of one kind: " + s.message());
      out.emplace_back(std::move(ids));
    }
  } else {
    std::vector<std::string> texts;
    f.strings(name, &texts, most);
    for (std::string& t : texts) out.emplace_back(TextInput{std::move(t)});
  }
  if (f.ok() && out.empty()) f.fail(name, "is empty");
}

namespace {

Result<OpenAiCall> parse_conversations(std::string_view body, const ServerOptions& limits, bool several) {
  KVASIR_ASSIGN(Json json, parse_json(body));
  drop_unset_length(json);
  Fields f(json);
  OpenAiCall call;
  GenerateInput& in = call.input;
  in.protocol = "openai.chat";
  in.wire = Wire::chat;
  call.shape.chat = true;
  read_common(f, limits, call);
  f.boolean("verbose", &call.shape.verbose);
  bool logprobs = false;
  f.boolean("logprobs", &logprobs);
  if (!logprobs && f.has("top_logprobs")) f.fail("top_logprobs", "is only allowed with logprobs: true");
  if (logprobs && !f.has("top_logprobs")) in.request.sampling.logprobs = 0;
  std::string format;  // llama-server's: where thoughts go
  f.enumeration("reasoning_format", &format, {"auto", "deepseek"});
  bool thoughts = true;
  if (f.boolean("include_reasoning", &thoughts)) call.shape.hide_reasoning = !thoughts;
  for (const auto& [name, tells] :
       {std::pair("logprobs", logprobs), std::pair("return_token_ids", call.shape.token_ids)})
    if (!thoughts && tells)
      f.fail("include_reasoning",
             cat("is false, but ", name, " would tell the thoughts' tokens; leave one of them out"));
  f.boolean("echo", &call.echo);
  if (several) {
    call.shape.conversations = true;
    if (call.shape.stream) f.fail("stream", "is true; an answer to several conversations comes whole");
    if (in.request.n != 1) f.fail("n", cat("is ", in.request.n, "; each of several conversations has one answer"));
    if (in.request.beams) f.fail("use_beam_search", "is of one conversation; send each by itself");
    f.unserved("tools", "send each conversation by itself");
    f.unserved("tool_choice", "send each conversation by itself", "\"none\"");
    read_chats(f, limits, call);
  } else {
    read_chat(f, limits, call);
  }
  take_forwarded(f, call);
  KVASIR_TRY(f.finish());
  call.shape.prompt_logprobs = in.request.prompt_logprobs >= 0;
  call.shape.logprobs = in.request.sampling.logprobs;
  call.shape.choices = call.shape.best_of = in.request.n;
  in.choices_of_call = int64_t(in.request.n) * static_cast<int64_t>(call.prompts.size());
  return call;
}

}  // namespace

Result<OpenAiCall> parse_chat(std::string_view body, const ServerOptions& limits) {
  return parse_conversations(body, limits, false);
}

Result<OpenAiCall> parse_chats(std::string_view body, const ServerOptions& limits) {
  return parse_conversations(body, limits, true);
}

Result<OpenAiCall> parse_completion(std::string_view body, const ServerOptions& limits) {
  KVASIR_ASSIGN(Json json, parse_json(body));
  drop_unset_length(json);
  Fields f(json);
  OpenAiCall call;
  GenerateInput& in = call.input;
  engine::Request& r = in.request;
  in.protocol = "openai.completions";
  in.wire = Wire::completions;
  read_common(f, limits, call);
  in.default_max_tokens = 16;  // OpenAI's
  f.boolean("echo", &call.echo);
  call.shape.prompt_logprobs = r.prompt_logprobs >= 0;
  if (call.echo) r.prompt_logprobs = std::max(r.prompt_logprobs, r.sampling.logprobs);
  call.shape.choices = call.shape.best_of = r.n;
  int64_t best_of = r.n;
  if (f.integer("best_of", &best_of) && r.n >= 1) {  // later the engine is asked for best_of of them
    if (best_of < r.n) f.fail("best_of", cat("is ", best_of, "; it must be at least n, which is ", r.n));
    if (call.shape.stream && best_of > r.n) f.fail("best_of", "above n cannot be streamed");
    set_integer(parameter("n"), best_of, in);
    call.shape.best_of = r.n;
  }
  read_prompts(f, "prompt", limits.max_choices, call.prompts);
  take_forwarded(f, call);
  KVASIR_TRY(f.finish());
  call.shape.logprobs = r.sampling.logprobs;
  call.shape.special_shown = !r.skip_special;
  if (call.shape.best_of > call.shape.choices && r.sampling.logprobs < 0)
    r.sampling.logprobs = 0;  // what best is measured by
  in.choices_of_call = int64_t(r.n) * static_cast<int64_t>(call.prompts.size());
  return call;
}

}  // namespace kvasir::server::http
