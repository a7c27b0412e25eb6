// How well a text answers a query: the prompt that a model is given, and the score read from its answer.
#pragma once

#include <string>
#include <vector>

#include "server/services.h"

namespace kvasir::server {

struct TextPair {
  std::string query, document;
};

// What Qwen's rerankers are told where nothing else is asked.
inline constexpr const char* kRerankInstruction =
    "Given a web search query, retrieve relevant passages that answer the query";

// The prompts of these pairs. A classifier reads them as pairs. A decoder is asked to say yes or no, as Qwen3-Reranker
// is, and `request` wants both words scored.
Result<std::vector<PooledPrompt>> rerank_prompts(const engine::Engine& engine, const std::string& instruction,
                                                 const std::vector<TextPair>& pairs, engine::Request& request);

// From 0 to 1: of yes and no, the share of yes; of a classifier, the sigmoid of its score.
float rerank_score(const std::vector<float>& result);

}  // namespace kvasir::server
