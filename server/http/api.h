// The routes: which path, method and role leads to which handler.
#pragma once

#include <nlohmann/json.hpp>

#include "server/http/guard.h"
#include "server/http/http.h"
#include "server/http/response_store.h"
#include "server/services.h"

namespace kvasir::server::http {

std::string routes_markdown();  // docs/api.md's table

int64_t unix_seconds();
std::vector<GenerateInput> for_each_prompt(const GenerateInput& input, std::vector<PromptInput> prompts);

class Api {
 public:
  explicit Api(Services& services);
  // By the header alone: where it leads, and whether this caller may. Neither waits nor works.
  Admission admit(const HttpRequest& head);

 private:
  friend std::string routes_markdown();
  struct Route;
  static const std::vector<Route>& routes();
  static HttpResponse refusal(const Route& route, const Status& status);
  Admission route(const HttpRequest& head);
  Admission enter(const Route& route, const HttpRequest& head);
  Reply answer(const Route& route, const HttpRequest& request, const Caller& caller);

  Reply page(const HttpRequest&, const Caller&);
  Reply health(const HttpRequest&, const Caller&);
  Reply ready(const HttpRequest&, const Caller&);
  Reply metrics(const HttpRequest&, const Caller&);
  Reply stats(const HttpRequest&, const Caller&);
  Reply models(const HttpRequest&, const Caller&);
  Reply load_adapter(const HttpRequest&, const Caller&);
  Reply unload_adapter(const HttpRequest&, const Caller&);
  Reply chat(const HttpRequest&, const Caller&);
  Reply chats(const HttpRequest&, const Caller&);
  Reply input_tokens(const HttpRequest&, const Caller&);
  Reply invocations(const HttpRequest&, const Caller&);
  Reply completions(const HttpRequest&, const Caller&);
  Reply messages(const HttpRequest&, const Caller&);
  Reply count_tokens(const HttpRequest&, const Caller&);
  Reply responses(const HttpRequest&, const Caller&);
  Reply kept_response(const HttpRequest&, const Caller&);
  Reply tokenize(const HttpRequest&, const Caller&);
  Reply detokenize(const HttpRequest&, const Caller&);
  Reply tokenizer_info(const HttpRequest&, const Caller&);
  Reply embeddings(const HttpRequest&, const Caller&);
  Reply rerank(const HttpRequest&, const Caller&);
  Reply score(const HttpRequest&, const Caller&);
  Reply drain(const HttpRequest&, const Caller&);
  Reply version(const HttpRequest&, const Caller&);
  Reply load(const HttpRequest&, const Caller&);
  Reply model_info(const HttpRequest&, const Caller&);
  Reply abort(const HttpRequest&, const Caller&);
  Reply flush_cache(const HttpRequest&, const Caller&);
  Reply tags(const HttpRequest&, const Caller&);
  Reply show(const HttpRequest&, const Caller&);
  Reply loaded_models(const HttpRequest&, const Caller&);
  Reply ollama_chat(const HttpRequest&, const Caller&);
  Reply ollama_generate(const HttpRequest&, const Caller&);
  Reply ollama_embed(const HttpRequest&, const Caller&);
  Reply ollama_embeddings(const HttpRequest&, const Caller&);
  Reply tokens_generate(const HttpRequest&, const Caller&);
  Reply render_completion(const HttpRequest&, const Caller&);
  Reply render_chat(const HttpRequest&, const Caller&);
  Reply sglang_generate(const HttpRequest&, const Caller&);
  Reply server_info(const HttpRequest&, const Caller&);
  Reply llama_completion(const HttpRequest&, const Caller&);
  Reply llama_infill(const HttpRequest&, const Caller&);
  Reply apply_template(const HttpRequest&, const Caller&);
  Reply props(const HttpRequest&, const Caller&);
  Reply slots(const HttpRequest&, const Caller&);
  Reply generate(const HttpRequest&, const Caller&, struct OpenAiCall call);
  Reply render(const HttpRequest&, const Caller&, struct OpenAiCall call);
  Reply ollama_answer(const HttpRequest&, const Caller&, struct OllamaCall call);
  nlohmann::ordered_json ollama_model(bool details_alone) const;
  Reply llama_generate(const HttpRequest&, const Caller&, struct LlamaCall call);

  // Engine requests of one call, one a prompt.
  struct Sent {
    std::vector<std::unique_ptr<engine::Stream>> streams;
    std::vector<std::vector<int32_t>> prompts;
    std::string model;
  };
  Result<Sent> send(const HttpRequest&, const Caller&, std::vector<GenerateInput> inputs);
  Reply pool(const HttpRequest&, const Caller&, struct PooledCall call);
  // What headers say of a request, and what an answer's say.
  Status carry(const HttpRequest&, const Caller&, GenerateInput& input);
  std::vector<std::pair<std::string, std::string>> headers_of(const HttpRequest&, const Caller&,
                                                              const std::string& id) const;

  Reply kept_stream(const HttpRequest&, const Caller&);
  std::string conversation_of(const HttpRequest&) const;
  Reply outliving(const HttpRequest&, const Caller&, std::unique_ptr<Producer> answer, const std::string& id,
                  const std::string& conversation);
  Reply followed(const HttpRequest&, const Caller&, const ResponseStore::Kept& kept);
  Result<nlohmann::ordered_json> conversation(const Caller&, const struct ResponsesCall& call);

  Services& services_;
  ResponseStore response_store_;
  BackgroundRuns background_;
  Guard guard_;
};

}  // namespace kvasir::server::http
