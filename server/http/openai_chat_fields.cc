#include "server/http/openai_chat_fields.h"

#include "core/cat.h"

namespace kvasir::server::http {
namespace {

// A message's content for the template: text parts become lines of one text, other kinds are refused by name.
Status flatten_content(const Json& content, const std::string& where, Json* out) {
  if (content.is_null() || content.is_string()) return *out = content, Status();
  if (!content.is_array()) return invalid_argument(where + " must be a string or a list of parts").with_field(where);
  std::string text;
  for (const Json& part : content) {
    std::string type =
        part.is_object() && part.contains("type") && part["type"].is_string() ? part["type"].get<std::string>() : "";
    if (type != "text" && type != "refusal")
      return invalid_argument(cat(where, " has a part of type '", type.substr(0, 40), "'; this model reads text only"))
          .with_field(where);
    const char* key = type == "text" ? "text" : "refusal";
    if (!part.contains(key) || !part[key].is_string())
      return invalid_argument(cat(where, " has a part without ", key)).with_field(where);
    if (!text.empty()) text += '\n';
    text += part[key].get<std::string>();
  }
  *out = text;
  return {};
}

// Arguments travel as a JSON string; templates want the object.
Status parse_tool_calls(const Json& calls, const std::string& where, Json* out) {
  if (!calls.is_array()) return invalid_argument(where + " must be a list").with_field(where);
  *out = Json::array();
  for (Json call : calls) {
    if (!call.is_object() || !call.contains("function") || !call["function"].is_object() ||
        !call["function"].contains("name") || !call["function"]["name"].is_string())
      return invalid_argument(where + " has an entry without function.name").with_field(where);
    Json& function = call["function"];
    if (function.contains("arguments") && function["arguments"].is_string()) {
      const std::string text = function["arguments"];  // nothing, where a function takes none, is how some write {}
      auto arguments = parse_json(text.find_first_not_of(" \n\r\t") == std::string::npos ? "{}" : text);
      if (!arguments.ok()) return invalid_argument(where + ".function.arguments is not valid JSON").with_field(where);
      function["arguments"] = *arguments;
    }
    out->push_back(std::move(call));
  }
  return {};
}

Result<Json> read_messages(const Json& messages) {
  Json out = Json::array();
  for (size_t i = 0; i < messages.size(); ++i) {
    const Json& m = messages[i];
    std::string where = cat("messages[", i, "]");
    Fields f(m, where);
    std::string role, name, call_id;
    if (!f.enumeration("role", &role, {"system", "developer", "user", "assistant", "tool"}))
      f.fail("role", "is missing");
    Json one;
    one["role"] = role;
    Json content;
    if (const Json* c = f.raw("content")) KVASIR_TRY(flatten_content(*c, where + ".content", &content));
    one["content"] = content.is_null() ? Json("") : content;
    if (f.string("name", &name)) one["name"] = name;
    if (const Json* calls = f.raw("tool_calls")) {
      if (role != "assistant") f.fail("tool_calls", "is for the assistant's messages only");
      Json parsed;
      KVASIR_TRY(parse_tool_calls(*calls, where + ".tool_calls", &parsed));
      one["tool_calls"] = parsed;
    }
    if (f.string("tool_call_id", &call_id)) one["tool_call_id"] = call_id;
    std::string thinking;
    if (f.string("reasoning_content", &thinking)) one["reasoning_content"] = thinking;
    f.unserved("audio", "this model reads text only");
    f.unserved("function_call", "use tool_calls");
    f.note("refusal");
    f.note("annotations");
    KVASIR_TRY(f.finish());
    out.push_back(std::move(one));
  }
  return out;
}

// The names and parameter schemas of `tools`, checked.
Status read_tools(const Json& tools, const ServerOptions& limits) {
  if (!tools.is_array()) return invalid_argument("tools must be a list").with_field("tools");
  int most = limits.max_tools;
  if (tools.size() > static_cast<size_t>(most))
    return invalid_argument(cat("tools has ", tools.size(), " entries; the limit is ", most)).with_field("tools");
  for (size_t i = 0; i < tools.size(); ++i) {
    const Json& t = tools[i];
    std::string where = cat("tools[", i, "]");
    if (!t.is_object() || t.value("type", Json()) != Json("function"))
      return invalid_argument(where + ".type must be \"function\"").with_field(where);
    if (!t.contains("function") || !t["function"].is_object() || !t["function"].contains("name") ||
        !t["function"]["name"].is_string() || t["function"]["name"].get<std::string>().empty())
      return invalid_argument(where + ".function.name is missing").with_field(where);
    if (const Json schema = t["function"].value("parameters", Json()); !schema.is_null() && !schema.is_object())
      return invalid_argument(where + ".function.parameters must be a JSON schema").with_field(where);
    if (const Json strict = t["function"].value("strict", Json()); !strict.is_null() && !strict.is_boolean())
      return invalid_argument(where + ".function.strict must be true or false").with_field(where);
  }
  return {};
}

// What each tool's arguments are held to. Where the model may choose, one strict tool is enough to hold every call to a
// tool's name, and the arguments of those that are not strict to an object.
std::vector<text::CallableTool> held_tools(const Json& tools, const OpenAiCall& call) {
  std::vector<text::CallableTool> held;
  const bool free = call.tool_choice == ToolChoice::automatic;
  bool any_strict = false;
  for (const Json& tool : tools) {
    const Json& function = tool["function"];
    const bool strict = function.value("strict", Json()) == Json(true);
    any_strict |= strict;
    if (call.tool_choice == ToolChoice::named && function["name"] != call.tool_name) continue;
    // A tool that names no parameters has none: `{}` is all that can be said to it.
    Json schema = function.value("parameters", Json());
    if (schema.is_null()) schema = {{"type", "object"}, {"additionalProperties", false}};
    held.push_back({function["name"], strict || !free ? schema.dump() : R"({"type":"object"})"});
  }
  if (free && !any_strict) held.clear();
  return held;
}

void read_tool_choice(Fields& f, const Json* tools, OpenAiCall& call) {
  const Json* choice = f.raw("tool_choice");
  bool some = tools && !tools->empty();
  call.tool_choice = some ? ToolChoice::automatic : ToolChoice::none;
  if (!choice) return;
  if (choice->is_string()) {
    std::string kind;
    if (!f.enumeration("tool_choice", &kind, {"none", "auto", "required"})) return;
    call.tool_choice = kind == "none" ? ToolChoice::none : kind == "auto" ? call.tool_choice : ToolChoice::required;
  } else if (choice->is_object() && choice->value("type", Json()) == Json("function") && choice->contains("function") &&
             (*choice)["function"].is_object() && (*choice)["function"].value("name", Json()).is_string()) {
    call.tool_choice = ToolChoice::named;
    call.tool_name = (*choice)["function"]["name"].get<std::string>();
  } else {
    return f.fail("tool_choice",
                  "must be none, auto, required, or {\"type\":\"function\",\"function\":{\"name\":...}}");
  }
  if (!some && call.tool_choice != ToolChoice::none) return f.fail("tool_choice", "needs tools to choose from");
  if (call.tool_choice == ToolChoice::named) {
    bool known = false;
    for (const Json& t : *tools) known |= t["function"]["name"] == call.tool_name;
    if (!known) return f.fail("tool_choice", cat("names '", call.tool_name.substr(0, 64), "', which is not in tools"));
  }
}

}  // namespace

void read_grammar(Fields& f, text::GrammarSpec& grammar) {
  using Kind = text::GrammarSpec::Kind;
  auto set = [&](std::string_view name, Kind kind) {
    if (grammar.kind != Kind::none) f.fail(name, "is a second constraint; a request has one");
    grammar.kind = kind;
  };
  if (const Json* format = f.raw("response_format")) {
    Fields inner(*format, "response_format");
    std::string type;
    if (!inner.enumeration("type", &type, {"text", "json_object", "json_schema", "structural_tag"}))
      inner.fail("type", "is missing");
    if (type == "json_object") set("response_format", Kind::json_object);
    if (type == "json_schema") {
      const Json* wrapper = inner.raw("json_schema");
      if (!wrapper || !wrapper->is_object() || !wrapper->contains("schema") || !(*wrapper)["schema"].is_object())
        inner.fail("json_schema", "must be an object with a schema");
      else
        grammar.text = (*wrapper)["schema"].dump();
      set("response_format", Kind::json_schema);
    }
    if (type == "structural_tag") {
      for (const char* name : {"structures", "triggers", "format"}) inner.note(name);  // its compiler's to judge
      set("response_format", Kind::structural_tag);
      grammar.text = format->dump();
    }
    if (Status s = inner.finish(); !s.ok()) f.fail("response_format", "is wrong: " + s.message());
  }
  // vLLM's older names, then its newer object of the same.
  auto read = [&](Fields& from, const std::string& prefix) {
    auto name = [&](const char* kind) { return prefix + kind; };
    if (const Json* schema = from.raw(name("json"))) {
      set(name("json"), Kind::json_schema);
      grammar.text = schema->is_string() ? schema->get<std::string>() : schema->dump();
    }
    if (from.string(name("regex"), &grammar.text)) set(name("regex"), Kind::regex);
    if (from.string(name("grammar"), &grammar.text)) set(name("grammar"), Kind::lark);
    if (from.strings(name("choice"), &grammar.choices, 1024)) set(name("choice"), Kind::choice);
  };
  read(f, "guided_");
  if (const Json* outputs = f.raw("structured_outputs")) {
    Fields inner(*outputs, "structured_outputs");
    read(inner, "");
    if (const Json* tag = inner.raw("structural_tag")) {
      set("structural_tag", Kind::structural_tag);
      grammar.text = tag->is_string() ? tag->get<std::string>() : tag->dump();
    }
    bool any_object = false;
    if (inner.boolean("json_object", &any_object) && any_object)
      set("structured_outputs.json_object", Kind::json_object);
    if (Status s = inner.finish(); !s.ok()) f.fail("structured_outputs", "is wrong: " + s.message());
    if (grammar.kind == Kind::none)
      f.fail("structured_outputs", "is empty; give one of json, regex, choice, grammar, json_object, structural_tag");
  }
}

void read_template_input(Fields& f, ChatInput& chat) {
  Json variables = Json::object();
  if (const Json* extra = f.raw("chat_template_kwargs")) {
    if (!extra->is_object()) return f.fail("chat_template_kwargs", "must be an object");
    variables = *extra;
  }
  if (const Json* documents = f.raw("documents")) variables["documents"] = *documents;
  if (!variables.empty()) chat.variables_json = variables.dump();
  f.boolean("continue_final_message", &chat.continue_final_message);
  const bool asked = f.boolean("add_generation_prompt", &chat.add_generation_prompt) && chat.add_generation_prompt;
  if (asked && chat.continue_final_message)
    f.fail("continue_final_message",
           "and add_generation_prompt are both true; the last message is either continued or followed by a new one");
}

void read_chat(Fields& f, const ServerOptions& limits, OpenAiCall& call) {
  const Json* messages = f.raw("messages");
  if (!messages || !messages->is_array() || messages->empty())
    return f.fail("messages", "must be a list with at least one message");
  auto read = read_messages(*messages);
  if (!read.ok()) return f.fail("messages", "is wrong: " + read.status().message());
  ChatInput chat;
  chat.messages_json = read->dump();

  const Json* tools = f.raw("tools");
  if (tools) {
    if (Status s = read_tools(*tools, limits); !s.ok()) return f.fail("tools", "is wrong: " + s.message());
  }
  read_tool_choice(f, tools, call);
  bool parallel = true;
  if (f.boolean("parallel_tool_calls", &parallel) && !parallel) call.one_tool = true;
  if (f.ok() && tools && call.tool_choice != ToolChoice::none) {
    call.tools_json = chat.tools_json = tools->dump();
    if (call.tool_choice != ToolChoice::automatic && call.input.request.grammar.kind != text::GrammarSpec::Kind::none)
      return f.fail("tool_choice", "that forces a call and response_format cannot both be given");
    call.held_tools = held_tools(*tools, call);
  }
  read_template_input(f, chat);
  call.prompts.emplace_back(std::move(chat));

  f.unserved("functions", "use tools");
  f.unserved("function_call", "use tool_choice");
  f.unserved("audio", "this model writes text only");
  f.unserved("prediction", "predicted outputs are not offered");
  f.unserved("web_search_options", "this server searches nothing");
  f.unserved("reasoning_effort", "use chat_template_kwargs for the switches of this model's template");
  f.unserved("verbosity", "the model has no such switch");
  if (const Json* kinds = f.raw("modalities"); kinds && *kinds != Json::array({"text"}))
    f.fail("modalities", "must be [\"text\"]");
}

}  // namespace kvasir::server::http
