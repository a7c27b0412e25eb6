#include "server/http/openai_chat_fields.h"

#include <algorithm>

#include "core/cat.h"
#include "core/log.h"
#include "server/http/changing_line.h"
#include "server/parameters.h"

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

// Arguments travel as a JSON string; templates are given the object. Those of a call that was cut are no JSON, and a
// client sends them back as they are: then what they were to be is not known.
Status parse_tool_calls(const Json& calls, const std::string& where, Json* out) {
  if (!calls.is_array()) return invalid_argument(where + " must be a list").with_field(where);
  *out = Json::array();
  for (Json call : calls) {
    const bool custom = call.is_object() && call.value("type", Json()) == "custom" && call.contains("custom");
    if (custom) {  // text in, text out: to a template a function of one text
      const Json& said = call["custom"];
      call["type"] = "function";
      call["function"] = {{"name", said.value("name", Json())},
                          {"arguments", {{"input", said.value("input", Json(""))}}}};
      call.erase("custom");
    }
    if (!call.is_object() || !call.contains("function") || !call["function"].is_object() ||
        !call["function"].contains("name") || !call["function"]["name"].is_string())
      return invalid_argument(where + " has an entry without function.name").with_field(where);
    Json& function = call["function"];
    if (function.contains("arguments") && function["arguments"].is_string()) {
      const std::string text = function["arguments"];  // nothing, where a function takes none, is how some write {}
      auto arguments = parse_json(text.find_first_not_of(" \n\r\t") == std::string::npos ? "{}" : text);
      if (!arguments.ok())
        log_debug("arguments of a call are no JSON", {{"where", where}, {"why", arguments.status().message()}});
      function["arguments"] = arguments.ok() ? *arguments : Json::object();
    }
    out->push_back(std::move(call));
  }
  return {};
}

Result<Json> read_messages(const Json& messages, std::string_view of = "messages") {
  Json out = Json::array();
  for (size_t i = 0; i < messages.size(); ++i) {
    const Json& m = messages[i];
    std::string where = cat(of, '[', i, ']');
    Fields f(m, where);
    std::string role, name, call_id;
    if (!f.enumeration("role", &role, {"system", "developer", "user", "assistant", "tool"}))
      f.fail("role", "is missing");
    Json one;
    one["role"] = role;
    Json content;
    if (const Json* c = f.raw("content")) KVASIR_TRY(flatten_content(*c, where + ".content", &content));
    if (content.is_string() && (role == "system" || role == "developer"))
      content = without_changing_line(content.get<std::string>());
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
    if (f.string("reasoning_content", &thinking) || f.string("reasoning", &thinking))
      one["reasoning_content"] = thinking;
    f.unserved("audio", "this model reads text only");
    f.unserved("function_call", "use tool_calls");
    // What a client's library adds to an answer it sends back (`parsed`, `provider_specific_fields`) says nothing here.
    f.pass_over_the_rest();
    KVASIR_TRY(f.finish());
    out.push_back(std::move(one));
  }
  return out;
}

// {"type":"allowed_tools","allowed_tools":{"mode":"auto","tools":[...]}}: only these of the tools may be called.
bool read_allowed_tools(Fields& f, const Json& choice, ToolUse& use) {
  const Json allowed = choice.value("allowed_tools", choice);
  const Json mode = allowed.value("mode", Json("auto")), names = allowed.value("tools", Json());
  if ((mode != "auto" && mode != "required") || !names.is_array() || names.empty())
    return f.fail("tool_choice", "of allowed_tools needs a mode of auto or required, and a list of tools"), false;
  Json some = Json::array();
  for (const Json& one : names) {
    const Json name = one.is_object() ? one.value("function", one).value("name", Json()) : Json();
    const auto it = std::find_if(use.tools.begin(), use.tools.end(),
                                 [&](const Json& tool) { return tool["function"]["name"] == name; });
    if (it == use.tools.end())
      return f.fail("tool_choice", cat("allows ", shown(name), ", which is not in tools")), false;
    some.push_back(*it);
    some.back()["held"] = true;  // the prompt tells of more, which this one is held apart from
  }
  use.tools = std::move(some);
  use.choice = mode == "auto" ? ToolChoice::automatic : ToolChoice::required;
  return true;
}

