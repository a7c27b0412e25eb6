// What a client may ask about: models, tokens, and how the server is doing.
#include <algorithm>

#include "core/cat.h"
#include "server/http/api.h"
#include "server/http/error_body.h"
#include "server/http/fields.h"
#include "server/http/logprobs.h"
#include "server/http/metrics_text.h"
#include "server/http/openai_chat_fields.h"
#include "server/http/query.h"
#include "server/json_text.h"
#include "server/tokenizer_config.h"

namespace kvasir::server::http {

namespace {

const int64_t kStarted = unix_seconds();  // of the process

}  // namespace

namespace {

// As llama-server lists them: the first of them in front, unless that is empty; nothing where there are no others.
std::string names_json(const char* key, const std::vector<std::string>& others, const std::string& first) {
  if (others.empty()) return "";
  Json all = Json::array();
  if (!first.empty()) all.push_back(first);
  for (const std::string& one : others) all.push_back(one);
  return cat(",\"", key, "\":", all.dump(-1, ' ', false, Json::error_handler_t::replace));
}

// An adapter, as vLLM lists it.
std::string adapter_entry(const engine::AdapterInfo& a, const std::string& base, int32_t context) {
  return cat("{\"id\":", json_string(a.name), ",\"object\":\"model\",\"created\":0,\"owned_by\":\"kvasir\"",
             ",\"root\":", json_string(a.path), ",\"parent\":", json_string(base), ",\"max_model_len\":", context,
             ",\"meta\":{\"rank\":", a.rank, ",\"bytes\":", a.bytes, "}}");
}

}  // namespace

// What this caller may use.
Reply Api::models(const HttpRequest& request, const Caller& caller) {
  std::string name = services_.model_name();
  if (services_.engine().state() == engine::State::starting)
    return error_response(unavailable("the model is still loading; ask /ready"));
  const model::ModelInfo& info = services_.engine().info();
  const ServerOptions& options = services_.options();
  std::vector<std::pair<std::string, std::string>> entries;
  if (caller.may_use(name) || caller.may_use(info.name))
    entries.emplace_back(
        name, cat("{\"id\":", json_string(name), ",\"object\":\"model\",\"created\":0,\"owned_by\":\"kvasir\"",
                  names_json("aliases", options.model_alias, name), names_json("tags", options.model_tags, ""),
                  ",\"root\":", json_string(name), ",\"parent\":null,\"max_model_len\":", info.context_length,
                  ",\"meta\":{\"architecture\":", json_string(info.architecture),
                  ",\"quantization\":", json_string(info.quantization), ",\"n_params\":", info.parameters,
                  ",\"n_vocab\":", info.vocab_size, "}}"));
  for (const engine::AdapterInfo& a : services_.engine().adapters())
    if (caller.may_use(a.name)) entries.emplace_back(a.name, adapter_entry(a, name, info.context_length));
  HttpResponse r;
  constexpr std::string_view kByName = "/v1/models/";
  const std::string asked =
      request.path.starts_with(kByName) ? percent_decoded(request.path.substr(kByName.size())) : "";
  if (asked.empty()) {
    for (const auto& [id, entry] : entries) r.body += cat(r.body.empty() ? "" : ",", entry);
    r.body = cat("{\"object\":\"list\",\"data\":[", r.body, "]}");
    return r;
  }
  const bool alias =
      std::find(options.model_alias.begin(), options.model_alias.end(), asked) != options.model_alias.end();
  for (const auto& [id, entry] : entries)
    if (id == asked || (alias && id == name)) r.body = entry;
  if (r.body.empty() && options.any_model_name && !entries.empty()) r.body = entries[0].second;
  if (const Status unknown = services_.check_model(asked); r.body.empty())
    return error_response(unknown.ok() ? not_found("this key may use no such model").with_field("model") : unknown);
  return r;
}

namespace {

// What a text or a chat is to become. vLLM's clients say `prompt`, llama-server's `content`, with other usual values.
struct TokenizeCall {
  std::string model;
  PromptInput prompt;
  bool with_pieces = false;  // llama-server's
  bool token_strs = false;   // vLLM's
  bool vllm = true;          // whose answer says that there are none
};

Result<TokenizeCall> parse_tokenize(std::string_view body) {
  KVASIR_ASSIGN(Json json, parse_json(body));
  Fields f(json);
  TokenizeCall call;
  TextInput text;
  ChatInput chat;
  f.string("model", &call.model);
  const bool prompt = f.string("prompt", &text.text), content = f.string("content", &text.text);
  if (prompt && content) f.fail("content", "and prompt are two names of one text; give one of them");
  call.vllm = text.add_special = !content;
  text.parse_special = content;
  for (const char* name : {"add_special_tokens", "add_special"}) f.boolean(name, &text.add_special);
  f.boolean("parse_special", &text.parse_special);
  f.boolean("with_pieces", &call.with_pieces);
  f.boolean("return_token_strs", &call.token_strs);
  read_template_input(f, chat);
  const bool has_text = prompt || content;
  const Json* messages = f.raw("messages");
  if (messages) chat.messages_json = messages->dump();
  if (const Json* tools = f.raw("tools")) chat.tools_json = tools->dump();
  if (f.ok() && has_text == (messages != nullptr)) f.fail("prompt", "or messages must be given, and not both");
  KVASIR_TRY(f.finish());
  call.prompt = messages ? PromptInput(std::move(chat)) : PromptInput(std::move(text));
  return call;
}

// A token's text, or its bytes where they are no text by themselves.
Json piece_of(const text::Tokenizer& tokenizer, int32_t id) {
  const std::string bytes = token_shown(tokenizer, id);
  if (check_utf8(bytes, "").ok()) return bytes;
  Json list = Json::array();
  for (unsigned char byte : bytes) list.push_back(byte);
  return list;
}

}  // namespace

Reply Api::tokenize(const HttpRequest& request, const Caller& caller) {
  auto call = services_.read(caller, "tokenize", parse_tokenize(request.body));
  if (!call.ok()) return error_response(call.status());
  auto ids = services_.tokenize(caller, call->model, call->prompt);
  if (!ids.ok()) return error_response(ids.status());
  HttpResponse r;
  r.body =
      cat("{\"count\":", ids->size(), ",\"max_model_len\":", services_.engine().info().context_length, ",\"tokens\":[");
  const auto tokenizer = services_.engine().tokenizer();
  std::string texts;
  for (size_t i = 0; i < ids->size(); ++i) {
    const int32_t id = (*ids)[i];
    r.body += i ? "," : "";
    r.body += call->with_pieces ? cat("{\"id\":", id, ",\"piece\":", piece_of(*tokenizer, id).dump(), '}') : cat(id);
    if (call->token_strs) texts += cat(i ? "," : "", json_string(tokenizer->token_text(id)));
  }
  r.body += call->token_strs ? cat("],\"token_strs\":[", texts, "]}") : call->vllm ? "],\"token_strs\":null}" : "]}";
  return r;
}

Reply Api::detokenize(const HttpRequest& request, const Caller& caller) {
  auto json = parse_json(request.body);
  if (!json.ok()) return error_response(services_.refuse(caller, "detokenize", json.status()));
  Fields f(*json);
  std::string model;
  std::vector<int64_t> ids;
  bool skip_special = false;
  f.string("model", &model);
  f.boolean("skip_special_tokens", &skip_special);
  if (!f.integers("tokens", &ids)) f.fail("tokens", "is missing; give a list of token ids");
  if (Status s = f.finish(); !s.ok()) return error_response(services_.refuse(caller, "detokenize", s));
  auto text = services_.detokenize(caller, model, ids, skip_special);
  if (!text.ok()) return error_response(text.status());
  HttpResponse r;
  const std::string said = json_string(*text);
  // vLLM's name for it, and llama-server's, whose clients name no model.
  r.body = cat("{\"prompt\":", said, model.empty() ? cat(",\"content\":", said) : std::string(), "}");
  return r;
}

// As vLLM answers it, when it is told to.
Reply Api::tokenizer_info(const HttpRequest&, const Caller&) {
  if (Status s = services_.check_model(""); !s.ok()) return error_response(s);
  if (!services_.engine().tokenizer())
    return error_response(failed_precondition("this model came without a tokenizer"));
  HttpResponse r;
  r.body = server::tokenizer_info(services_.engine()).dump(-1, ' ', false, Json::error_handler_t::replace);
  return r;
}

Reply Api::metrics(const HttpRequest&, const Caller&) {
  if (!services_.options().metrics)
    return error_response(unimplemented("/metrics is turned off on this server; start it without --no-metrics"));
  HttpResponse r;
  r.content_type = "text/plain; version=0.0.4; charset=utf-8";
  r.headers.emplace_back("Process-Start-Time-Unix", cat(kStarted));  // llama-server's
  r.body = metrics_text(services_);
  return r;
}

Reply Api::stats(const HttpRequest&, const Caller&) {
  HttpResponse r;
  r.headers.emplace_back("Cache-Control", "no-store");
  r.body = stats_json(services_);
  return r;
}

}  // namespace kvasir::server::http
