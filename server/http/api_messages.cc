// /v1/messages and /v1/messages/count_tokens.
#include "core/cat.h"
#include "server/http/api.h"
#include "server/http/messages_reply.h"
#include "server/http/messages_request.h"
#include "server/thoughts.h"

namespace kvasir::server::http {

Reply Api::messages(const HttpRequest& request, const Caller& caller) {
  auto call = services_.read(caller, "anthropic.messages", parse_messages(request.body, services_.options(), false));
  if (!call.ok()) return messages_error(call.status());
  if (Status s = carry(request, caller, call->input); !s.ok()) return messages_error(s);
  MessagesShape shape;
  shape.stream = call->stream;
  shape.answer = prepare_tools(services_, call->tools, call->input.request);
  show_reasoning(services_, call->input.request);
  std::optional<int64_t>& budget = call->input.request.thinking_budget;
  if (!budget && can_limit_thoughts(reasoning_format(services_))) budget = call->thinking_budget;
  const text::GrammarSpec grammar = call->input.request.grammar;
  auto submitted = services_.generate(caller, std::move(call->input));
  if (!submitted.ok()) return messages_error(submitted.status());
  prepare_reasoning(services_, submitted->prompt, grammar, shape.answer);
  shape.id = cat("msg_", submitted->stream->id());
  shape.model = submitted->model;
  shape.prompt_tokens = static_cast<int64_t>(submitted->prompt.size());
  auto headers = headers_of(request, caller, submitted->stream->id());
  headers.emplace_back("request-id", headers[0].second);  // where Anthropic's clients look for it
  return messages_reply(std::move(shape), std::move(submitted->stream), std::move(headers));
}

Reply Api::count_tokens(const HttpRequest& request, const Caller& caller) {
  auto call = services_.read(caller, "anthropic.messages", parse_messages(request.body, services_.options(), true));
  if (!call.ok()) return messages_error(call.status());
  auto ids = services_.tokenize(caller, call->input.model, call->input.prompt);
  if (!ids.ok()) return messages_error(ids.status());
  HttpResponse r;
  r.body = cat("{\"input_tokens\":", ids->size(), "}");
  return r;
}

}  // namespace kvasir::server::http