void read_tool_choice(Fields& f, ToolUse& use) {
  const Json* choice = f.raw("tool_choice");
  const bool some = use.tools.is_array() && !use.tools.empty();
  use.choice = some ? ToolChoice::automatic : ToolChoice::none;
  if (!choice) return;
  if (choice->is_string()) {
    std::string kind;
    if (!f.enumeration("tool_choice", &kind, {"none", "auto", "required"})) return;
    use.choice = kind == "none" ? ToolChoice::none : kind == "auto" ? use.choice : ToolChoice::required;
  } else if (some && choice->is_object() && choice->value("type", Json()) == Json("allowed_tools")) {
    if (!read_allowed_tools(f, *choice, use)) return;
  } else if (choice->is_object() && choice->value("type", Json()) == Json("function") && choice->contains("function") &&
             (*choice)["function"].is_object() && (*choice)["function"].value("name", Json()).is_string()) {
    use.choice = ToolChoice::named;
    use.name = (*choice)["function"]["name"].get<std::string>();
  } else {
    return f.fail("tool_choice",
                  "must be none, auto, required, or {\"type\":\"function\",\"function\":{\"name\":...}}");
  }
  check_tool_choice(f, use);
}

}  // namespace

Status check_tools(const Json& tools, const ServerOptions& limits) {
  if (!tools.is_array()) return invalid_argument("tools must be a list").with_field("tools");
  int most = limits.max_tools;
  if (tools.size() > static_cast<size_t>(most))
    return invalid_argument(cat("tools has ", tools.size(), " entries; the limit is ", most)).with_field("tools");
  for (size_t i = 0; i < tools.size(); ++i) {
    const Json& t = tools[i];
    std::string where = cat("tools[", i, "]");
    if (t.is_object() && t.value("type", Json()) == Json("custom"))
      return invalid_argument(where + ".type is custom, which is not served here; use a function of one string")
          .with_field(where);
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

void read_grammar(Fields& f, text::GrammarSpec& grammar) {
  using Kind = text::GrammarSpec::Kind;
  // One constraint; the same under its old and its new name is still one.
  auto set = [&](std::string_view name, text::GrammarSpec spec) {
    const bool same = spec.kind == grammar.kind && spec.text == grammar.text && spec.choices == grammar.choices;
    if (grammar.kind != Kind::none && !same) return f.fail(name, "is a second constraint; a request has one");
    grammar = std::move(spec);
  };
  if (const Json* format = f.raw("response_format")) {
    Fields inner(*format, "response_format");
    std::string type;
    if (!inner.enumeration("type", &type, {"text", "json_object", "json_schema", "structural_tag"}))
      inner.fail("type", "is missing");
    // A schema beside it is llama-server's, and OpenAI's own of some years ago.
    const Json* schema = type == "json_object" ? inner.raw("schema") : nullptr;
    if (schema && !schema->is_object())
      inner.fail("schema", "must be an object");
    else if (schema)
      set("response_format", {Kind::json_schema, schema->dump()});
    else if (type == "json_object")
      set("response_format", {Kind::json_object});
    if (type == "json_schema") {
      const Json* wrapper = inner.raw("json_schema");
      if (!wrapper || !wrapper->is_object() || !wrapper->contains("schema") || !(*wrapper)["schema"].is_object())
        inner.fail("json_schema", "must be an object with a schema");
      else if (wrapper->value("strict", Json()) == Json(false))
        set("response_format", {Kind::json_schema, (*wrapper)["schema"].dump()});
      else  // unless it is said to be loose: models fill what is open to the token limit
        set("response_format", {Kind::json_schema, closed_schema((*wrapper)["schema"]).dump()});
    }
    if (type == "structural_tag") {
      for (const char* name : {"structures", "triggers", "format"}) inner.note(name);  // its compiler's to judge
      set("response_format", {Kind::structural_tag, format->dump()});
    }
    if (Status s = inner.finish(); !s.ok()) f.fail("response_format", "is wrong: " + s.message());
  }
  // vLLM's older names, then its newer object of the same.
  auto read = [&](Fields& from, const std::string& prefix) {
    auto name = [&](const char* kind) { return prefix + kind; };
    std::string text;
    std::vector<std::string> choices;
    if (const Json* schema = from.raw(name("json")))
      set(name("json"), {Kind::json_schema, schema->is_string() ? schema->get<std::string>() : schema->dump()});
    if (from.string(name("regex"), &text)) set(name("regex"), {Kind::regex, text});
    if (from.string(name("grammar"), &text)) set(name("grammar"), {Kind::lark, text});
    if (from.strings(name("choice"), &choices, 1024)) set(name("choice"), {Kind::choice, "", std::move(choices)});
  };
  read(f, "guided_");
  // SGLang's names.
  std::string text;
  if (f.string("regex", &text)) set("regex", {Kind::regex, text});
  if (f.string("ebnf", &text)) set("ebnf", {Kind::lark, text});
  // llama-server's, where the schema may be an object; SGLang's is a text.
  if (f.string("grammar", &text) && !text.empty()) set("grammar", {Kind::lark, text});
  if (const Json* schema = f.raw("json_schema"))
    set("json_schema", {Kind::json_schema, schema->is_string() ? schema->get<std::string>() : schema->dump()});
  if (const Json* outputs = f.raw("structured_outputs")) {
    Fields inner(*outputs, "structured_outputs");
    read(inner, "");
    if (const Json* tag = inner.raw("structural_tag"))
      set("structural_tag", {Kind::structural_tag, tag->is_string() ? tag->get<std::string>() : tag->dump()});
    bool any_object = false;
    if (inner.boolean("json_object", &any_object) && any_object)
      set("structured_outputs.json_object", {Kind::json_object});
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

namespace {

// How much a model is to think: its template's to follow, if it has such a switch.
void read_effort(Fields& f, ChatInput& chat) {
  std::string effort;
  if (!f.enumeration("reasoning_effort", &effort, {"none", "minimal", "low", "medium", "high", "xhigh", "max"})) return;
  Json variables = chat.variables_json.empty() ? Json::object() : Json::parse(chat.variables_json);
  if (!variables.contains("reasoning_effort")) variables["reasoning_effort"] = effort;
  if (effort == "none" && !variables.contains("enable_thinking")) variables["enable_thinking"] = false;
  chat.variables_json = variables.dump();
}

}  // namespace

namespace {

// One conversation; what a client may have put in front of the answer is kept beside it.
void read_conversation(Fields& f, const Json& messages, std::string_view of, OpenAiCall& call, ChatInput& chat) {
  auto read = read_messages(messages, of);
  if (!read.ok()) return f.fail("messages", "is wrong: " + read.status().message());
  const Json& last = read->back();
  call.last.push_back(last["role"] == "assistant" ? text_of(last, "content") : "");
  chat.messages_json = read->dump();
}

void read_modalities(Fields& f) {
  if (const Json* kinds = f.raw("modalities"); kinds && *kinds != Json::array({"text"}))
    f.fail("modalities", "must be [\"text\"]");
}

}  // namespace

void read_chats(Fields& f, const ServerOptions& limits, OpenAiCall& call) {
  const Json* conversations = f.raw("messages");
  if (!conversations || !conversations->is_array() || conversations->empty())
    return f.fail("messages", "must be a list of conversations, each a list of messages");
  if (conversations->size() > static_cast<size_t>(limits.max_choices))
    return f.fail("messages", cat("has ", conversations->size(), " conversations; the limit is ", limits.max_choices));
  ChatInput usual;
  read_template_input(f, usual);
  read_effort(f, usual);
  call.prompts.reserve(conversations->size());
  call.last.reserve(conversations->size());
  for (size_t i = 0; i < conversations->size(); ++i) {
    const Json& messages = (*conversations)[i];
    const std::string of = cat("messages[", i, ']');
    if (!messages.is_array() || messages.empty())
      return f.fail("messages", cat("is wrong: ", of, " must be a list with at least one message"));
    ChatInput chat = usual;
    read_conversation(f, messages, of, call, chat);
    call.prompts.emplace_back(std::move(chat));
  }
  read_modalities(f);
}

void read_chat(Fields& f, const ServerOptions& limits, OpenAiCall& call) {
  const Json* messages = f.raw("messages");
  if (!messages || !messages->is_array() || messages->empty())
    return f.fail("messages", "must be a list with at least one message");
  ChatInput chat;
  read_conversation(f, *messages, "messages", call, chat);
  if (!f.ok()) return;

  const Json* tools = f.raw("tools");
  if (tools) {
    if (Status s = check_tools(*tools, limits); !s.ok()) return f.fail("tools", "is wrong: " + s.message());
  }
  if (f.ok() && tools) call.tools.tools = *tools;
  read_tool_choice(f, call.tools);
  bool parallel = true;
  if (f.boolean("parallel_tool_calls", &parallel) && !parallel) call.tools.one = true;
  if (f.ok() && tools) {
    chat.tools_json = tools->dump();  // also those that may not be called now: the prompt begins as it did before
    using Kind = text::GrammarSpec::Kind;
    // A JSON format is of the text, which forced calls leave none of.
    const Kind kind = call.input.request.grammar.kind;
    if (call.tools.choice != ToolChoice::none && call.tools.choice != ToolChoice::automatic && kind != Kind::none &&
        kind != Kind::json_object && kind != Kind::json_schema)
      return f.fail("tool_choice", "that forces a call and another constraint cannot both be given");
  }
  read_template_input(f, chat);
  read_effort(f, chat);
  call.prompts.emplace_back(std::move(chat));
  read_modalities(f);
}

}  // namespace kvasir::server::http
