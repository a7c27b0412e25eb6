#include "server/numbered_calls.h"

#include <map>
#include <nlohmann/json.hpp>

#include "core/cat.h"
#include "model/text/tool_parser.h"

namespace kvasir::server {
namespace {

using Json = nlohmann::ordered_json;

// Null where it is not there, or no text.
std::string* text_of(Json& object, const char* key) {
  auto it = object.is_object() ? object.find(key) : object.end();
  return it == object.end() ? nullptr : it->get_ptr<std::string*>();
}

std::string short_id(int number) {
  const std::string digits = cat(number);
  return cat("call", std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0'), digits);
}

}  // namespace

ChatInput with_numbered_calls(ChatInput chat, const text::ChatTemplate& chat_template) {
  const std::string& source = chat_template.source();
  if (source.find("tool_call_id") == std::string::npos && source.find(".id") == std::string::npos &&
      source.find("['id']") == std::string::npos)
    return chat;
  const bool named = text::tool_format_of(source) == text::ToolFormat::kimi;
  Json messages = Json::parse(chat.messages_json, nullptr, false);
  if (!messages.is_array()) return chat;  // the template says what is wrong
  std::map<std::string, std::string> numbered;
  int calls = 0;
  for (Json& message : messages) {
    if (!message.is_object()) continue;
    if (auto list = message.find("tool_calls"); list != message.end() && list->is_array()) {
      for (Json& call : *list) {
        const std::string* name =
            call.is_object() && call.contains("function") ? text_of(call["function"], "name") : nullptr;
        if (!name) continue;
        const std::string id = named ? cat("functions.", *name, ':', calls) : short_id(calls);
        ++calls;
        if (const std::string* own = text_of(call, "id")) numbered[*own] = id;
        call["id"] = id;
      }
    }
    if (std::string* answered = text_of(message, "tool_call_id"))
      if (auto it = numbered.find(*answered); it != numbered.end()) *answered = it->second;
  }
  if (calls == 0) return chat;
  chat.messages_json = messages.dump(-1, ' ', false, Json::error_handler_t::replace);
  return chat;
}

}  // namespace kvasir::server
