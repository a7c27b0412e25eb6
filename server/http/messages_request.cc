#include "server/http/messages_request.h"

#include "core/cat.h"
#include "core/log.h"
#include "server/http/changing_line.h"
#include "server/http/fields.h"

namespace kvasir::server::http {
namespace {

// A string, or blocks of type text as lines of one text, or pieces of it.
Status read_text(const Json& content, const std::string& where, std::string* out, const char* between = "\n") {
  if (content.is_null()) return {};
  if (content.is_string()) return *out = content.get<std::string>(), Status();
  if (!content.is_array()) return wrong(where, "must be a string or a list of blocks");
  for (const Json& block : content) {
    const std::string type = block.is_object() ? text_of(block, "type") : "";
    if (type != "text" || !block.contains("text") || !block["text"].is_string())
      return wrong(where, cat("has a block of type '", type.substr(0, 40), "'; this model reads text only"));
    if (!out->empty()) *out += between;
    *out += text_of(block, "text");
  }
  return {};
}

Status read_system(const Json& system, std::string* out) {
  KVASIR_TRY(read_text(system, "system", out));
  *out = without_changing_line(std::move(*out));
  return {};
}

// A user's blocks: results of tools are messages of their own, before what is said beside them.
Status read_user(const Json& content, const std::string& where, Json& messages) {
  if (!content.is_array()) {
    std::string text;
    KVASIR_TRY(read_text(content, where, &text));
    messages.push_back({{"role", "user"}, {"content", text}});
    return {};
  }
  Json said = Json::array();
  for (const Json& block : content) {
    if (!block.is_object() || block.value("type", Json()) != "tool_result") {
      said.push_back(block);
      continue;
    }
    std::string text;
    KVASIR_TRY(read_text(block.value("content", Json()), where + ".tool_result", &text));
    if (!block.contains("tool_use_id") || !block["tool_use_id"].is_string())
      return wrong(where, "has a tool_result without tool_use_id");
    if (block.value("is_error", Json()) == Json(true)) text = "Error: " + text;
    messages.push_back({{"role", "tool"}, {"tool_call_id", block["tool_use_id"]}, {"content", text}});
  }
  if (said.empty()) return {};
  std::string text;
  KVASIR_TRY(read_text(said, where, &text));
  messages.push_back({{"role", "user"}, {"content", text}});
  return {};
}

Status read_assistant(const Json& content, const std::string& where, Json& messages) {
  Json message{{"role", "assistant"}, {"content", ""}};
  if (!content.is_array()) {
    std::string text;
    KVASIR_TRY(read_text(content, where, &text));
    message["content"] = text;
    messages.push_back(message);
    return {};
  }
  Json said = Json::array(), calls = Json::array();
  std::string thoughts, text;
  for (const Json& block : content) {
    const std::string type = block.is_object() ? text_of(block, "type") : "";
    if (type == "thinking") {
      thoughts += text_of(block, "thinking");
    } else if (type == "redacted_thinking") {
      log_debug("a block is passed over", {{"type", type}});  // it is not ours, and cannot be read
    } else if (type == "tool_use") {
      if (text_of(block, "name").empty() || text_of(block, "id").empty())
        return wrong(where, "has a tool_use without id or name");
      const Json input = block.value("input", Json::object());
      calls.push_back(
          {{"id", block["id"]},
           {"type", "function"},
           {"function", {{"name", block["name"]}, {"arguments", input.is_object() ? input : Json::object()}}}});
    } else {
      said.push_back(block);
    }
  }
  KVASIR_TRY(read_text(said, where, &text, ""));  // as it was written: calls stood between them, or nothing
  message["content"] = text;
  if (!thoughts.empty()) message["reasoning_content"] = thoughts;
  if (!calls.empty()) message["tool_calls"] = calls;
  messages.push_back(message);
  return {};
}

Status read_messages(const Json& list, Json& messages) {
  if (!list.is_array() || list.empty()) return wrong("messages", "must be a list with at least one message");
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string where = cat("messages[", i, "]");
    Fields f(list[i], where);
    std::string role;
    if (!f.enumeration("role", &role, {"user", "assistant", "system"})) f.fail("role", "is missing");
    const Json* content = f.raw("content");
    if (!content) f.fail("content", "is missing");
    f.pass_over_the_rest();
    KVASIR_TRY(f.finish());
    if (role == "user") {
      KVASIR_TRY(read_user(*content, where + ".content", messages));
    } else if (role == "assistant") {
      KVASIR_TRY(read_assistant(*content, where + ".content", messages));
    } else {
      std::string text;
      KVASIR_TRY(read_text(*content, where + ".content", &text));
      messages.push_back({{"role", "system"}, {"content", text}});
    }
  }
  return {};
}

// As OpenAI's functions, which templates know.
Status read_tools(const Json& tools, const ServerOptions& limits, ToolUse& use) {
  if (!tools.is_array()) return wrong("tools", "must be a list");
  if (tools.size() > static_cast<size_t>(limits.max_tools))
    return wrong("tools", cat("has ", tools.size(), " entries; the limit is ", limits.max_tools));
  use.tools = Json::array();
  for (size_t i = 0; i < tools.size(); ++i) {
    const Json& t = tools[i];
    const std::string where = cat("tools[", i, "]");
    if (!t.is_object()) return wrong(where, "must be an object");
    if (const std::string type = text_of(t, "type"); !type.empty() && type != "custom")
      return wrong(where + ".type",
                   cat("is '", type.substr(0, 40), "', which is not served here; tools are the client's own"));
    if (text_of(t, "name").empty()) return wrong(where + ".name", "is missing");
    const Json schema = t.value("input_schema", Json());
    if (!schema.is_object()) return wrong(where + ".input_schema", "must be a JSON schema");
    Json function{{"name", t["name"]}};
    if (t.contains("description")) function["description"] = t["description"];
    function["parameters"] = schema;
    if (t.value("strict", Json()) == Json(true)) function["strict"] = true;
    use.tools.push_back({{"type", "function"}, {"function", std::move(function)}});
  }
  return {};
}

void read_tool_choice(Fields& f, ToolUse& use) {
  const bool some = use.tools.is_array() && !use.tools.empty();
  use.choice = some ? ToolChoice::automatic : ToolChoice::none;
  const Json* choice = f.raw("tool_choice");
  if (!choice) return;
  Fields inner(*choice, "tool_choice");
  std::string type;
  if (!inner.enumeration("type", &type, {"auto", "any", "tool", "none"})) inner.fail("type", "is missing");
  inner.string("name", &use.name);
  inner.boolean("disable_parallel_tool_use", &use.one);
  if (Status s = inner.finish(); !s.ok()) return f.fail("tool_choice", "is wrong: " + s.message());
  if (type == "none") use.choice = ToolChoice::none;
  if (type == "any") use.choice = ToolChoice::required;
  if (type == "tool") use.choice = ToolChoice::named;
  check_tool_choice(f, use);
}

void read_thinking(Fields& f, ChatInput& chat, std::optional<int64_t>& budget) {
  const Json* thinking = f.raw("thinking");
  std::string type = "disabled";
  if (thinking) {
    Fields inner(*thinking, "thinking");
    if (!inner.enumeration("type", &type, {"enabled", "disabled", "adaptive"})) inner.fail("type", "is missing");
    if (int64_t tokens = 0; inner.integer("budget_tokens", &tokens)) {
      if (tokens < 0) inner.fail("budget_tokens", cat("is ", tokens, "; it must be 0 or more"));
      if (type == "enabled") budget = tokens;
    }
    inner.pass_over_the_rest();
    if (Status s = inner.finish(); !s.ok()) return f.fail("thinking", "is wrong: " + s.message());
  }
  chat.variables_json = Json{{"enable_thinking", type != "disabled"}}.dump();
}

// {"format":{"type":"json_schema","schema":{...}}}, or the format by itself under its older name.
void read_format(Fields& f, text::GrammarSpec& grammar) {
  const Json *config = f.raw("output_config"), *format = f.raw("output_format");
  if (config && config->is_object() && config->contains("format")) format = &(*config)["format"];
  if (!format || format->is_null()) return;
  if (!format->is_object() || format->value("type", Json()) != "json_schema" ||
      !format->value("schema", Json()).is_object())
    return f.fail("output_config", "must have a format of type json_schema with a schema");
  grammar = {text::GrammarSpec::Kind::json_schema, closed_schema((*format)["schema"]).dump(), {}};
}

void read_said(Fields& f, GenerateInput& in) {
  const Json* metadata = f.raw("metadata");
  if (!metadata) return;
  if (!metadata->is_object()) return f.fail("metadata", "must be an object");
  in.said.user = text_of(*metadata, "user_id").substr(0, 512);
}

}  // namespace

