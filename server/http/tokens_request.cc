#include "server/http/tokens_request.h"

#include "core/cat.h"
#include "server/http/llama_fields.h"
#include "server/http/openai_chat_fields.h"
#include "server/parameters.h"

namespace kvasir::server::http {
namespace {

// What is beside sampling_params, not in it.
bool of_request(const Parameter& p) {
  const std::string_view name = p.name;
  return name == "priority" || name == "cache_salt";
}

constexpr struct {
  const char *name, *why;
} kUnserved[] = {
    {"extra_args", "this server does not move caches between machines"},
    {"logits_processors", "use logit_bias, or structured_outputs"},
    {"truncate_prompt_tokens", "shorten token_ids"},
};

Status read_sampling(const Json* given, GenerateInput& in) {
  if (!given) return {};
  Fields f(*given, "sampling_params");
  if (!f.ok()) return f.finish();
  f.parameters(in);
  read_grammar(f, in.request.grammar);
  for (const auto& [name, why] : kUnserved) f.unserved(name, why);
  // False would let a stop text pass unseen; they are looked for whatever it says.
  pass_over(f, {"detokenize", "output_kind", "skip_clone", "spaces_between_special_tokens", "flat_logprobs"},
            "ids are what is answered");
  return f.finish();
}

void read_stream(Fields& f, TokensShape& shape) {
  f.boolean("stream", &shape.stream);
  const Json* options = f.raw("stream_options");
  if (!options) return;
  Fields inner(*options, "stream_options");
  inner.boolean("include_usage", &shape.include_usage);
  inner.boolean("continuous_usage_stats", &shape.usage_so_far);
  if (Status s = inner.finish(); !s.ok()) f.fail("stream_options", "is wrong: " + s.message());
  if (!shape.stream) f.fail("stream_options", "is only allowed with stream: true");
}

}  // namespace

Result<TokensCall> parse_tokens(std::string_view body, const ServerOptions& limits) {
  KVASIR_ASSIGN(Json json, parse_json(body));
  Fields f(json);
  TokensCall call;
  GenerateInput& in = call.input;
  in.protocol = "vllm.tokens";
  in.wire = Wire::completions;
  in.request.sampling = limits.sampling;
  f.string("request_id", &in.request.id);
  f.string("model", &in.model);
  read_stream(f, call.shape);
  TokensInput ids;
  if (!f.integers("token_ids", &ids)) f.fail("token_ids", "is missing; give a list of token ids");
  in.prompt = std::move(ids);
  int64_t priority = 0;
  std::string salt;
  if (f.integer("priority", &priority)) set_integer(parameter("priority"), priority, in);
  if (f.string("cache_salt", &salt)) in.request.cache_salt = salt;
  f.unserved("features", "this model reads text only");
  f.unserved("kv_transfer_params", "this server does not move caches between machines");
  const Json* sampling = f.raw("sampling_params");
  KVASIR_TRY(f.finish());
  KVASIR_TRY(read_sampling(sampling, in));
  // Ids are all that were drawn, what ended them too; only stop texts need the text.
  in.request.include_stop = true;
  in.request.detokenize = !in.request.stop_strings.empty() || !in.request.stop_regex.empty();
  call.shape.logprobs = in.request.sampling.logprobs >= 0;
  call.shape.prompt_logprobs = in.request.prompt_logprobs >= 0;
  call.shape.choices = in.request.n;
  call.shape.stop_tokens = in.request.stop_tokens;
  return call;
}

namespace {

Json constraint(const text::GrammarSpec& grammar) {
  using Kind = text::GrammarSpec::Kind;
  switch (grammar.kind) {
    case Kind::json_object: return {{"json_object", true}};
    case Kind::json_schema: return {{"json", grammar.text}};
    case Kind::regex: return {{"regex", grammar.text}};
    case Kind::lark: return {{"grammar", grammar.text}};
    case Kind::choice: return {{"choice", grammar.choices}};
    case Kind::structural_tag: return {{"structural_tag", grammar.text}};
    case Kind::none:
    case Kind::tool_calls: return nullptr;  // the calls of a chat's tools have no name there
  }
  return nullptr;
}

}  // namespace

Json tokens_request(const Json& body, const GenerateInput& input, const std::vector<int32_t>& prompt,
                    const std::string& model) {
  Json out = {{"token_ids", prompt}, {"model", model}};
  Json sampling = Json::object();
  for (const auto& [name, value] : body.items()) {
    const Parameter* p = find_parameter(input.wire, name).row;
    if (!p || value.is_null() || std::string_view(p->name) == "logprobs") continue;
    (of_request(*p) ? out : sampling)[name_on(Wire::completions, *p)] = value;
  }
  const int32_t logprobs = input.request.sampling.logprobs;
  if (logprobs >= 0) sampling["logprobs"] = logprobs == kAllLogprobs ? -1 : logprobs;
  if (input.default_max_tokens > 0 && !sampling.contains("max_tokens"))
    sampling["max_tokens"] = input.default_max_tokens;
  if (Json outputs = constraint(input.request.grammar); !outputs.is_null()) sampling["structured_outputs"] = outputs;
  out["sampling_params"] = std::move(sampling);
  if (!input.request.id.empty()) out["request_id"] = input.request.id;
  for (const char* name : {"stream", "stream_options"})
    if (auto it = body.find(name); it != body.end()) out[name] = *it;
  return out;
}

}  // namespace kvasir::server::http
