#include "server/continued_chat.h"

#include <nlohmann/json.hpp>

#include "core/cat.h"

namespace kvasir::server {
namespace {

using Json = nlohmann::ordered_json;

Status refuse(const std::string& why) {
  return invalid_argument("continue_final_message " + why).with_field("continue_final_message");
}

// A word that stands nowhere in the messages, so that where it comes out is where the last of them ends.
std::string unused_word(std::string_view messages) {
  std::string word = "kvasir-continues-here";
  for (int i = 0; messages.find(word) != std::string_view::npos; ++i) word = cat("kvasir-continues-here-", i, "-");
  return word;
}

}  // namespace

Result<std::string> render_chat(const ChatInput& chat, const text::ChatTemplate& chat_template) {
  auto render = [&](const std::string& messages, bool prompt) {
    return chat_template.render(messages, chat.tools_json, prompt, chat.variables_json);
  };
  if (!chat.continue_final_message) return render(chat.messages_json, chat.add_generation_prompt);
  Json messages = Json::parse(chat.messages_json, nullptr, false);
  if (!messages.is_array() || messages.empty() || !messages.back().is_object())
    return refuse("needs messages, the last of them the assistant's");
  Json& last = messages.back();
  if (last.value("role", Json()) != "assistant")
    return refuse(cat("needs the last message to be the assistant's; its role is ",
                      last.value("role", Json()).dump(-1, ' ', true, Json::error_handler_t::replace).substr(0, 40)));
  if (last.contains("tool_calls") && !last["tool_calls"].empty())
    return refuse("cannot continue a message with tool_calls; end it with text");
  if (!last.contains("content") || !last["content"].is_string())
    return refuse("is not possible: the content of the last message must be text");
  // The blank after the word tells whether the template trims what a message ends with; then the message is trimmed
  // too.
  const std::string word = unused_word(chat.messages_json);
  last["content"] = cat(last["content"].get_ref<const std::string&>(), word, " ");
  KVASIR_ASSIGN(std::string text, render(messages.dump(-1, ' ', false, Json::error_handler_t::replace), false));
  const size_t at = text.rfind(word);
  if (at == std::string::npos)
    return refuse("is not possible with this model's chat template: it does not write the last message out");
  const bool trims = at + word.size() >= text.size() || text[at + word.size()] != ' ';
  text.resize(at);
  if (trims) text.resize(text.find_last_not_of(" \n\r\t") + 1);
  return text;
}

}  // namespace kvasir::server