Result<MessagesCall> parse_messages(std::string_view body, const ServerOptions& limits, bool counting) {
  KVASIR_ASSIGN(Json json, parse_json(body));
  Fields f(json);
  MessagesCall call;
  GenerateInput& in = call.input;
  in.protocol = "anthropic.messages";
  in.wire = Wire::messages;
  in.request.sampling = limits.sampling;
  f.string("model", &in.model);
  f.parameters(in);
  f.boolean("stream", &call.stream);
  if (!counting && !in.request.max_tokens) f.fail("max_tokens", "is missing");
  if (!f.ok()) return f.finish();
  ChatInput chat;
  Json messages = Json::array();
  std::string system;
  Status status;
  if (const Json* s = f.raw("system")) status = read_system(*s, &system);
  if (!system.empty()) messages.push_back({{"role", "system"}, {"content", system}});
  if (const Json* list = f.raw("messages"); status.ok()) status = read_messages(list ? *list : Json(), messages);
  if (const Json* tools = f.raw("tools"); tools && status.ok()) status = read_tools(*tools, limits, call.tools);
  KVASIR_TRY(status);
  read_tool_choice(f, call.tools);
  read_thinking(f, chat, call.thinking_budget);
  read_format(f, in.request.grammar);
  read_said(f, in);
  std::string tier;
  f.enumeration("service_tier", &tier, {"auto", "standard_only"});
  f.unserved("mcp_servers", "this server calls nobody; give tools");
  f.unserved("container", "there are none");
  f.unserved("inference_geo", "there is one place", "\"global\"");
  for (const char* name : {"context_management", "cache_control", "betas"}) f.note(name);  // prefixes are cached anyway
  KVASIR_TRY(f.finish());
  // Also where none may be called now: the prompt begins as it did before.
  if (call.tools.tools.is_array()) chat.tools_json = call.tools.tools.dump();
  // An answer that the client has begun goes on.
  const Json& last = messages.back();
  chat.continue_final_message = last["role"] == "assistant" && !last.contains("tool_calls");
  chat.add_generation_prompt = !chat.continue_final_message;
  chat.messages_json = messages.dump();
  in.prompt = std::move(chat);
  return call;
}

}  // namespace kvasir::server::http
