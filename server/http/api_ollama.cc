// Ollama's routes.
#include <chrono>
#include <cstdio>

#include "core/cat.h"
#include "server/http/api.h"
#include "server/http/error_body.h"
#include "server/http/fields.h"
#include "server/http/infill.h"
#include "server/http/ollama_reply.h"
#include "server/http/ollama_request.h"

namespace kvasir::server::http {
namespace {

HttpResponse json_response(const Json& value) {
  HttpResponse r;
  r.body = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return r;
}

// "135M", "1.7B"
std::string in_words(int64_t parameters) {
  const double millions = double(parameters) / 1e6;
  char text[32];
  if (millions < 1000)
    std::snprintf(text, sizeof text, "%.0fM", millions);
  else
    std::snprintf(text, sizeof text, "%.1fB", millions / 1000);
  return text;
}

}  // namespace

Reply Api::ollama_chat(const HttpRequest& request, const Caller& caller) {
  auto call = services_.read(caller, "ollama.chat", parse_ollama_chat(request.body, services_.options()));
  if (!call.ok()) return ollama_error(call.status());
  return ollama_answer(request, caller, *std::move(call));
}

Reply Api::ollama_generate(const HttpRequest& request, const Caller& caller) {
  const auto tokenizer = services_.engine().tokenizer();
  const bool has_template = services_.engine().chat_template() != nullptr;
  auto call = services_.read(caller, "ollama.generate",
                             parse_ollama_generate(request.body, services_.options(), tokenizer.get(), has_template));
  if (!call.ok()) return ollama_error(call.status());
  return ollama_answer(request, caller, *std::move(call));
}

Reply Api::ollama_answer(const HttpRequest& request, const Caller& caller, OllamaCall call) {
  OllamaShape shape;
  shape.stream = call.stream;
  shape.chat = call.chat;
  shape.model = call.input.model;
  if (call.nothing) {
    const Status s = services_.check_model(call.input.model);
    return s.ok() ? ollama_loaded(shape) : ollama_error(services_.refuse(caller, call.input.protocol, s));
  }
  if (Status s = carry(request, caller, call.input); !s.ok()) return ollama_error(s);
  shape.answer = prepare_tools(services_, call.tools, call.input.request);
  if (!call.raw) show_reasoning(services_, call.input.request);
  const text::GrammarSpec grammar = call.input.request.grammar;
  auto submitted = services_.generate(caller, std::move(call.input));
  if (!submitted.ok()) return ollama_error(submitted.status());
  if (!call.raw) prepare_reasoning(services_, submitted->prompt, grammar, shape.answer);
  shape.prompt_tokens = int64_t(submitted->prompt.size());
  auto headers = headers_of(request, caller, submitted->stream->id());
  return ollama_reply(std::move(shape), std::move(submitted->stream), std::move(headers));
}

Reply Api::ollama_embed(const HttpRequest& request, const Caller& caller) {
  auto call = services_.read(caller, "ollama.embed", parse_ollama_embed(request.body, services_.options()));
  if (!call.ok()) return ollama_error(call.status());
  return pool(request, caller, *std::move(call));
}

Reply Api::ollama_embeddings(const HttpRequest& request, const Caller& caller) {
  auto call = services_.read(caller, "ollama.embed", parse_ollama_embeddings(request.body, services_.options()));
  if (!call.ok()) return ollama_error(call.status());
  return pool(request, caller, *std::move(call));
}

// What is served, as lists of models have it.
Json Api::ollama_model(bool details_alone) const {
  const model::ModelInfo& info = services_.engine().info();
  Json details{{"parent_model", ""},
               {"format", ""},
               {"family", info.architecture},
               {"families", Json::array({info.architecture})},
               {"parameter_size", in_words(info.parameters)},
               {"quantization_level", info.quantization}};
  if (details_alone) return details;
  const auto since = std::chrono::system_clock::now() - std::chrono::duration_cast<std::chrono::system_clock::duration>(
                                                            std::chrono::steady_clock::now() - services_.started());
  return {{"name", services_.model_name()},
          {"model", services_.model_name()},
          {"modified_at", rfc3339(since)},
          {"size", info.weight_bytes},
          {"digest", ""},
          {"details", std::move(details)}};
}

Reply Api::tags(const HttpRequest&, const Caller&) {
  if (Status s = services_.check_model(""); !s.ok()) return ollama_error(s);
  return json_response({{"models", Json::array({ollama_model(false)})}});
}

// It stays for as long as the server does.
Reply Api::loaded_models(const HttpRequest&, const Caller&) {
  if (Status s = services_.check_model(""); !s.ok()) return ollama_error(s);
  Json model = ollama_model(false);
  model["context_length"] = services_.engine().info().context_length;
  model["expires_at"] = "9999-12-31T23:59:59Z";
  return json_response({{"models", Json::array({std::move(model)})}});
}

Reply Api::show(const HttpRequest& request, const Caller&) {
  auto name = parse_ollama_name(request.body);
  if (!name.ok()) return ollama_error(name.status());
  if (Status s = services_.check_model(*name); !s.ok()) return ollama_error(s);
  const engine::Engine& engine = services_.engine();
  const model::ModelInfo& info = engine.info();
  const auto tokenizer = engine.tokenizer();
  const auto chat_template = engine.chat_template();
  Json can = Json::array({info.encoder ? "embedding" : "completion"});
  if (chat_template) can.push_back("tools");
  if (reasoning_format(services_) != text::ReasoningFormat::none) can.push_back("thinking");
  if (tokenizer && fills_gaps(*tokenizer)) can.push_back("insert");
  const std::string& family = info.architecture;
  Json about{{"general.architecture", family},
             {"general.parameter_count", info.parameters},
             {"general.basename", info.name},
             {family + ".context_length", info.context_length},
             {family + ".block_count", info.layers},
             {family + ".embedding_length", info.hidden},
             {family + ".attention.head_count", info.heads},
             {family + ".attention.head_count_kv", info.kv_heads}};
  return json_response({{"modelfile", ""},
                        {"parameters", ""},
                        {"template", chat_template ? chat_template->source() : ""},
                        {"details", ollama_model(true)},
                        {"model_info", std::move(about)},
                        {"capabilities", std::move(can)},
                        {"modified_at", ollama_model(false)["modified_at"]}});
}

}  // namespace kvasir::server::http
