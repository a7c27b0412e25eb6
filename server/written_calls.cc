#include "server/written_calls.h"

#include <nlohmann/json.hpp>

#include "core/cat.h"
#include "server/json_text.h"

namespace kvasir::server {
namespace {

using Json = nlohmann::ordered_json;

std::string text_in(const Json& message) {
  const Json content = message.value("content", Json());
  return content.is_string() ? content.get<std::string>() : "";
}

// As models write JSON: a blank behind each comma and colon.
void write_spaced(const Json& value, std::string& out) {
  if (!value.is_structured()) {
    out += value.dump(-1, ' ', false, Json::error_handler_t::replace);
    return;
  }
  out += value.is_object() ? '{' : '[';
  const char* between = "";
  for (const auto& [key, one] : value.items()) {
    out += between;
    between = ", ";
    if (value.is_object()) out += json_string(key) + ": ";
    write_spaced(one, out);
  }
  out += value.is_object() ? '}' : ']';
}

std::string written(const Json& call) {
  const Json function = call.is_object() ? call.value("function", Json::object()) : Json::object();
  Json arguments = function.is_object() ? function.value("arguments", Json::object()) : Json::object();
  if (arguments.is_string()) {
    const Json parsed = Json::parse(arguments.get_ref<const std::string&>(), nullptr, false);
    if (parsed.is_object()) arguments = parsed;
  }
  Json said = Json::object();
  said["name"] = function.is_object() ? function.value("name", Json()) : Json();
  said["arguments"] = std::move(arguments);
  std::string out = "<tool_call>";
  write_spaced(said, out);
  return out + "</tool_call>";
}

// Into the content.
bool write_calls(Json& message) {
  const auto calls = message.find("tool_calls");
  if (calls == message.end() || !calls->is_array() || calls->empty()) return false;
  std::string text = text_in(message);
  for (const Json& call : *calls) text += cat(text.empty() ? "" : "\n", written(call));
  message["content"] = text;
  message.erase("tool_calls");
  return true;
}

bool is_of(const Json& message, const char* role) {
  return message.is_object() && message.value("role", Json()) == role;
}

// What tools answered is said by the user, all of it in one message and before what the user says: there are templates
// that want turns to alternate.
bool say_results(Json& messages) {
  Json out = Json::array();
  bool some = false, after_result = false;
  for (Json& message : messages) {
    const bool result = is_of(message, "tool");
    some |= result;
    std::string text = text_in(message);
    if (result) text = cat("<tool_response>\n", text, "\n</tool_response>");
    if (after_result && (result || is_of(message, "user")))
      out.back()["content"] = cat(text_in(out.back()), '\n', text);
    else if (result)
      out.push_back({{"role", "user"}, {"content", text}});
    else
      out.push_back(std::move(message));
    after_result = result;
  }
  messages = std::move(out);
  return some;
}

}  // namespace

ChatInput with_calls_written(ChatInput chat, const text::ChatTemplate& chat_template) {
  auto knows = [&](const char* word) { return chat_template.source().find(word) != std::string::npos; };
  const bool calls = knows("tool_calls"), results = knows("'tool'") || knows("\"tool\"");
  if (calls) return chat;
  Json messages = Json::parse(chat.messages_json, nullptr, false);
  if (!messages.is_array()) return chat;  // the template says what is wrong
  bool changed = false;
  for (Json& message : messages)
    if (message.is_object()) changed |= write_calls(message);
  if (!results) changed |= say_results(messages);
  if (changed) chat.messages_json = messages.dump(-1, ' ', false, Json::error_handler_t::replace);
  return chat;
}

}  // namespace kvasir::server
