#include "server/http/tool_use.h"

#include <algorithm>

#include "core/cat.h"
#include "server/thoughts.h"

namespace kvasir::server::http {
namespace {

using Json = nlohmann::ordered_json;
using Kind = text::GrammarSpec::Kind;

// Schemas by keyword: one, a list, or by name.
constexpr const char *kOne[] = {"items", "not", "if", "then", "else", "contains"}, *kList[] = {"prefixItems"},
                     *kNamed[] = {"properties", "patternProperties", "$defs", "definitions"};
constexpr const char* kJoins[] = {"allOf", "anyOf", "oneOf"};

// `joined`: what another schema lists is here, too.
void close(Json& schema, bool joined) {
  if (!schema.is_object()) return;
  const bool lists = schema.contains("properties");
  bool joins = schema.contains("$ref");
  for (const char* key : kJoins) joins |= schema.contains(key);
  if (lists && !joined && !joins && !schema.contains("patternProperties") &&
      !schema.contains("unevaluatedProperties") && !schema.contains("additionalProperties"))
    schema["additionalProperties"] = false;
  for (const char* key : kJoins)
    if (auto it = schema.find(key); it != schema.end() && it->is_array())
      for (Json& one : *it) close(one, joined || lists || std::string_view(key) == "allOf");
  for (const char* key : kOne)
    if (auto it = schema.find(key); it != schema.end()) close(*it, false);
  for (const char* key : kList)
    if (auto it = schema.find(key); it != schema.end() && it->is_array())
      for (Json& one : *it) close(one, false);
  for (const char* key : kNamed)
    if (auto it = schema.find(key); it != schema.end() && it->is_object())
      for (auto& [name, one] : it->items()) close(one, false);
}

constexpr const char* kAnyObject = R"({"type":"object"})";

// The schema that constrains each tool's arguments. Where the model may choose, one strict tool, or one that may not be
// called now, is enough to constrain every call to a tool's name, and arguments of tools that are not strict to an
// object.
std::vector<text::CallableTool> held_tools(const ToolUse& use) {
  std::vector<text::CallableTool> held;
  const bool free = use.choice == ToolChoice::automatic;
  bool any_strict = false;
  for (const Json& tool : use.tools) {
    const Json& function = tool["function"];
    const bool strict = function.value("strict", Json()) == Json(true);
    any_strict |= strict || tool.contains("held");
    if (use.choice == ToolChoice::named && function["name"] != use.name) continue;
    // A tool that names no parameters has none: `{}` is all that can be said to it.
    Json schema = function.value("parameters", Json());
    if (schema.is_null()) schema = {{"type", "object"}, {"additionalProperties", false}};
    held.push_back({function["name"], strict || !free ? closed_schema(std::move(schema)).dump() : kAnyObject});
  }
  if (free && !any_strict) held.clear();
  return held;
}

// Those whose schema says that they are strings.
text::TextParameters text_parameters(const ToolUse& use) {
  text::TextParameters out;
  for (const Json& tool : use.tools) {
    const Json schema = tool["function"].value("parameters", Json());
    const Json properties = schema.is_object() ? schema.value("properties", Json()) : Json();
    if (!properties.is_object()) continue;
    for (const auto& [key, of] : properties.items())
      if (of.is_object() && of.value("type", Json()) == "string")
        out.emplace(tool["function"]["name"].get<std::string>(), key);
  }
  return out;
}

// A grammar writes a held tool's texts its own way.
void read_as_held(const std::vector<text::CallableTool>& held, text::TextParameters& texts) {
  for (const text::CallableTool& tool : held) {
    if (tool.parameters_json == kAnyObject) continue;
    std::erase_if(texts, [&](const auto& text) { return text.first == tool.name; });
    texts.merge(text::bare_texts({&tool, 1}));
  }
}

}  // namespace

void check_tool_choice(Fields& fields, const ToolUse& use) {
  if (use.choice == ToolChoice::none) return;
  if (!use.tools.is_array() || use.tools.empty()) return fields.fail("tool_choice", "needs tools to choose from");
  if (use.choice != ToolChoice::named) return;
  for (const Json& t : use.tools)
    if (t["function"]["name"] == use.name) return;
  fields.fail("tool_choice", cat("names '", use.name.substr(0, 64), "', which is not in tools"));
}

Json closed_schema(Json schema) {
  close(schema, false);
  return schema;
}

AnswerShape prepare_tools(const Services& services, const ToolUse& use, engine::Request& request) {
  text::GrammarSpec& grammar = request.grammar;
  AnswerShape shape;
  const auto chat_template = services.engine().chat_template();
  if (!chat_template || use.choice == ToolChoice::none || !use.tools.is_array() || use.tools.empty()) return shape;
  const std::string& named = services.options().tool_parser;
  if (named == "none" && use.choice == ToolChoice::automatic) return shape;
  shape.tools = text::tool_format_named(named).value_or(text::tool_format_of(chat_template->source()));
  if (shape.tools == text::ToolFormat::none) shape.tools = text::ToolFormat::hermes;  // as they are described to it
  const std::vector<text::CallableTool> held = held_tools(use);
  const bool forced = use.choice != ToolChoice::automatic, holds = text::can_hold(shape.tools, held);
  if (forced && !holds) shape.tools = text::ToolFormat::hermes;
  shape.one = use.one || use.choice == ToolChoice::named;
  shape.only_calls = forced;
  shape.says_so = use.choice != ToolChoice::named;
  shape.texts = text_parameters(use);
  if (use.choice == ToolChoice::named && shape.tools == text::ToolFormat::hermes) {
    shape.before = "<tool_call>{\"name\":" + Json(use.name).dump() + ",\"arguments\":";
    grammar = {Kind::json_schema, held[0].parameters_json, {}};
  } else if (forced) {
    grammar = calls_grammar(shape.tools, held, {}, shape.one ? text::HowMany::one : text::HowMany::some);
    read_as_held(held, shape.texts);
  } else if (!held.empty() && holds) {
    const bool alone = grammar.kind == Kind::none, json = grammar.kind == Kind::json_object;
    if (alone || json || grammar.kind == Kind::json_schema) {
      grammar = calls_grammar(shape.tools, held, alone ? "" : json ? kAnyObject : grammar.text);
      read_as_held(held, shape.texts);
    }
  }
  if (tags_are_special(shape.tools)) request.skip_special = false;
  return shape;
}

text::ReasoningFormat reasoning_format(const Services& services) {
  return server::reasoning_format(services.options(), services.engine());
}

void show_reasoning(const Services& services, engine::Request& request) {
  if (text::reasoning_tags(reasoning_format(services)).special) request.skip_special = false;
}

void prepare_reasoning(const Services& services, const std::vector<int32_t>& prompt, const text::GrammarSpec& grammar,
                       AnswerShape& shape) {
  const auto chat_template = services.engine().chat_template();
  const bool free = grammar.kind == Kind::none || (grammar.kind == Kind::tool_calls && !shape.only_calls);
  if (!chat_template || !free) return;  // a grammar's text has no thoughts
  shape.reasoning = reasoning_format(services);
  if (shape.reasoning == text::ReasoningFormat::none) return;
  shape.thinks_at_once = ends_in_thoughts(prompt, shape.reasoning, *services.engine().tokenizer());
}

}  // namespace kvasir::server::http
