#include "server/http/api.h"

#include <algorithm>
#include <new>

#include "core/cat.h"
#include "core/log.h"
#include "server/http/error_body.h"
#include "server/http/messages_reply.h"
#include "server/http/ollama_reply.h"
#include "server/http/page.h"
#include "server/json_text.h"

namespace kvasir::server::http {

// Who may call a path (nobody is asked for a key where `open`, and nothing that is open waits for the workers), and
// whose it is: clients made for that server find it.
struct Api::Route {
  const char* method;
  const char* path;  // one that ends with '/' has a name after it
  bool open;
  Role role;
  Reply (Api::*handler)(const HttpRequest&, const Caller&);
  const char* whose;
  const char* what;
  const char* costs = nullptr;  // for the log: what the key's limits are asked for before the body is read
};

const std::vector<Api::Route>& Api::routes() {
  constexpr Role user = Role::user, metrics = Role::metrics, admin = Role::admin;
  static const std::vector<Route> routes = {
      {"GET", "/", true, user, &Api::page, "kvasir", "the web page"},
      {"GET", "/health", true, user, &Api::health, "all", "200 while steps are made"},
      {"GET", "/ready", true, user, &Api::ready, "kvasir", "200 while requests are taken"},
      {"GET", "/metrics", false, metrics, &Api::metrics, "all", "Prometheus"},
      {"GET", "/stats", false, metrics, &Api::stats, "kvasir", "the page's JSON"},
      {"GET", "/v1/models", false, user, &Api::models, "OpenAI", "the model that is served, and its adapters"},
      {"GET", "/v1/models/", false, user, &Api::models, "OpenAI", "the same by its name"},
      {"POST", "/v1/load_lora_adapter", false, admin, &Api::load_adapter, "vLLM",
       "`lora_name`, `lora_path`: an adapter of the server's disk, to be asked for by that name"},
      {"POST", "/v1/unload_lora_adapter", false, admin, &Api::unload_adapter, "vLLM",
       "`lora_name`: no new request may have it; those that run keep it to their end"},
      {"POST", "/v1/chat/completions", false, user, &Api::chat, "OpenAI",
       "messages in, an answer out; streamed or whole", "openai.chat"},
      {"POST", "/v1/completions", false, user, &Api::completions, "OpenAI", "a text goes on", "openai.completions"},
      {"POST", "/v1/messages", false, user, &Api::messages, "Anthropic",
       "messages in, an answer out; streamed or whole", "anthropic.messages"},
      {"POST", "/v1/messages/count_tokens", false, user, &Api::count_tokens, "Anthropic",
       "how long the prompt would be", "anthropic.messages"},
      {"POST", "/v1/responses", false, user, &Api::responses, "OpenAI", "items in, items out; streamed or whole",
       "openai.responses"},
      {"GET", "/v1/responses/", false, user, &Api::kept_response, "OpenAI",
       "one that is kept; `/input_items` behind it are what it answers; `?stream=true` are its events"},
      {"DELETE", "/v1/responses/", false, user, &Api::kept_response, "OpenAI", "forget it"},
      {"POST", "/v1/responses/", false, user, &Api::kept_response, "OpenAI",
       "`/cancel`: end one that is made in the background"},
      {"POST", "/v1/embeddings", false, user, &Api::embeddings, "OpenAI", "texts or token ids to vectors",
       "openai.embeddings"},
      {"POST", "/v1/rerank", false, user, &Api::rerank, "vLLM, Jina",
       "`documents` by how they answer a `query`, the best first", "rerank"},
      {"POST", "/v1/score", false, user, &Api::score, "vLLM", "a score for each pair of `text_1` and `text_2`",
       "score"},
      {"POST", "/tokenize", false, user, &Api::tokenize, "vLLM, llama-server",
       "`prompt` or `content` to `tokens`, or `messages` as chat would send them (`tools`, `documents`, "
       "`chat_template_kwargs`)",
       "tokenize"},
      {"POST", "/detokenize", false, user, &Api::detokenize, "vLLM, llama-server", "`tokens` to `prompt` and `content`",
       "detokenize"},
      {"GET", "/tokenizer_info", false, user, &Api::tokenizer_info, "vLLM",
       "tokenizer_config.json: class, special tokens, the longest text, the chat template"},
      {"POST", "/drain", false, admin, &Api::drain, "kvasir", "what SIGTERM does"},
      {"GET", "/version", true, user, &Api::version, "vLLM", "of this server"},
      {"POST", "/v1/chat/completions/render", false, user, &Api::render_chat, "vLLM",
       "the token ids and the request of `/inference/v1/generate` that a chat would be (a forced call's form is not in "
       "it)",
       "openai.chat"},
      {"POST", "/v1/completions/render", false, user, &Api::render_completion, "vLLM", "the same of each prompt",
       "openai.completions"},
      {"POST", "/v1/chat/completions/batch", false, user, &Api::chats, "vLLM",
       "`messages` is a list of conversations, the answer has a choice for each; no tools, not streamed",
       "openai.chat"},
      {"POST", "/invocations", false, user, &Api::invocations, "SageMaker",
       "chat, completions, embeddings, rerank or score, by what the body holds", "openai.chat"},
      {"POST", "/inference/v1/generate", false, user, &Api::tokens_generate, "vLLM", "token ids in, token ids out",
       "vllm.tokens"},
      {"GET", "/load", false, metrics, &Api::load, "vLLM", "requests that run or wait"},
      {"GET", "/ping", true, user, &Api::health, "vLLM", "`/health`"},
      {"GET", "/v1/health", true, user, &Api::health, "llama-server", "`/health`"},
      {"GET", "/models", false, user, &Api::models, "llama-server", "`/v1/models`"},
      {"POST", "/chat/completions", false, user, &Api::chat, "llama-server", "`/v1/chat/completions`", "openai.chat"},
      {"POST", "/chat/completions/input_tokens", false, user, &Api::input_tokens, "llama-server",
       "how long the prompt of a chat would be", "openai.chat"},
      {"POST", "/v1/chat/completions/input_tokens", false, user, &Api::input_tokens, "llama-server", "the same",
       "openai.chat"},
      {"POST", "/responses", false, user, &Api::responses, "llama-server", "`/v1/responses`", "openai.responses"},
      {"POST", "/completion", false, user, &Api::llama_completion, "llama-server", "a text goes on; one or several",
       "llama.completion"},
      {"POST", "/completions", false, user, &Api::llama_completion, "llama-server", "`/completion`",
       "llama.completion"},
      {"GET", "/v1/stream", false, user, &Api::kept_stream, "llama-server",
       "`?conv_id=`: the stream of a chat that was asked for with the header X-Conversation-Id, from byte `from` on, "
       "as "
       "it is and as it goes on"},
      {"DELETE", "/v1/stream", false, user, &Api::kept_stream, "llama-server", "end it and forget it"},
      {"POST", "/infill", false, user, &Api::llama_infill, "llama-server", "a gap is filled", "llama.infill"},
      {"POST", "/apply-template", false, user, &Api::apply_template, "llama-server",
       "messages as the template writes them", "tokenize"},
      {"GET", "/props", false, user, &Api::props, "llama-server", "what is served, and what a request leaves unset"},
      {"GET", "/slots", false, metrics, &Api::slots, "llama-server",
       "how many requests run beside how many may; `fail_on_no_slot`"},
      {"POST", "/generate", false, user, &Api::sglang_generate, "SGLang", "a text or ids go on; one or several",
       "sglang"},
      {"POST", "/embeddings", false, user, &Api::embeddings, "llama-server", "`/v1/embeddings`", "openai.embeddings"},
      {"POST", "/rerank", false, user, &Api::rerank, "vLLM, llama-server", "`/v1/rerank`", "rerank"},
      {"POST", "/v2/rerank", false, user, &Api::rerank, "Cohere", "`/v1/rerank`", "rerank"},
      {"POST", "/score", false, user, &Api::score, "vLLM", "`/v1/score`", "score"},
      {"GET", "/get_model_info", false, user, &Api::model_info, "SGLang", "the model's name"},
      {"GET", "/get_server_info", false, user, &Api::server_info, "SGLang", "and how much of it fits"},
      {"POST", "/flush_cache", false, admin, &Api::flush_cache, "SGLang", "forget every prefix"},
      {"GET", "/health_generate", true, user, &Api::health, "SGLang", "`/health`"},
      {"POST", "/abort_request", false, user, &Api::abort, "SGLang",
       "`rid`: end one of one's own requests; `abort_all`: all of them"},
      {"GET", "/api/version", true, user, &Api::version, "Ollama", "of this server"},
      {"POST", "/api/chat", false, user, &Api::ollama_chat, "Ollama",
       "messages in, an answer out; streamed unless told", "ollama.chat"},
      {"POST", "/api/generate", false, user, &Api::ollama_generate, "Ollama", "a prompt in, an answer out",
       "ollama.generate"},
      {"GET", "/api/tags", false, user, &Api::tags, "Ollama", "the model that is served"},
      {"GET", "/api/ps", false, user, &Api::loaded_models, "Ollama", "the same"},
      {"POST", "/api/show", false, user, &Api::show, "Ollama", "what it is"},
      {"POST", "/api/embed", false, user, &Api::ollama_embed, "Ollama", "texts to vectors", "ollama.embed"},
      {"POST", "/api/embeddings", false, user, &Api::ollama_embeddings, "Ollama", "one text to a vector",
       "ollama.embed"},
  };
  return routes;
}

std::string routes_markdown() {
  std::string out = "| endpoint | role | of | |\n| --- | --- | --- | --- |\n";
  for (const Api::Route& r : Api::routes())
    out += cat("| `", r.method, ' ', r.path,
               std::string_view(r.path).size() > 1 && std::string_view(r.path).ends_with('/') ? "NAME" : "", "` | ",
               r.open ? "anyone" : role_name(r.role), " | ", r.whose, " | ", r.what, " |\n");
  return out;
}

namespace {

// "/v1/models/a/b" leads to "/v1/models/".
bool leads_to(std::string_view route, std::string_view path) {
  return path == route || (route.size() > 1 && route.ends_with('/') && path.starts_with(route));
}

// OpenAI's clients send the one, Anthropic's the other.
std::string_view key_of(const HttpRequest& request) {
  const std::string_view bearer = request.header("authorization");
  return bearer.empty() ? request.header("x-api-key") : bearer;
}

}  // namespace

Api::Api(Services& services)
    : services_(services),
      response_store_(size_t(services.options().response_store.bytes)),
      guard_({!services.has_keys(), services.options().hosts, services.options().cors,
              services.options().tls_client_ca.empty()}) {}

Admission Api::admit(const HttpRequest& head) {
  if (Status s = guard_.check(head); !s.ok()) return {.refusal = error_response(s)};
  if (head.method == "OPTIONS") return {.refusal = guard_.preflight(head)};
  Admission admission = route(head);
  if (admission.refusal) guard_.allow(head, *admission.refusal);
  return admission;
}

// In the form that clients of the route's protocol read.
HttpResponse Api::refusal(const Route& route, const Status& status) {
  const std::string_view whose = route.whose;
  return whose == "Anthropic" ? messages_error(status)
         : whose == "Ollama"  ? ollama_error(status)
                              : error_response(status);
}

Admission Api::route(const HttpRequest& head) {
  std::string allowed;
  for (const Route& r : routes()) {
    if (!leads_to(r.path, head.path)) continue;
    if (head.method == r.method || (head.method == "HEAD" && std::string_view(r.method) == "GET"))
      return enter(r, head);
    allowed += cat(allowed.empty() ? "" : ", ", r.method);
  }
  if (!allowed.empty()) {
    HttpResponse refused = error_response(405, "invalid_request_error",
                                          cat(head.path, " takes ", allowed, ", not ", head.method.substr(0, 20)));
    refused.headers.emplace_back("Allow", allowed);
    return {.refusal = std::move(refused)};
  }
  std::string known;
  std::string_view before;  // one path may have several methods
  for (const Route& r : routes()) {
    if (before != r.path) known += cat(known.empty() ? "" : ", ", r.path);
    before = r.path;
  }
  return {.refusal =
              error_response(404, "not_found_error",
                             cat("there is nothing at ", head.path.substr(0, 100), "; this server has ", known))};
}

Admission Api::enter(const Route& r, const HttpRequest& head) {
  Caller caller;
  if (!r.open) {
    auto found = services_.authenticate(key_of(head));
    if (!found.ok()) return {.refusal = refusal(r, found.status())};
    if (Status s = found->require(r.role, r.path); !s.ok()) return {.refusal = refusal(r, s)};
    caller = *std::move(found);
  }
  if (r.costs)
    if (Status s = services_.may_ask(caller, r.costs); !s.ok()) return {.refusal = refusal(r, s)};
  Admission admission{.at_once = r.open, .owner = caller.tenant};
  admission.answer = [this, &r, caller = std::move(caller)](const HttpRequest& request) {
    Reply reply = answer(r, request, caller);
    if (auto* whole = std::get_if<HttpResponse>(&reply)) {
      if (whole->status == 400 && r.whose == std::string_view("llama-server")) say_as_llama(*whole);
      guard_.allow(request, *whole);
    }
    return reply;
  };
  return admission;
}

Reply Api::answer(const Route& r, const HttpRequest& request, const Caller& caller) {
  try {
    return (this->*r.handler)(request, caller);
  } catch (const std::bad_alloc&) {  // memory that cannot be had ends a request, not the server
    return refusal(r, resource_exhausted("there is no memory left for this request; send less, or try again later"));
  }
}

Reply Api::page(const HttpRequest&, const Caller&) {
  HttpResponse r;
  r.content_type = "text/html; charset=utf-8";
  r.headers = {{"Content-Security-Policy",
                "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
                "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"},
               {"X-Content-Type-Options", "nosniff"},
               {"Referrer-Policy", "no-referrer"},
               {"Cache-Control", "no-cache"}};
  r.body = kPage;
  return r;
}

Reply Api::health(const HttpRequest&, const Caller&) {
  Health h = services_.health();
  HttpResponse r;
  r.status = h.live ? 200 : 503;
  r.body = cat("{\"status\":\"", state_name(h.state), "\",\"message\":", json_string(h.message), "}");
  return r;
}

Reply Api::ready(const HttpRequest&, const Caller&) {
  Health h = services_.health();
  HttpResponse r;
  r.status = h.ready ? 200 : 503;
  r.body = cat("{\"ready\":", h.ready, ",\"status\":\"", state_name(h.state), "\",\"message\":", json_string(h.message),
               "}");
  return r;
}

// What SIGTERM does: running requests finish, new ones are refused, the process ends.
Reply Api::drain(const HttpRequest&, const Caller& caller) {
  if (!services_.options().on_drain)
    return error_response(Status(Code::unimplemented, "this server is not drained from outside"));
  log_info("asked to drain", {{"tenant", caller.tenant}, {"key", caller.key_id}});
  services_.options().on_drain();
  HttpResponse r;
  r.status = 202;
  r.body = "{\"status\":\"draining\"}";
  return r;
}

}  // namespace kvasir::server::http
