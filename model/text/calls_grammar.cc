// The grammar that holds calls to their tools: what it is told (rust/src/calls.rs), and which tools it can hold.
#include <algorithm>
#include <cctype>
#include <map>
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

// As rust/src/call_values.rs tells the types of single values apart.
bool is_of(const Json& type, const Json& one) {
  if (type == "string") return one.is_string();
  if (type == "integer") return one.is_number_integer();
  if (type == "number") return one.is_number();
  if (type == "boolean") return one.is_boolean();
  return type == "null" && one.is_null();
}

// Of `const` or `enum`, of which one at least must be of a type.
bool lists_single_values(const Json& schema) {
  const Json list = schema.contains("const") ? Json::array({schema["const"]}) : schema["enum"];
  const Json type = schema.value("type", Json()), types = type.is_array() ? type : Json::array({type});
  auto fits = [&](const Json& one) {
    return !schema.contains("type") ||
           std::any_of(types.begin(), types.end(), [&](const Json& type) { return is_of(type, one); });
  };
  return list.is_array() &&
         std::none_of(list.begin(), list.end(), [](const Json& one) { return one.is_structured(); }) &&
         std::any_of(list.begin(), list.end(), fits);
}

// What rust/src/call_values.rs writes in Gemma's syntax, of the values of one tool. Each schema is judged once, however
// often it is referred to, and is none while it is judged, where it refers to itself.
class GemmaValues {
 public:
  explicit GemmaValues(const Json& tool) {
    if (!tool.contains("$defs") || !tool["$defs"].is_object()) return;
    for (const auto& [name, of] : tool["$defs"].items()) definitions_.emplace("#/$defs/" + name, &of);
  }
  // `schema` outlives this.
  bool has(const Json& schema) { return height(schema, 1) <= kMost; }

 private:
  static constexpr int kMost = 33, kNone = kMost + 1;

  // How many schemas stand one in another, references followed.
  int height(const Json& schema, int depth) {
    if (depth > kMost) return kNone;
    const auto [known, first] = heights_.emplace(&schema, kNone);
    if (!first) return known->second;
    int inner = 0;
    const bool plain = is_plain(schema, [&](const Json& one) {
      inner = std::max(inner, height(one, depth + 1));
      return inner < kMost;
    });
    return known->second = plain ? inner + 1 : kNone;
  }

  template <class Has>
  bool is_plain(const Json& schema, Has has) const {
    if (schema == Json(true)) return true;
    if (!schema.is_object()) return false;
    std::vector<std::string_view> said;
    for (const auto& [key, of] : schema.items())
      if (!among(key, kNotes) && key != "$defs" && key != "definitions") said.push_back(key);
    if (said.empty()) return true;
    if (said.size() == 1 && said[0] == "$ref") {
      const Json& name = schema["$ref"];
      const auto found = definitions_.find(name.is_string() ? name.get<std::string>() : "");
      return found != definitions_.end() && has(*found->second);
    }
    if (said.size() == 1 && said[0] == "anyOf") {
      const Json& list = schema["anyOf"];
      return list.is_array() && !list.empty() && std::all_of(list.begin(), list.end(), has);
    }
    if (schema.contains("const") || schema.contains("enum"))
      return said.size() == (schema.contains("type") ? 2 : 1) && lists_single_values(schema);
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
    const Json type = schema.value("type", Json()), none = Json::object();
    if (type.is_null() || (type.is_structured() && (!type.is_array() || type.empty()))) return false;
    if (!std::all_of(said.begin(), said.end(), [&](std::string_view key) { return among(key, kKnown); })) return false;
    if (schema.contains("items") && !has(schema["items"])) return false;
    if (schema.contains("additionalProperties") && schema["additionalProperties"] != Json(false)) return false;
    const Json& properties = schema.contains("properties") ? schema["properties"] : none;
    if (!properties.is_object()) return false;
    for (const auto& [key, of] : properties.items())
      if (!is_word(key) || !has(of)) return false;
    for (const Json& name : schema.value("required", Json::array()))
      if (!name.is_string() || !properties.contains(name.get_ref<const std::string&>())) return false;
    return true;
  }

  std::map<std::string, const Json*> definitions_;
  std::map<const Json*, int> heights_;
};

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
  GemmaValues values(schema);
  for (const auto& [key, of] : properties.items())
    if (!is_word(key) || (format == ToolFormat::gemma && !values.has(of))) return false;
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
