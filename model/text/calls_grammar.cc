// The grammar that holds calls to their tools: what it is told (rust/src/calls.rs), and which tools it can hold.
#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>

#include "model/text/tool_parser.h"

namespace kvasir::text {
namespace {

using Json = nlohmann::ordered_json;

// Keywords that say nothing of a value.
constexpr std::string_view kNotes[] = {"title",   "description", "default",  "examples",  "$comment",
                                       "$schema", "deprecated",  "readOnly", "writeOnly", "strict"};
constexpr std::string_view kOfText[] = {"type", "enum", "const", "minLength", "maxLength"};
constexpr std::string_view kOfList[] = {"type",  "properties", "required", "additionalProperties",
                                        "$defs", "definitions"};

bool among(std::string_view key, std::span<const std::string_view> keys) {
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

// Names that the readers of blocks take for some.
bool is_plain(std::string_view name) {
  return !name.empty() && name.size() <= 256 && name.find_first_of(" \n\r\t\"<>{}()[]") == std::string_view::npos;
}

// Values are not quoted, and keys stand in tags.
bool quotes_nothing(ToolFormat format) {
  return format == ToolFormat::xml || format == ToolFormat::seed || format == ToolFormat::glm ||
         format == ToolFormat::minimax;
}

// Names in a syntax of Python's kind.
bool is_word(std::string_view name) {
  auto in_word = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.' || c == '-'; };
  return !name.empty() && name.size() <= 256 && std::all_of(name.begin(), name.end(), in_word);
}

// What rust/src/call_values.rs writes in Gemma's syntax.
bool is_plain_value(const Json& schema, const Json& defs, int depth = 0) {
  if (schema == Json(true)) return true;
  if (!schema.is_object() || depth > 32) return false;
  Json said = Json::object();
  for (const auto& [key, of] : schema.items())
    if (!among(key, kNotes) && key != "$defs" && key != "definitions") said[key] = of;
  if (said.empty()) return true;
  auto plain = [&](const Json& one) { return is_plain_value(one, defs, depth + 1); };
  if (said.size() == 1 && said.contains("$ref")) {
    const std::string name = said["$ref"].is_string() ? said["$ref"].get<std::string>() : "";
    const Json* found = name.starts_with("#/$defs/") && defs.is_object() && defs.contains(name.substr(8))
                            ? &defs[name.substr(8)]
                            : nullptr;
    return found && plain(*found);
  }
  if (said.size() == 1 && said.contains("anyOf"))
    return said["anyOf"].is_array() && !said["anyOf"].empty() &&
           std::all_of(said["anyOf"].begin(), said["anyOf"].end(), plain);
  auto scalar = [](const Json& one) { return !one.is_structured(); };
  if (said.contains("const") || said.contains("enum")) {
    said.erase("type");
    if (said.size() != 1) return false;
    const Json list = said.contains("const") ? Json::array({said["const"]}) : said["enum"];
    return list.is_array() && !list.empty() && std::all_of(list.begin(), list.end(), scalar);
  }
  constexpr std::string_view kKnown[] = {"type",
                                         "minLength",
                                         "maxLength",
                                         "items",
                                         "minItems",
                                         "maxItems",
                                         "properties",
                                         "required",
                                         "additionalProperties",
                                         "minimum",
                                         "maximum",
                                         "exclusiveMinimum",
                                         "exclusiveMaximum",
                                         "multipleOf"};
  const Json type = said.value("type", Json());
  if (type.is_null() || (type.is_structured() && (!type.is_array() || type.empty()))) return false;
  for (const auto& [key, of] : said.items())
    if (!among(key, kKnown)) return false;
  if (said.contains("items") && !plain(said["items"])) return false;
  const Json properties = said.value("properties", Json::object()),
             more = said.value("additionalProperties", Json(false));
  if (more != Json(false) || !properties.is_object()) return false;
  for (const auto& [key, of] : properties.items())
    if (!is_word(key) || !plain(of)) return false;
  for (const Json& name : said.value("required", Json::array()))
    if (!name.is_string() || !properties.contains(name.get_ref<const std::string&>())) return false;
  return true;
}

bool is_bare_text(const Json& schema) {
  if (!schema.is_object() || schema.value("type", Json()) != "string") return false;
  for (const auto& [key, of] : schema.items())
    if (!among(key, kOfText) && !among(key, kNotes)) return false;
  auto is_text = [](const Json& one) { return one.is_string() && !one.get_ref<const std::string&>().empty(); };
  if (schema.contains("const")) return is_text(schema["const"]);
  if (!schema.contains("enum")) return true;
  const Json& list = schema["enum"];
  return list.is_array() && !list.empty() && std::all_of(list.begin(), list.end(), is_text);
}

// What it refers to is found where the tool's definitions are put.
bool stands_alone(const Json& schema) {
  if (!schema.is_structured()) return true;
  for (const auto& [key, of] : schema.items()) {
    if (schema.is_object() && key == "$ref" &&
        !(of.is_string() && (of.get_ref<const std::string&>().starts_with("#/$defs/") ||
                             of.get_ref<const std::string&>().starts_with("#/definitions/"))))
      return false;
    if (!stands_alone(of)) return false;
  }
  return true;
}

bool lists_parameters(const Json& schema) {
  if (!schema.is_object() || schema.value("type", Json("object")) != "object") return false;
  for (const auto& [key, of] : schema.items())
    if (!among(key, kOfList) && !among(key, kNotes)) return false;
  const Json properties = schema.value("properties", Json::object()),
             required = schema.value("required", Json::array());
  if (!properties.is_object() || !required.is_array()) return false;
  for (const Json& name : required)
    if (!name.is_string() || !properties.contains(name.get_ref<const std::string&>())) return false;
  for (const auto& [key, of] : properties.items())
    if (!is_plain(key) || !of.is_object() || of.contains("$defs") || of.contains("definitions") || !stands_alone(of))
      return false;
  return true;
}

// A plain list of parameters, which have words for names.
bool lists_words(ToolFormat format, const CallableTool& tool) {
  const Json schema = Json::parse(tool.parameters_json, nullptr, false);
  if (!is_word(tool.name) || !lists_parameters(schema)) return false;
  const Json properties = schema.value("properties", Json::object());
  for (const auto& [key, of] : properties.items())
    if (!is_word(key) || (format == ToolFormat::gemma && !is_plain_value(of, schema.value("$defs", Json()))))
      return false;
  return true;
}

}  // namespace

bool can_hold(ToolFormat format, std::span<const CallableTool> tools) {
  switch (format) {
    case ToolFormat::none: return false;
    case ToolFormat::pythonic:
    case ToolFormat::gemma:
    case ToolFormat::olmo:
      return std::all_of(tools.begin(), tools.end(), [&](const CallableTool& one) { return lists_words(format, one); });
    case ToolFormat::hermes:
    case ToolFormat::llama3: return true;
    default: break;
  }
  return std::all_of(tools.begin(), tools.end(), [&](const CallableTool& tool) {
    return is_plain(tool.name) &&
           (!quotes_nothing(format) || lists_parameters(Json::parse(tool.parameters_json, nullptr, false)));
  });
}

TextParameters bare_texts(std::span<const CallableTool> tools) {
  TextParameters out;
  for (const CallableTool& tool : tools) {
    const Json schema = Json::parse(tool.parameters_json, nullptr, false);
    const Json properties = schema.is_object() ? schema.value("properties", Json()) : Json();
    if (!properties.is_object()) continue;
    for (const auto& [key, of] : properties.items())
      if (is_bare_text(of)) out.emplace(tool.name, key);
  }
  return out;
}

GrammarSpec calls_grammar(ToolFormat format, std::span<const CallableTool> tools, std::string_view answer_schema,
                          HowMany how_many) {
  Json list = Json::array();
  for (const CallableTool& tool : tools) {
    list.push_back({{"name", tool.name}, {"parameters", Json::parse(tool.parameters_json, nullptr, false)}});
    if (!quotes_nothing(format)) continue;
    for (const auto& [name, key] : bare_texts({&tool, 1})) list.back()["texts"].push_back(key);
  }
  Json calls{{"form", name_of(format)}, {"tools", std::move(list)}};
  if (how_many != HowMany::any) calls["only"] = how_many == HowMany::one ? "one" : "some";
  if (!answer_schema.empty()) calls["answer"] = Json::parse(answer_schema, nullptr, false);
  return {GrammarSpec::Kind::tool_calls, calls.dump(-1, ' ', false, Json::error_handler_t::replace), {}};
}

}  // namespace kvasir::text
