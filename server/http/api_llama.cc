// llama-server's own routes.
#include "core/cat.h"
#include "server/http/api.h"
#include "server/http/error_body.h"
#include "server/http/infill.h"
#include "server/http/llama_request.h"
#include "server/http/openai_request.h"

namespace kvasir::server::http {
namespace {

using Json = nlohmann::ordered_json;

HttpResponse json_response(const Json& value) {
  HttpResponse r;
  r.body = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return r;
}

}  // namespace

Reply Api::llama_completion(const HttpRequest& request, const Caller& caller) {
  const auto tokenizer = services_.engine().tokenizer();
  auto call =
      services_.read(caller, "llama.completion", parse_llama(request.body, services_.options(), tokenizer.get()));
  if (!call.ok()) return error_response(call.status());
  return llama_generate(request, caller, *std::move(call));
}

Reply Api::llama_infill(const HttpRequest& request, const Caller& caller) {
  const auto tokenizer = services_.engine().tokenizer();
  auto call = services_.read(caller, "llama.infill", parse_infill(request.body, services_.options(), tokenizer.get()));
  if (!call.ok()) return error_response(call.status());
  return llama_generate(request, caller, *std::move(call));
}

Reply Api::llama_generate(const HttpRequest& request, const Caller& caller, LlamaCall call) {
  auto sent = send(request, caller, for_each_prompt(call.input, std::move(call.prompts)));
  if (!sent.ok()) return error_response(sent.status());
  LlamaShape& shape = call.shape;
  shape.tokenizer = services_.engine().tokenizer();
  for (const std::vector<int32_t>& prompt : sent->prompts) {
    shape.prompt_tokens.push_back(int64_t(prompt.size()));
    auto text = shape.tokenizer ? shape.tokenizer->decode(prompt, false) : Result<std::string>("");
    if (!text.ok()) return error_response(text.status());
    shape.prompts.push_back(*std::move(text));
  }
  shape.model = std::move(sent->model);
  auto headers = headers_of(request, caller, sent->streams[0]->id());
  return llama_reply(std::move(shape), std::move(sent->streams), std::move(headers));
}

Reply Api::apply_template(const HttpRequest& request, const Caller& caller) {
  auto call = services_.read(caller, "openai.other", parse_chat(request.body, services_.options()));
  if (!call.ok()) return error_response(call.status());
  auto text = services_.render(caller, call->input.model, std::get<ChatInput>(call->prompts[0]));
  if (!text.ok()) return error_response(text.status());
  return json_response({{"prompt", *text}});
}

Reply Api::props(const HttpRequest&, const Caller&) {
  if (Status s = services_.check_model(""); !s.ok()) return error_response(s);
  const engine::Engine& engine = services_.engine();
  const ServerOptions& options = services_.options();
  engine::Request unset;
  unset.sampling = options.sampling;
  if (options.seed >= 0) unset.sampling.seed = uint64_t(options.seed);
  const auto tokenizer = engine.tokenizer();
  const auto chat_template = engine.chat_template();
  auto text = [&](int32_t id) { return tokenizer && id >= 0 ? tokenizer->token_text(id) : std::string(); };
  const auto* ends = tokenizer ? &tokenizer->end_of_generation() : nullptr;
  return json_response({{"default_generation_settings",
                         {{"id", 0}, {"n_ctx", engine.info().context_length}, {"params", llama_settings(unset)}}},
                        {"total_slots", options.max_running},
                        {"model_alias", services_.model_name()},
                        {"model_path", options.model_path.empty() ? engine.info().name : options.model_path},
                        {"modalities", {{"vision", false}, {"audio", false}}},
                        {"chat_template", chat_template ? chat_template->source() : ""},
                        {"bos_token", text(tokenizer ? tokenizer->bos() : -1)},
                        {"eos_token", text(ends && !ends->empty() ? ends->front() : -1)},
                        {"infill", tokenizer && fills_gaps(*tokenizer)},
                        {"build_info", "kvasir-" KVASIR_VERSION}});
}

// As many as may run; which of them is whose is not told.
Reply Api::slots(const HttpRequest& request, const Caller&) {
  if (!services_.options().slots)
    return error_response(unimplemented("/slots is turned off on this server; start it without --no-slots"));
  if (Status s = services_.check_model(""); !s.ok()) return error_response(s);
  const int64_t running = services_.engine().stats().running, all = services_.options().max_running;
  if (request.query.find("fail_on_no_slot=1") != std::string::npos && running >= all)
    return error_response(unavailable(cat("all of ", all, " requests that may run do")));
  Json list = Json::array();
  for (int64_t i = 0; i < all; ++i)
    list.push_back({{"id", i}, {"n_ctx", services_.engine().info().context_length}, {"is_processing", i < running}});
  return json_response(list);
}

}  // namespace kvasir::server::http
