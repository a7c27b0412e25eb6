// /v1/rerank and /v1/score, in vLLM's and Jina's forms.
#include <algorithm>
#include <numeric>

#include "core/cat.h"
#include "server/http/api.h"
#include "server/http/error_body.h"
#include "server/http/fields.h"
#include "server/http/openai_request.h"
#include "server/http/pooled_reply.h"
#include "server/json_text.h"
#include "server/rerank.h"

namespace kvasir::server::http {
namespace {

struct RankCall {
  PooledCall call;
  std::string instruction = kRerankInstruction;
  std::vector<TextPair> pairs;
};

void read_head(Fields& f, const char* protocol, RankCall& out) {
  GenerateInput& in = out.call.input;
  in.protocol = protocol;
  in.wire = Wire::embeddings;
  f.unserved("dimensions", "it is of embeddings");
  f.unserved("normalize", "it is of embeddings; scores are from 0 to 1");
  f.string("model", &in.model);
  f.parameters(in);
  read_said(f, in.said);
  f.string("request_id", &in.request.id);
  f.string("instruction", &out.instruction);
  f.unserved("truncate_prompt_tokens", "shorten the texts: /tokenize says their length");
  f.unserved("max_tokens_per_doc", "shorten the documents: /tokenize says their length");
  f.unserved("activation", "scores are from 0 to 1", "true");
}

// Strings, or objects with a text.
std::vector<std::string> read_documents(Fields& f, const char* name, int most) {
  std::vector<std::string> out;
  const Json* list = f.raw(name);
  if (!list || !list->is_array()) return f.fail(name, "is missing; give a list of strings"), out;
  if (list->size() > size_t(most))
    return f.fail(name, cat("has ", list->size(), " texts; at most ", most, " are taken")), out;
  if (list->empty()) return f.fail(name, "is empty"), out;
  for (const Json& d : *list) {
    const Json* text = d.is_object() && d.contains("text") ? &d["text"] : &d;
    if (!text->is_string())
      return f.fail(name, cat('[', out.size(), "] must be a string, or an object with a text")), out;
    out.push_back(text->get<std::string>());
  }
  return out;
}

std::string usage_json(const engine::Finished& all) {
  return cat("{\"prompt_tokens\":", all.usage.prompt_tokens, ",\"total_tokens\":", all.usage.prompt_tokens, "}");
}

std::string number(float value) {
  std::string out;
  append_vector(out, {value});
  return out.substr(1, out.size() - 2);
}

Result<RankCall> parse_rerank(std::string_view body, const ServerOptions& limits) {
  KVASIR_ASSIGN(Json json, parse_json(body));
  Fields f(json);
  RankCall out;
  read_head(f, "rerank", out);
  std::string query;
  if (!f.string("query", &query)) f.fail("query", "is missing; give a string");
  std::vector<std::string> documents = read_documents(f, "documents", limits.max_inputs);
  const auto count = int64_t(documents.size());
  int64_t top = count;
  if (f.integer("top_n", &top) && top < 1) f.fail("top_n", cat("is ", top, "; it must be at least 1"));
  bool shown = true;
  f.boolean("return_documents", &shown);
  KVASIR_TRY(f.finish());
  for (const std::string& d : documents) out.pairs.push_back({query, d});
  if (!shown) documents.clear();
  out.call.body = [top = std::min(top, count), documents = std::move(documents)](
                      const engine::Finished& all, const std::string& model, const std::string& id) {
    std::vector<float> scores;
    for (const auto& result : all.pooled) scores.push_back(rerank_score(result));
    std::vector<size_t> order(scores.size());
    std::iota(order.begin(), order.end(), size_t(0));
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return scores[a] > scores[b]; });
    order.resize(size_t(top));
    std::string text = cat("{\"id\":", json_string("rerank-" + id), ",\"model\":", json_string(model),
                           ",\"usage\":", usage_json(all), ",\"results\":[");
    for (size_t i = 0; i < order.size(); ++i) {
      text += cat(i > 0 ? "," : "", "{\"index\":", order[i], ",\"relevance_score\":", number(scores[order[i]]));
      if (!documents.empty()) text += cat(",\"document\":{\"text\":", json_string(documents[order[i]]), "}");
      text += '}';
    }
    return text + "]}";
  };
  return out;
}

Result<RankCall> parse_score(std::string_view body, const ServerOptions& limits) {
  KVASIR_ASSIGN(Json json, parse_json(body));
  Fields f(json);
  RankCall out;
  read_head(f, "score", out);
  const size_t most = size_t(limits.max_inputs);
  std::vector<std::string> first, second;
  if (!f.strings("text_1", &first, most)) f.fail("text_1", "is missing; give a string or a list of strings");
  if (!f.strings("text_2", &second, most)) f.fail("text_2", "is missing; give a string or a list of strings");
  if (f.ok() && second.empty()) f.fail("text_2", "is empty");
  if (f.ok() && first.size() != 1 && first.size() != second.size())
    f.fail("text_1", cat("has ", first.size(), " texts and text_2 has ", second.size(),
                         "; give one, or as many as there are in text_2"));
  KVASIR_TRY(f.finish());
  for (size_t i = 0; i < second.size(); ++i) out.pairs.push_back({first[first.size() == 1 ? 0 : i], second[i]});
  out.call.body = [](const engine::Finished& all, const std::string& model, const std::string& id) {
    std::string text = cat("{\"id\":", json_string("score-" + id), ",\"object\":\"list\",\"created\":", unix_seconds(),
                           ",\"model\":", json_string(model), ",\"data\":[");
    for (size_t i = 0; i < all.pooled.size(); ++i)
      text += cat(i > 0 ? "," : "", "{\"index\":", i,
                  ",\"object\":\"score\",\"score\":", number(rerank_score(all.pooled[i])), "}");
    return text + cat("],\"usage\":", usage_json(all), "}");
  };
  return out;
}

// The prompts of the pairs, once there is a model to ask.
Status judge(const Services& services, RankCall& rank) {
  KVASIR_TRY(services.check_model(rank.call.input.model));
  KVASIR_ASSIGN(rank.call.prompts,
                rerank_prompts(services.engine(), rank.instruction, rank.pairs, rank.call.input.request));
  return {};
}

}  // namespace

Reply Api::rerank(const HttpRequest& request, const Caller& caller) {
  auto rank = services_.read(caller, "rerank", parse_rerank(request.body, services_.options()));
  if (!rank.ok()) return error_response(rank.status());
  if (Status s = judge(services_, *rank); !s.ok()) return error_response(services_.refuse(caller, "rerank", s));
  return pool(request, caller, std::move(rank->call));
}

Reply Api::score(const HttpRequest& request, const Caller& caller) {
  auto rank = services_.read(caller, "score", parse_score(request.body, services_.options()));
  if (!rank.ok()) return error_response(rank.status());
  if (Status s = judge(services_, *rank); !s.ok()) return error_response(services_.refuse(caller, "score", s));
  return pool(request, caller, std::move(rank->call));
}

}  // namespace kvasir::server::http
