// /v1/embeddings: texts in, a vector for each out.
#include "core/cat.h"
#include "server/http/api.h"
#include "server/http/error_body.h"
#include "server/http/fields.h"
#include "server/http/openai_request.h"
#include "server/http/pooled_reply.h"
#include "server/json_text.h"

namespace kvasir::server::http {
namespace {

Result<PooledCall> parse_embeddings(std::string_view body, const ServerOptions& limits) {
  KVASIR_ASSIGN(Json json, parse_json(body));
  Fields f(json);
  PooledCall call;
  GenerateInput& in = call.input;
  in.protocol = "openai.embeddings";
  in.wire = Wire::embeddings;
  f.string("model", &in.model);
  f.parameters(in);
  read_said(f, in.said);
  f.string("request_id", &in.request.id);
  bool add_special = true;  // vLLM's
  f.boolean("add_special_tokens", &add_special);
  std::string format = "float";
  f.enumeration("encoding_format", &format, {"float", "base64"});
  f.unserved("truncate_prompt_tokens", "shorten the input: /tokenize says its length");
  f.unserved("messages", "send input; /tokenize says what messages become");
  std::vector<PromptInput> inputs;
  read_prompts(f, "input", limits.max_inputs, inputs);
  KVASIR_TRY(f.finish());
  for (PromptInput& input : inputs) {
    if (auto* text = std::get_if<TextInput>(&input)) text->add_special = add_special, text->parse_special = false;
    call.prompts.push_back({std::move(input)});
  }
  call.body = [base64 = format == "base64"](const engine::Finished& all, const std::string& model, const std::string&) {
    std::string out = "{\"object\":\"list\",\"data\":[";
    for (size_t i = 0; i < all.pooled.size(); ++i) {
      out += cat(i > 0 ? "," : "", "{\"object\":\"embedding\",\"index\":", i, ",\"embedding\":");
      if (base64) out += '"', append_base64(out, all.pooled[i]), out += '"';
      if (!base64) append_vector(out, all.pooled[i]);
      out += '}';
    }
    return out + cat("],\"model\":", json_string(model), ",\"usage\":{\"prompt_tokens\":", all.usage.prompt_tokens,
                     ",\"total_tokens\":", all.usage.prompt_tokens, "}}");
  };
  return call;
}

}  // namespace

Reply Api::embeddings(const HttpRequest& request, const Caller& caller) {
  auto call = services_.read(caller, "openai.embeddings", parse_embeddings(request.body, services_.options()));
  if (!call.ok()) return error_response(call.status());
  return pool(request, caller, *std::move(call));
}

Reply Api::pool(const HttpRequest& request, const Caller& caller, PooledCall call) {
  if (Status s = carry(request, caller, call.input); !s.ok()) return call.refuse(s);
  auto submitted = services_.pool(caller, std::move(call.input), std::move(call.prompts));
  if (!submitted.ok()) return call.refuse(submitted.status());
  const std::string id = submitted->stream->id();
  auto write = [body = std::move(call.body), model = submitted->model, id](const engine::Finished& all) {
    return body(all, model, id);
  };
  return pooled_reply(std::move(submitted->stream), std::move(write), headers_of(request, caller, id), call.refuse);
}

}  // namespace kvasir::server::http
