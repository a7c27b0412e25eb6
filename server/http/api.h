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
  Admission admit(const Request& head);

 private:
  friend std::string routes_markdown();
  struct Route;
  static const std::vector<Route>& routes();
  static Response refusal(const Route& route, const Status& status);
  Admission route(const Request& head);
  Admission enter(const Route& route, const Request& head);
  Reply answer(const Route& route, const Request& request, const Caller& caller);

  Reply page(const Request&, const Caller&);
  Reply health(const Request&, const Caller&);
  Reply ready(const Request&, const Caller&);
  Reply metrics(const Request&, const Caller&);
  Reply stats(const Request&, const Caller&);
  Reply models(const Request&, const Caller&);
  Reply load_adapter(const Request&, const Caller&);
  Reply unload_adapter(const Request&, const Caller&);
  Reply chat(const Request&, const Caller&);
  Reply chats(const Request&, const Caller&);
  Reply invocations(const Request&, const Caller&);
  Reply completions(const Request&, const Caller&);
  Reply messages(const Request&, const Caller&);
  Reply count_tokens(const Request&, const Caller&);
  Reply responses(const Request&, const Caller&);
  Reply kept_response(const Request&, const Caller&);
  Reply tokenize(const Request&, const Caller&);
  Reply detokenize(const Request&, const Caller&);
  Reply tokenizer_info(const Request&, const Caller&);
  Reply embeddings(const Request&, const Caller&);
  Reply rerank(const Request&, const Caller&);
  Reply score(const Request&, const Caller&);
  Reply drain(const Request&, const Caller&);
  Reply version(const Request&, const Caller&);
  Reply load(const Request&, const Caller&);
  Reply model_info(const Request&, const Caller&);
  Reply abort(const Request&, const Caller&);
  Reply flush_cache(const Request&, const Caller&);
  Reply tags(const Request&, const Caller&);
  Reply show(const Request&, const Caller&);
  Reply loaded_models(const Request&, const Caller&);
  Reply ollama_chat(const Request&, const Caller&);
  Reply ollama_generate(const Request&, const Caller&);
  Reply ollama_embed(const Request&, const Caller&);
  Reply ollama_embeddings(const Request&, const Caller&);
  Reply tokens_generate(const Request&, const Caller&);
  Reply render_completion(const Request&, const Caller&);
  Reply render_chat(const Request&, const Caller&);
  Reply sglang_generate(const Request&, const Caller&);
  Reply server_info(const Request&, const Caller&);
  Reply llama_completion(const Request&, const Caller&);
  Reply llama_infill(const Request&, const Caller&);
  Reply apply_template(const Request&, const Caller&);
  Reply props(const Request&, const Caller&);
  Reply slots(const Request&, const Caller&);
  Reply generate(const Request&, const Caller&, struct OpenAiCall call);
  Reply render(const Request&, const Caller&, struct OpenAiCall call);
  Reply ollama_answer(const Request&, const Caller&, struct OllamaCall call);
  nlohmann::ordered_json ollama_model(bool details_alone) const;
  Reply llama_generate(const Request&, const Caller&, struct LlamaCall call);

  // Engine requests of one call, one a prompt.
  struct Sent {
    std::vector<std::unique_ptr<engine::Stream>> streams;
    std::vector<std::vector<int32_t>> prompts;
    std::string model;
  };
  Result<Sent> send(const Request&, const Caller&, std::vector<GenerateInput> inputs);
  Reply pool(const Request&, const Caller&, struct PooledCall call);
  // What headers say of a request, and what an answer's say.
  Status carry(const Request&, const Caller&, GenerateInput& input);
  std::vector<std::pair<std::string, std::string>> headers_of(const Request&, const Caller&,
                                                              const std::string& id) const;

  Reply followed(const Request&, const Caller&, const ResponseStore::Kept& kept);
  Result<nlohmann::ordered_json> conversation(const Caller&, const struct ResponsesCall& call);

  Services& services_;
  ResponseStore response_store_;
  BackgroundRuns background_;
  Guard guard_;
};

}  // namespace kvasir::server::http
