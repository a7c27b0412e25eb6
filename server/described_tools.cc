#include "server/described_tools.h"

#include <algorithm>
#include <cctype>
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

// Whether `name` is a word of its own in what the template evaluates: not of its text, its comments or its strings.
bool evaluates(std::string_view source, std::string_view name) {
  auto in_word = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.'; };
  std::string_view closes;  // what ends the block, the comment or the string that is read
  bool code = false;
  for (size_t at = 0; at < source.size();) {
    const std::string_view rest = source.substr(at);
    if (!closes.empty() && !code) {  // a comment
      at = rest.starts_with(closes) ? (closes = "", at + 2) : at + 1;
    } else if (!code) {
      closes = rest.starts_with("{{") ? "}}" : rest.starts_with("{%") ? "%}" : rest.starts_with("{#") ? "#}" : "";
      code = !closes.empty() && closes != "#}";
      at += closes.empty() ? 1 : 2;
    } else if (rest.starts_with(closes)) {
      closes = "", code = false, at += 2;
    } else if (rest[0] == '\'' || rest[0] == '"') {
      for (++at; at < source.size() && source[at] != rest[0]; ++at) at += source[at] == '\\';
      ++at;
    } else {
      const size_t length = size_t(std::find_if_not(rest.begin(), rest.end(), in_word) - rest.begin());
      if (rest.substr(0, length) == name) return true;
      at += std::max<size_t>(length, 1);
    }
  }
  return false;
}

// For a template that writes the variable `functions` out, as those of Firefunction do: the functions as a text of
// JSON, or none.
ChatInput with_functions(ChatInput chat) {
  Json variables = chat.variables_json.empty() ? Json::object() : Json::parse(chat.variables_json, nullptr, false);
  const Json tools = Json::parse(chat.tools_json.empty() ? "[]" : chat.tools_json, nullptr, false);
  if (!variables.is_object() || variables.contains("functions") || !tools.is_array()) return chat;
  Json functions = Json::array();
  for (const Json& tool : tools) functions.push_back(tool.contains("function") ? tool["function"] : tool);
  variables["functions"] = tools.empty() ? "" : functions.dump(4, ' ', false, Json::error_handler_t::replace);
  chat.variables_json = variables.dump(-1, ' ', false, Json::error_handler_t::replace);
  return chat;
}

bool is_system(const Json& message) {
  if (!message.is_object() || !message.contains("content")) return false;
  const Json role = message.value("role", Json());
  return role == "system" || role == "developer";
}

}  // namespace

ChatInput with_tools_described(ChatInput chat, const text::ChatTemplate& chat_template) {
  if (evaluates(chat_template.source(), "functions") && !evaluates(chat_template.source(), "tools"))
    return with_functions(std::move(chat));
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
