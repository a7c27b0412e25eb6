// SGLang's routes that generate, and what it tells of itself.
#include "server/http/api.h"
#include "server/http/error_body.h"
#include "server/http/sglang_request.h"

namespace kvasir::server::http {

using Json = nlohmann::ordered_json;

Reply Api::sglang_generate(const HttpRequest& request, const Caller& caller) {
  auto call = services_.read(caller, "sglang", parse_sglang(request.body, services_.options()));
  if (!call.ok()) return error_response(call.status());
  auto sent = send(request, caller, std::move(call->inputs));
  if (!sent.ok()) return error_response(sent.status());
  SglangShape& shape = call->shape;
  for (size_t i = 0; i < sent->streams.size(); ++i) {
    shape.prompts[i].tokens = int64_t(sent->prompts[i].size());
    shape.prompts[i].id = sent->streams[i]->id();
  }
  shape.tokenizer = services_.engine().tokenizer();
  auto headers = headers_of(request, caller, sent->streams[0]->id());
  return sglang_reply(std::move(shape), std::move(sent->streams), std::move(headers));
}

Reply Api::model_info(const HttpRequest&, const Caller&) {
  if (Status s = services_.check_model(""); !s.ok()) return error_response(s);
  const std::string name = services_.model_name();
  HttpResponse r;
  r.body = Json{{"model_path", name},
                {"tokenizer_path", name},
                {"is_generation", !services_.engine().info().encoder},
                {"model_type", services_.engine().info().architecture}}
               .dump();
  return r;
}

Reply Api::server_info(const HttpRequest&, const Caller&) {
  if (Status s = services_.check_model(""); !s.ok()) return error_response(s);
  const engine::Stats stats = services_.engine().stats();
  const ServerOptions& options = services_.options();
  HttpResponse r;
  r.body = Json{{"version", KVASIR_VERSION},
                {"model_path", services_.model_name()},
                {"served_model_name", services_.model_name()},
                {"context_length", services_.engine().info().context_length},
                {"max_running_requests", options.max_running},
                {"max_total_num_tokens", stats.pages_total * options.page_size},
                {"page_size", options.page_size},
                {"kv_cache_dtype", stats.kv_type}}
               .dump();
  return r;
}

}  // namespace kvasir::server::http
