#include "server/rerank.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/cat.h"

namespace kvasir::server {
namespace {

constexpr const char* kTask =
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    "answer can only be \"yes\" or \"no\".";

std::string question(const std::string& instruction, const TextPair& pair) {
  return cat("<Instruct>: ", instruction, "\n<Query>: ", pair.query, "\n<Document>: ", pair.document);
}

// Three texts, so that no word of a client's becomes a special token. The empty thoughts are what this model was
// trained to answer after.
PooledPrompt chatml_prompt(const std::string& instruction, const TextPair& pair, bool thinks) {
  const char* thoughts = thinks ? "<think>\n\n</think>\n\n" : "";
  PooledPrompt p;
  p.input = TextInput{cat("<|im_start|>system\n", kTask, "<|im_end|>\n<|im_start|>user\n"), false, true};
  p.more.push_back({question(instruction, pair), false, false});
  p.more.push_back({cat("<|im_end|>\n<|im_start|>assistant\n", thoughts), false, true});
  return p;
}

PooledPrompt chat_prompt(const std::string& instruction, const TextPair& pair) {
  const auto messages = nlohmann::json::array(
      {{{"role", "system"}, {"content", kTask}}, {{"role", "user"}, {"content", question(instruction, pair)}}});
  ChatInput chat;
  chat.messages_json = messages.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  chat.variables_json = R"({"enable_thinking":false})";
  return {chat};
}

}  // namespace

Result<std::vector<PooledPrompt>> rerank_prompts(const engine::Engine& engine, const std::string& instruction,
                                                 const std::vector<TextPair>& pairs, engine::Request& request) {
  if (const model::ModelInfo& info = engine.info(); info.labels > 0) {
    if (info.labels != 1)
      return failed_precondition(cat("this classifier has ", info.labels, " labels; scores are of those with one"));
    request.classified = true;
    std::vector<PooledPrompt> prompts;
    prompts.reserve(pairs.size());
    for (const TextPair& pair : pairs)
      prompts.push_back({TextInput{pair.query, true, false}, {TextInput{pair.document, true, false}}, true});
    return prompts;
  }
  const text::TokenizerPtr tokenizer = engine.tokenizer();
  if (!tokenizer) return failed_precondition("this model came without a tokenizer, which scores need");
  const int32_t yes = tokenizer->token_id("yes"), no = tokenizer->token_id("no");
  if (yes < 0 || no < 0)
    return failed_precondition("this model has no tokens \"yes\" and \"no\", by which texts are scored");
  request.scored = {yes, no};
  const bool chatml = tokenizer->token_id("<|im_start|>") >= 0 && tokenizer->token_id("<|im_end|>") >= 0;
  const bool thinks = tokenizer->token_id("<think>") >= 0;
  std::vector<PooledPrompt> prompts;
  prompts.reserve(pairs.size());
  for (const TextPair& pair : pairs)
    prompts.push_back(chatml ? chatml_prompt(instruction, pair, thinks) : chat_prompt(instruction, pair));
  return prompts;
}

float rerank_score(const std::vector<float>& result) {
  if (result.size() == 1) return 1 / (1 + std::exp(-result[0]));
  return 1 / (1 + std::exp(result[1] - result[0]));  // log-probabilities of yes and no
}

}  // namespace kvasir::server
