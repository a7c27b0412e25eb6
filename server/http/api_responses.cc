// /v1/responses, and what is kept of them.
#include <algorithm>
#include <charconv>

#include "core/cat.h"
#include "server/http/api.h"
#include "server/http/error_body.h"
#include "server/http/query.h"
#include "server/http/responses_reply.h"
#include "server/http/responses_request.h"
#include "server/json_text.h"

namespace kvasir::server::http {
namespace {

std::string dumped(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

Status none_kept(const std::string& id) {
  return not_found(
             cat("Response with id '", id.substr(0, 100),
                 "' not found. It was never kept (store), was deleted, or made room for others (--response-store)"))
      .with_field("response_id");
}

// Items as they are listed: each has an id.
Json with_ids(const Json& items, const std::string& id) {
  Json out = items;
  for (size_t i = 0; i < out.size(); ++i)
    if (out[i].is_object() && !out[i].contains("id")) out[i]["id"] = cat("item_", id, '_', i);
  return out;
}

}  // namespace

// The conversation that the items go on with, as messages.
Result<Json> Api::conversation(const Caller& caller, const ResponsesCall& call) {
  Json messages = Json::array();
  if (!call.previous.empty()) {
    auto kept = response_store_.find(caller.tenant, call.previous);
    if (!kept) return none_kept(call.previous).with_field("previous_response_id");
    if (kept->messages.empty())
      return invalid_argument(cat("the response '", call.previous.substr(0, 100),
                                  "' has no answer to go on from: its status is ",
                                  Json::parse(kept->background->response())["status"].get<std::string>()))
          .with_field("previous_response_id");
    messages = Json::parse(kept->messages);
  }
  KVASIR_TRY(append_items(call.items, messages));
  return messages;
}

Reply Api::responses(const HttpRequest& request, const Caller& caller) {
  const char* protocol = "openai.responses";
  auto call = services_.read(caller, protocol, parse_responses(request.body, services_.options()));
  if (!call.ok()) return error_response(call.status());
  auto messages = services_.read(caller, protocol, conversation(caller, *call));
  if (!messages.ok()) return error_response(messages.status());
  Json prompt = *messages;
  if (!call->instructions.is_null())
    prompt.insert(prompt.begin(), Json{{"role", "system"}, {"content", call->instructions}});
  call->chat.messages_json = dumped(prompt);
  call->input.prompt = std::move(call->chat);
  if (Status s = carry(request, caller, call->input); !s.ok()) return error_response(s);
  ResponsesShape shape;
  shape.answer = prepare_tools(services_, call->tools, call->input.request);
  show_reasoning(services_, call->input.request);
  if (call->input.request.sampling.logprobs >= 0) shape.logprobs = services_.engine().tokenizer();
  const text::GrammarSpec grammar = call->input.request.grammar;
  auto submitted = services_.generate(caller, std::move(call->input));
  if (!submitted.ok()) return error_response(submitted.status());
  prepare_reasoning(services_, submitted->prompt, grammar, shape.answer);
  if (call->messages) shape.messages = {services_.engine().tokenizer(), submitted->prompt};
  shape.stream = call->stream || call->background;
  shape.timings = call->timings, shape.progress = call->progress;
  shape.llama = request.path == "/responses";
  shape.prompt_tokens = static_cast<int64_t>(submitted->prompt.size());
  shape.id = cat("resp_", submitted->stream->id());
  shape.model = submitted->model;
  shape.created = unix_seconds();
  for (const auto& [name, value] : call->echoed.items()) shape.echoed += cat(",\"", name, "\":", dumped(value));
  auto background = call->background ? std::make_shared<BackgroundResponse>(call->stream) : nullptr;
  const std::string input = dumped(with_ids(call->items, shape.id));
  if (call->store)
    shape.keep = [this, tenant = caller.tenant, id = shape.id, input, background, messages = *std::move(messages)](
                     const std::string& response, const std::string& output) {
      Json all = messages;
      if (!append_items(Json::parse(output), all).ok()) return;
      if (background)
        response_store_.replace(tenant, id, {"", input, dumped(all), background});
      else
        response_store_.keep(tenant, id, {response, input, dumped(all)});
    };
  auto headers = headers_of(request, caller, submitted->stream->id());
  if (background) {
    shape.now = [background](const std::string& response) { background->now(response); };
    const std::string id = shape.id;
    auto reply = responses_reply(std::move(shape), std::move(submitted->stream), {});
    response_store_.keep(caller.tenant, id, {"", input, "", background});
    if (background->over())
      return error_response(invalid_argument(cat("input has ", input.size(), " bytes, more than this server keeps (",
                                                 services_.options().response_store.bytes,
                                                 "); shorten it, or start the server with a larger --response-store"))
                                .with_field("input"));
    background_.start(background, std::move(reply),
                      [this, tenant = caller.tenant, id] { return response_store_.recount(tenant, id); });
    if (call->stream) return background->follow(0, std::move(headers));
    return HttpResponse{.headers = std::move(headers), .body = background->response()};
  }
  return responses_reply(std::move(shape), std::move(submitted->stream), std::move(headers));
}

// The events of one that is made, or was made, in the background, from the one behind `starting_after` on.
Reply Api::followed(const HttpRequest& request, const Caller& caller, const ResponseStore::Kept& kept) {
  if (!kept.background || !kept.background->has_events_)
    return error_response(
        invalid_argument("only a response that was asked for with background: true and stream: true has events to "
                         "follow; leave stream out for its state")
            .with_field("stream"));
  size_t from = 0;
  if (const std::string_view after = query_parameter(request.query, "starting_after"); !after.empty()) {
    const auto [end, error] = std::from_chars(after.data(), after.data() + after.size(), from);
    if (error != std::errc() || end != after.data() + after.size() || from > 1'000'000'000)
      return error_response(invalid_argument(cat("starting_after is '", after.substr(0, 40),
                                                 "'; it must be the sequence_number of an event"))
                                .with_field("starting_after"));
    ++from;
  }
  return kept.background->follow(from, headers_of(request, caller, request.path.substr(request.path.rfind('/') + 1)));
}

// GET /v1/responses/ID, GET .../ID/input_items, DELETE /v1/responses/ID, POST .../ID/cancel.
Reply Api::kept_response(const HttpRequest& request, const Caller& caller) {
  std::string id = request.path.substr(std::string_view("/v1/responses/").size());
  std::string what;
  if (const size_t slash = id.find('/'); slash != std::string::npos) {
    what = id.substr(slash + 1);
    id.resize(slash);
  }
  auto kept = response_store_.find(caller.tenant, id);
  if (!kept) return error_response(none_kept(id));
  HttpResponse r;
  if (request.method == "DELETE" && what.empty()) {
    response_store_.erase(caller.tenant, id);
    r.body = cat("{\"id\":", json_string(id), ",\"object\":\"response\",\"deleted\":true}");
  } else if (request.method == "POST" && what == "cancel") {
    if (!kept->background)
      return error_response(
          invalid_argument("Cannot cancel a synchronous response. Only one with background: true can be; close the "
                           "connection to end another that is being made"));
    kept->background->cancel();
    r.body = kept->background->response();
  } else if (request.method != "POST" && request.method != "DELETE" && what.empty()) {
    if (query_parameter(request.query, "stream") == "true") return followed(request, caller, *kept);
    r.body = kept->background ? kept->background->response() : std::move(kept->response);
  } else if (request.method != "POST" && request.method != "DELETE" && what == "input_items") {
    const Json items = Json::parse(kept->input);
    auto id_of = [&](size_t i) { return items.empty() ? Json() : items[i]["id"]; };
    r.body = dumped({{"object", "list"},
                     {"data", items},
                     {"first_id", id_of(0)},
                     {"last_id", id_of(items.size() - (items.empty() ? 0 : 1))},
                     {"has_more", false}});
  } else {
    return error_response(not_found(cat("there is nothing at ", request.path.substr(0, 100))));
  }
  return r;
}

}  // namespace kvasir::server::http
