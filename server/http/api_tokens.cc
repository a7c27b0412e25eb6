// Tokens in, tokens out, as vLLM has it: what a request's token ids are, and an answer to token ids. Routers ask the
// first to see which server has a prompt's prefix.
#include "server/http/api.h"
#include "server/http/error_body.h"
#include "server/http/openai_request.h"
#include "server/http/tokens_request.h"

namespace kvasir::server::http {

Reply Api::tokens_generate(const HttpRequest& request, const Caller& caller) {
  auto call = services_.read(caller, "vllm.tokens", parse_tokens(request.body, services_.options()));
  if (!call.ok()) return error_response(call.status());
  if (Status s = carry(request, caller, call->input); !s.ok()) return error_response(s);
  TokensShape& shape = call->shape;
  shape.tokenizer = services_.engine().tokenizer();
  if (shape.prompt_logprobs && !shape.tokenizer)
    return error_response(
        failed_precondition("prompt_logprobs tells each token's text, and this model came without a tokenizer")
            .with_field("prompt_logprobs"));
  auto submitted = services_.generate(caller, std::move(call->input));
  if (!submitted.ok()) {
    const Status& why = submitted.status();
    return error_response(why.field() == "prompt" ? Status(why).with_field("token_ids") : why);
  }
  shape.prompt = int64_t(submitted->prompt.size());
  shape.id = submitted->stream->id();
  shape.model = submitted->model;
  shape.created = unix_seconds();
  auto headers = headers_of(request, caller, shape.id);
  return tokens_reply(std::move(shape), std::move(submitted->stream), std::move(headers));
}

Reply Api::render_completion(const HttpRequest& request, const Caller& caller) {
  auto call = services_.read(caller, "openai.completions", parse_completion(request.body, services_.options()));
  if (!call.ok()) return error_response(call.status());
  return render(request, caller, *std::move(call));
}

Reply Api::render_chat(const HttpRequest& request, const Caller& caller) {
  auto call = services_.read(caller, "openai.chat", parse_chat(request.body, services_.options()));
  if (!call.ok()) return error_response(call.status());
  return render(request, caller, *std::move(call));
}

// One request for a chat, a list of them for texts. What would be refused of an answer is refused here.
Reply Api::render(const HttpRequest& request, const Caller& caller, OpenAiCall call) {
  prepare_tools(services_, call.tools, call.input.request);
  auto body = parse_json(request.body);
  if (!body.ok()) return error_response(body.status());
  if (Status s = carry(request, caller, call.input); !s.ok()) return error_response(s);
  if (Status s = cut_prompts(services_, call); !s.ok())
    return error_response(services_.refuse(caller, call.input.protocol, s));
  // The ids are for whoever would have answered: an adapter, by its name.
  std::string model = call.input.request.adapter;
  if (model.empty())
    model = services_.engine().has_adapter(call.input.model) ? call.input.model : services_.model_name();
  Json all = Json::array();
  for (GenerateInput& input : for_each_prompt(call.input, std::move(call.prompts))) {
    auto ids = services_.prompt(caller, input);
    if (!ids.ok()) return error_response(ids.status());
    all.push_back(tokens_request(*body, input, *ids, model));
  }
  HttpResponse r;
  r.body = (call.shape.chat ? all[0] : all).dump();
  return r;
}

}  // namespace kvasir::server::http
