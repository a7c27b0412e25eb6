#include "server/http/sglang_request.h"

#include "core/cat.h"
#include "server/http/fields.h"
#include "server/http/llama_fields.h"
#include "server/http/openai_chat_fields.h"
#include "server/parameters.h"

namespace kvasir::server::http {
namespace {

constexpr int64_t kUsualLength = 128;  // SGLang's max_new_tokens

// One text or list of ids, or a list of them.
Status read_prompts(Fields& f, const ServerOptions& limits, SglangCall& call) {
  const Json *text = f.raw("text"), *ids = f.raw("input_ids");
  if ((text != nullptr) == (ids != nullptr)) return wrong("text", "or input_ids must be given, and not both");
  const Json& given = text ? *text : *ids;
  const char* field = text ? "text" : "input_ids";
  call.shape.batch = given.is_array() && (text || (!given.empty() && given[0].is_array()));
  auto one = [&](const Json& prompt) -> Status {
    GenerateInput& input = call.inputs.emplace_back();
    if (text) {
      if (!prompt.is_string()) return wrong(field, cat("has ", shown(prompt), "; it must be a string"));
      input.prompt = TextInput{prompt.get<std::string>()};
      return {};
    }
    if (!prompt.is_array()) return wrong(field, cat("has ", shown(prompt), "; it must be a list of token ids"));
    TokensInput tokens;
    for (const Json& id : prompt)
      if (!whole_number(id, &tokens.emplace_back()))
        return wrong(field, cat("has ", shown(id), "; token ids are whole numbers"));
    input.prompt = std::move(tokens);
    return {};
  };
  if (!call.shape.batch) return one(given);
  if (given.empty()) return wrong(field, "is empty");
  if (given.size() > size_t(limits.max_choices))
    return wrong(field, cat("has ", given.size(), " entries; the limit is ", limits.max_choices));
  for (const Json& prompt : given) KVASIR_TRY(one(prompt));
  return {};
}

// A field that is one for all prompts, or a list of one each.
Result<const Json*> of_prompt(const Json* field, const char* name, size_t i, size_t prompts) {
  if (!field || !field->is_array()) return field;
  if (field->size() != prompts)
    return wrong(name, cat("has ", field->size(), " entries; there are ", prompts, " prompts"));
  return (*field)[i].is_null() ? nullptr : &(*field)[i];
}

constexpr struct {
  const char *name, *why, *usual = "false";
} kUnservedSampling[] = {
    {"spaces_between_special_tokens", "text is what the tokens say", "true"},
    {"custom_params", "there are no processors to give them to", "{}"},
};

Status read_sampling(const Json* given, const std::string& where, const ServerOptions& limits, GenerateInput& in) {
  in.protocol = "sglang";
  in.wire = Wire::sglang;
  in.request.sampling = limits.sampling;
  in.default_max_tokens = kUsualLength;
  if (!given) return {};
  Fields f(*given, where);
  if (f.ok()) f.parameters(in);
  text::GrammarSpec& grammar = in.request.grammar;
  read_grammar(f, grammar);
  std::string tag;
  if (f.string("structural_tag", &tag)) {
    if (grammar.kind != text::GrammarSpec::Kind::none)
      f.fail("structural_tag", "is a second constraint; a request has one");
    grammar = {text::GrammarSpec::Kind::structural_tag, tag, {}};
  }
  for (const auto& [name, why, usual] : kUnservedSampling) f.unserved(name, why, usual);
  pass_over(f, {"stream_interval"}, "a reader that is behind gets several tokens at once");
  return f.finish();
}

// What is to be said of the tokens of one prompt and its answer.
Status read_logprobs(Fields& f, size_t i, size_t prompts, GenerateInput& in, SglangShape::Prompt& shape) {
  bool wanted = false;
  int64_t from = -1, others = 0;
  for (const char* name : {"return_logprob", "logprob_start_len", "top_logprobs_num"}) {
    KVASIR_ASSIGN(const Json* value, of_prompt(f.raw(name), name, i, prompts));
    if (!value) continue;
    const std::string_view what = name;
    if (what == "return_logprob") {
      if (!value->is_boolean()) return wrong(name, cat("is ", shown(*value), "; it must be true or false"));
      wanted = value->get<bool>();
    } else if (!whole_number(*value, what == "logprob_start_len" ? &from : &others)) {
      return wrong(name, cat("is ", shown(*value), "; it must be a whole number"));
    }
  }
  if (!wanted) return {};
  shape.logprobs = true;
  shape.others = others > 0;
  shape.from = from;
  set_integer(parameter("logprobs"), others, in);
  if (from >= 0) in.request.prompt_logprobs = in.request.sampling.logprobs;
  return {};
}

constexpr struct {
  const char *name, *why;
} kUnserved[] = {
    {"image_data", "this model reads text only"},
    {"audio_data", "this model reads text only"},
    {"video_data", "this model reads text only"},
    {"input_embeds", "send text or input_ids"},
    {"token_ids_logprob", "use top_logprobs_num"},
    {"return_hidden_states", "hidden states are not sent; log-probabilities are"},
    {"session_params", "send the whole prompt; what it shares with another is in the cache"},
    {"custom_logit_processor", "use logit_bias, or a constraint such as regex"},
    {"background", "keep the call open, or stream it"},
};

}  // namespace

Result<SglangCall> parse_sglang(std::string_view body, const ServerOptions& limits) {
  KVASIR_ASSIGN(Json json, parse_json(body));
  Fields f(json);
  SglangCall call;
  std::string model, adapter, salt;
  int64_t priority = 0, choices = 0;
  f.string("model", &model);
  f.string("lora_path", &adapter);  // an adapter's name
  f.boolean("stream", &call.shape.stream);
  f.boolean("return_text_in_logprobs", &call.shape.texts);
  f.string("extra_key", &salt);
  f.integer("priority", &priority);
  for (const auto& [name, why] : kUnserved) f.unserved(name, why);
  pass_over(f, {"log_metrics"}, "every request is counted");
  if (!f.ok()) return f.finish();
  KVASIR_TRY(read_prompts(f, limits, call));
  const size_t prompts = call.inputs.size();
  const Json *sampling = f.raw("sampling_params"), *ids = f.raw("rid");
  for (size_t i = 0; i < prompts; ++i) {
    GenerateInput& in = call.inputs[i];
    SglangShape::Prompt& shape = call.shape.prompts.emplace_back();
    KVASIR_ASSIGN(const Json* own, of_prompt(sampling, "sampling_params", i, prompts));
    const bool listed = sampling && sampling->is_array();
    KVASIR_TRY(read_sampling(own, listed ? cat("sampling_params[", i, ']') : "sampling_params", limits, in));
    KVASIR_TRY(read_logprobs(f, i, prompts, in, shape));
    KVASIR_ASSIGN(const Json* id, of_prompt(ids, "rid", i, prompts));
    if (id && !id->is_string())
      return wrong("rid", cat("is ", shown(*id), "; it must be a string, or one for each prompt"));
    if (id) in.request.id = id->get<std::string>();
    in.model = model;
    in.request.adapter = adapter;
    if (!salt.empty()) in.request.cache_salt = salt;
    if (priority != 0) set_integer(parameter("priority"), priority, in);
    shape.choices = in.request.n;
    choices += in.request.n;
  }
  KVASIR_TRY(f.finish());
  for (GenerateInput& in : call.inputs) in.choices_of_call = choices;
  return call;
}

}  // namespace kvasir::server::http
