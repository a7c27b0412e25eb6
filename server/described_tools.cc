#include "server/described_tools.h"

#include <nlohmann/json.hpp>

namespace kvasir::server {
namespace {

using Json = nlohmann::ordered_json;

std::string description(const Json& tools) {
  std::string text = "You can call these functions:\n<tools>\n";
  for (const Json& tool : tools) {
    const Json& function = tool.contains("function") ? tool["function"] : tool;
    text += function.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  }
  return text +
         "</tools>\nTo call one, write a JSON object with its name and arguments between tags and nothing else:\n"
         "<tool_call>{\"name\": \"...\", \"arguments\": {...}}</tool_call>";
}

bool is_system(const Json& message) {
  if (!message.is_object() || !message.contains("content")) return false;
  const Json role = message.value("role", Json());
  return role == "system" || role == "developer";
}

}  // namespace

ChatInput with_tools_described(ChatInput chat, const text::ChatTemplate& chat_template) {
  if (chat.tools_json.empty() || chat_template.source().find("tools") != std::string::npos) return chat;
  Json messages = Json::parse(chat.messages_json, nullptr, false);
  const Json tools = Json::parse(chat.tools_json, nullptr, false);
  if (!messages.is_array() || !tools.is_array()) return chat;  // the template says what is wrong
  chat.tools_json.clear();
  if (tools.empty()) return chat;
  const std::string text = description(tools);
  Json* content = !messages.empty() && is_system(messages[0]) ? &messages[0]["content"] : nullptr;
  if (content && content->is_string())
    *content = content->get<std::string>() + "\n\n" + text;
  else if (content && content->is_array())
    content->push_back({{"type", "text"}, {"text", "\n" + text}});
  else
    messages.insert(messages.begin(), Json{{"role", "system"}, {"content", text}});
  chat.messages_json = messages.dump(-1, ' ', false, Json::error_handler_t::replace);
  return chat;
}

}  // namespace kvasir::server
