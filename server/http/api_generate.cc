// /v1/chat/completions and /v1/completions: a body in, engine requests out, one reply over all of them.
#include <algorithm>
#include <charconv>
#include <chrono>

#include "core/cat.h"
#include "server/http/api.h"
#include "server/http/error_body.h"
#include "server/http/llama_reply.h"
#include "server/http/metrics_text.h"
#include "server/http/openai_request.h"

namespace kvasir::server::http {
namespace {

constexpr size_t kMostTraceParent = 128;

// Seconds, as gRPC's deadline is for its callers.
Result<Duration> parse_timeout(std::string_view text) {
  double seconds = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (error != std::errc() || end != text.data() + text.size() || !(seconds > 0 && seconds <= 86400))
    return invalid_argument(
               cat("X-Request-Timeout is '", text.substr(0, 40), "'; it must be seconds, above 0 and at most 86400"))
        .with_field("X-Request-Timeout");
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

// A client's own name for its request, where it has one that can stand in a header and a line of the log.
std::string named_by_client(const HttpRequest& request) {
  const std::string_view id = request.header("x-request-id");
  const bool good =
      !id.empty() && id.size() <= 128 && std::all_of(id.begin(), id.end(), [](char c) { return c > ' ' && c < 127; });
  return good ? std::string(id) : "";
}

}  // namespace

Status cut_prompts(const Services& services, OpenAiCall& call) {
  if (!call.cut) return {};
  KVASIR_TRY(services.check_model(call.input.model));
  const GenerateInput& in = call.input;
  const int64_t answer = std::max<int64_t>(1, in.request.max_tokens.value_or(in.default_max_tokens));
  const int64_t room = std::max<int64_t>(1, services.engine().info().context_length - answer);
  const int64_t most = call.cut->tokens < 0 ? room : call.cut->tokens;
  for (PromptInput& prompt : call.prompts) {
    // One that is cut may be as long as a body.
    KVASIR_ASSIGN(auto ids, encode_prompt(prompt, services.engine(), size_t(services.options().max_body.bytes)));
    if (const int64_t over = std::ssize(ids) - most; over > 0) {
      const auto from = ids.begin() + (call.cut->first ? most : 0);
      ids.erase(from, from + over);
    }
    prompt = TokensInput(ids.begin(), ids.end());
  }
  return {};
}

Reply Api::chat(const HttpRequest& request, const Caller& caller) {
  auto call = services_.read(caller, "openai.chat", parse_chat(request.body, services_.options()));
  if (!call.ok()) return error_response(call.status());
  call->shape.llama = request.path == "/chat/completions";
  return generate(request, caller, *std::move(call));
}

Reply Api::chats(const HttpRequest& request, const Caller& caller) {
  auto call = services_.read(caller, "openai.chat", parse_chats(request.body, services_.options()));
  if (!call.ok()) return error_response(call.status());
  return generate(request, caller, *std::move(call));
}

// SageMaker's one path for all: what a body holds says which of OpenAI's it is.
Reply Api::invocations(const HttpRequest& request, const Caller& caller) {
  auto json = parse_json(request.body);
  if (!json.ok()) return error_response(json.status());
  if (json->contains("messages")) return chat(request, caller);
  if (json->contains("prompt")) return completions(request, caller);
  if (json->contains("input")) return embeddings(request, caller);
  if (json->contains("documents")) return rerank(request, caller);
  if (json->contains("text_1")) return score(request, caller);
  return error_response(invalid_argument("the body has none of messages, prompt, input, documents and text_1"));
}

// How long the prompt of a chat would be.
Reply Api::input_tokens(const HttpRequest& request, const Caller& caller) {
  auto call = services_.read(caller, "openai.chat", parse_chat(request.body, services_.options()));
  if (!call.ok()) return error_response(call.status());
  auto ids = services_.tokenize(caller, call->input.model, call->prompts[0]);
  if (!ids.ok()) return error_response(ids.status());
  HttpResponse r;
  r.body = cat("{\"object\":\"response.input_tokens\",\"input_tokens\":", ids->size(), '}');
  return r;
}

Reply Api::completions(const HttpRequest& request, const Caller& caller) {
  auto call = services_.read(caller, "openai.completions", parse_completion(request.body, services_.options()));
  if (!call.ok()) return error_response(call.status());
  return generate(request, caller, *std::move(call));
}

Status Api::carry(const HttpRequest& request, const Caller& caller, GenerateInput& input) {
  input.request.trace_parent = request.header("traceparent").substr(0, kMostTraceParent);
  if (input.request.id.empty()) input.request.id = named_by_client(request);
  if (std::string_view text = request.header("x-request-timeout"); !text.empty()) {
    KVASIR_ASSIGN(Duration limit, services_.read(caller, input.protocol, parse_timeout(text)));
    input.request.deadline = std::chrono::steady_clock::now() + limit;
  }
  return {};
}

std::vector<std::pair<std::string, std::string>> Api::headers_of(const HttpRequest& request, const Caller& caller,
                                                                 const std::string& id) const {
  const std::string own = named_by_client(request);
  std::vector<std::pair<std::string, std::string>> headers{{"X-Request-Id", own.empty() ? id : own}};
  if (std::string load = load_header(request.header("endpoint-load-metrics-format"), services_); !load.empty())
    if (caller.may(Role::metrics)) headers.emplace_back("endpoint-load-metrics", std::move(load));
  HttpResponse cors;
  guard_.allow(request, cors);
  headers.insert(headers.end(), cors.headers.begin(), cors.headers.end());
  return headers;
}

std::vector<GenerateInput> for_each_prompt(const GenerateInput& input, std::vector<PromptInput> prompts) {
  std::vector<GenerateInput> out;
  for (PromptInput& prompt : prompts) out.emplace_back(input).prompt = std::move(prompt);
  return out;
}

Result<Api::Sent> Api::send(const HttpRequest& request, const Caller& caller, std::vector<GenerateInput> inputs) {
  Sent sent;
  std::string id;
  for (GenerateInput& input : inputs) {
    KVASIR_TRY(carry(request, caller, input));
    if (sent.streams.empty())
      id = input.request.id;
    else if (!id.empty() && input.request.id == id)
      input.request.id = cat(id, '-', sent.streams.size());
    auto submitted = services_.generate(caller, std::move(input));
    if (!submitted.ok()) return submitted.status();  // the others are cancelled as they go
    sent.model = std::move(submitted->model);
    sent.prompts.push_back(std::move(submitted->prompt));
    sent.streams.push_back(std::move(submitted->stream));
  }
  return sent;
}

Reply Api::generate(const HttpRequest& request, const Caller& caller, OpenAiCall call) {
  if (Status s = cut_prompts(services_, call); !s.ok())
    return error_response(services_.refuse(caller, call.input.protocol, s));
  ReplyShape& shape = call.shape;
  shape.answer = prepare_tools(services_, call.tools, call.input.request);
  if (shape.chat) show_reasoning(services_, call.input.request);
  shape.stop_tokens = call.input.request.stop_tokens;
  if (shape.verbose) shape.settings = llama_settings(call.input.request);
  auto sent = send(request, caller, for_each_prompt(call.input, std::move(call.prompts)));
  if (!sent.ok()) return error_response(sent.status());
  shape.tokenizer = services_.engine().tokenizer();
  for (std::vector<int32_t>& prompt : sent->prompts) {
    if (shape.verbose) {
      auto text = shape.tokenizer ? shape.tokenizer->decode(prompt, false) : Result<std::string>("");
      if (!text.ok()) return error_response(text.status());
      shape.shown_prompts.push_back(*std::move(text));
    }
    if (call.echo && shape.chat) {
      shape.echo.push_back(std::move(call.last[shape.echo.size()]));
    } else if (call.echo) {
      auto text = shape.tokenizer->decode(prompt, false);
      if (!text.ok()) return error_response(text.status());
      shape.echo.push_back(*std::move(text));
    }
    if (shape.chat) prepare_reasoning(services_, prompt, call.input.request.grammar, shape.answer);
    shape.prompts.push_back(static_cast<int64_t>(prompt.size()));
    if (shape.token_ids) shape.prompt_ids.push_back(std::move(prompt));
  }
  const std::string conversation = shape.chat && shape.stream ? conversation_of(request) : "";
  shape.outlives = !conversation.empty();
  const std::string& id = shape.call_id = sent->streams[0]->id();
  shape.seed_drawn = call.input.draw_seed;
  shape.model = std::move(sent->model);
  shape.id = cat(shape.chat ? "chatcmpl-" : "cmpl-", id);
  shape.created = unix_seconds();
  auto headers = headers_of(request, caller, id);
  if (conversation.empty()) return openai_reply(std::move(shape), std::move(sent->streams), std::move(headers));
  const std::string name = id;
  return outliving(request, caller, openai_reply(std::move(shape), std::move(sent->streams), {}), name, conversation);
}

int64_t unix_seconds() {
  using namespace std::chrono;
  return duration_cast<seconds>(system_clock::now().time_since_epoch()).count();
}

}  // namespace kvasir::server::http
