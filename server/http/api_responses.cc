// /v1/responses.
#include "core/cat.h"
#include "server/http/api.h"
#include "server/http/error_body.h"
#include "server/http/responses_reply.h"
#include "server/http/responses_request.h"

namespace kvasir::server::http {
namespace {

std::string dumped(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

Result<Json> messages_of(const ResponsesCall& call) {
  Json messages = Json::array();
  if (!call.instructions.is_null()) messages.push_back({{"role", "system"}, {"content", call.instructions}});
  KVASIR_TRY(append_items(call.items, messages));
  return messages;
}

}  // namespace

Reply Api::responses(const Request& request, const Caller& caller) {
  const char* protocol = "openai.responses";
  auto call = services_.read(caller, protocol, parse_responses(request.body, services_.options()));
  if (!call.ok()) return error_response(call.status());
  auto messages = services_.read(caller, protocol, messages_of(*call));
  if (!messages.ok()) return error_response(messages.status());
  call->chat.messages_json = dumped(*messages);
  call->input.prompt = std::move(call->chat);
  if (Status s = carry(request, caller, call->input); !s.ok()) return error_response(s);
  ResponsesShape shape;
  shape.answer = prepare_tools(services_, call->tools, call->input.request.grammar);
  const text::GrammarSpec grammar = call->input.request.grammar;
  auto submitted = services_.generate(caller, std::move(call->input));
  if (!submitted.ok()) return error_response(submitted.status());
  prepare_reasoning(services_, submitted->prompt, grammar, shape.answer);
  shape.stream = call->stream;
  shape.id = cat("resp_", submitted->stream->id());
  shape.model = services_.model_name();
  shape.created = unix_seconds();
  for (const auto& [name, value] : call->echoed.items()) shape.echoed += cat(",\"", name, "\":", dumped(value));
  auto headers = headers_of(request, submitted->stream->id());
  return responses_reply(std::move(shape), std::move(submitted->stream), std::move(headers));
}

}  // namespace kvasir::server::http
