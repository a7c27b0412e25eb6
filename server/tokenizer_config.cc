#include "server/tokenizer_config.h"

#include "core/cat.h"

namespace kvasir::server {

using Json = nlohmann::ordered_json;

Json tokenizer_config(const engine::Engine& engine) {
  const text::TokenizerPtr tokenizer = engine.tokenizer();
  Json config{{"tokenizer_class", "PreTrainedTokenizerFast"},
              {"model_max_length", engine.info().context_length},
              {"clean_up_tokenization_spaces", false}};
  if (tokenizer->bos() >= 0) config["bos_token"] = tokenizer->token_text(tokenizer->bos());
  if (!tokenizer->end_of_generation().empty())
    config["eos_token"] = tokenizer->token_text(tokenizer->end_of_generation().front());
  if (auto chat_template = engine.chat_template()) config["chat_template"] = chat_template->source();
  return config;
}

Json tokenizer_info(const engine::Engine& engine) {
  const text::TokenizerPtr tokenizer = engine.tokenizer();
  Json info = tokenizer_config(engine);
  const Json own = Json::parse(tokenizer->config_json(), nullptr, false);
  if (own.is_object())
    for (const auto& [key, value] : own.items()) {
      // Files of the machine it was made on; and the template that is used may be another (--chat-template).
      if (key == "vocab_file" || key == "merges_file" || (key == "chat_template" && info.contains(key))) continue;
      // Those who never said how long a text may be have a number there that no integer holds.
      if (key == "model_max_length" && !value.is_number_integer()) continue;
      const bool described = key.ends_with("_token") && value.is_object() && value.contains("content");
      info[key] = described ? value["content"] : value;
    }
  if (!info.contains("added_tokens_decoder")) {
    Json& added = info["added_tokens_decoder"] = Json::object();
    for (int32_t id = 0; id < tokenizer->vocab_size(); ++id)
      if (tokenizer->is_special(id)) added[cat(id)] = {{"content", tokenizer->token_text(id)}, {"special", true}};
  }
  return info;
}

}  // namespace kvasir::server
