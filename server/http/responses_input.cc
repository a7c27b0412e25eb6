// Items of /v1/responses as messages: calls belong to the assistant's message before them, thoughts to the one behind.
#include "core/cat.h"
#include "core/log.h"
#include "server/http/changing_line.h"
#include "server/http/responses_request.h"

namespace kvasir::server::http {
namespace {

// A string, or parts of text as lines of one text, or pieces of it.
Status read_parts(const Json& content, const std::string& where, std::string* out, const char* between = "\n") {
  if (content.is_string()) return *out = content.get<std::string>(), Status();
  if (!content.is_array()) return wrong(where, "must be a string or a list of parts");
  for (const Json& part : content) {
    const std::string type = part.is_object() ? text_of(part, "type") : "";
    const bool text = type == "input_text" || type == "output_text" || type == "text" || type == "reasoning_text";
    if (!text && type != "refusal")
      return wrong(where, cat("has a part of type '", type.substr(0, 40), "'; this model reads text only"));
    const std::string said = text_of(part, text ? "text" : "refusal");
    if (!out->empty() && !said.empty()) *out += between;
    *out += said;
  }
  return {};
}

class Reader {
 public:
  explicit Reader(Json& messages) : messages_(messages) {}

  Status read(const Json& item, const std::string& where) {
    if (!item.is_object()) return wrong(where, "must be an object");
    const std::string type = item.contains("type") ? text_of(item, "type") : "message";
    if (type == "message") return message(item, where);
    if (type == "function_call") return call(item, where);
    if (type == "function_call_output") return output(item, where);
    if (type == "reasoning") return reasoning(item, where);
    return wrong(where + ".type",
                 cat("is '", type.substr(0, 40),
                     "', which is not served here; send message, function_call, function_call_output or reasoning"));
  }

 private:
  Status message(const Json& item, const std::string& where) {
    const std::string role = text_of(item, "role");
    if (role != "user" && role != "assistant" && role != "system" && role != "developer")
      return wrong(where + ".role",
                   cat("is '", role.substr(0, 40), "'; it must be one of user, assistant, system, developer"));
    std::string text;
    KVASIR_TRY(read_parts(item.value("content", Json()), where + ".content", &text, role == "assistant" ? "" : "\n"));
    if (role == "system" || role == "developer") text = without_changing_line(std::move(text));
    if (role != "assistant")
      messages_.push_back({{"role", role}, {"content", text}});
    else if (open_ && messages_.back().contains("tool_calls"))  // text behind calls is of the same answer
      messages_.back()["content"] = messages_.back()["content"].get<std::string>() + text;
    else
      assistant()["content"] = text;
    open_ = role == "assistant";
    return {};
  }

  Status call(const Json& item, const std::string& where) {
    if (text_of(item, "name").empty() || text_of(item, "call_id").empty())
      return wrong(where, "is a function_call without name or call_id");
    const Json arguments = Json::parse(text_of(item, "arguments"), nullptr, false);
    if (!open_) assistant();
    open_ = true;
    messages_.back()["tool_calls"].push_back(
        {{"id", item["call_id"]},
         {"type", "function"},
         {"function", {{"name", item["name"]}, {"arguments", arguments.is_object() ? arguments : Json::object()}}}});
    return {};
  }

  Status output(const Json& item, const std::string& where) {
    if (text_of(item, "call_id").empty()) return wrong(where, "is a function_call_output without call_id");
    std::string text;
    KVASIR_TRY(read_parts(item.value("output", Json()), where + ".output", &text));
    messages_.push_back({{"role", "tool"}, {"tool_call_id", item["call_id"]}, {"content", text}});
    open_ = false;
    return {};
  }

  Status reasoning(const Json& item, const std::string& where) {
    if (const Json content = item.value("content", Json()); content.is_array())
      KVASIR_TRY(read_parts(content, where + ".content", &thoughts_));
    open_ = false;
    return {};
  }

  Json& assistant() {
    messages_.push_back({{"role", "assistant"}, {"content", ""}});
    if (!thoughts_.empty()) messages_.back()["reasoning_content"] = std::exchange(thoughts_, {});
    return messages_.back();
  }

  Json& messages_;
  std::string thoughts_;
  bool open_ = false;  // the last message is the assistant's, and calls may join it
};

}  // namespace

Status append_items(const Json& items, Json& messages) {
  Reader reader(messages);
  for (size_t i = 0; i < items.size(); ++i) KVASIR_TRY(reader.read(items[i], cat("input[", i, "]")));
  return {};
}

}  // namespace kvasir::server::http
