// A small JSON-schema validator, written from the specification and sharing nothing with the grammar
// library: what it does not know it refuses, so that a test cannot pass by ignorance.
#pragma once

#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

namespace kvasir::text {

using Json = nlohmann::json;

inline size_t characters(const std::string& utf8) {
  size_t n = 0;
  for (const char c : utf8) n += (c & 0xC0) != 0x80;
  return n;
}

inline bool has_type(const Json& v, const std::string& type) {
  if (type == "object") return v.is_object();
  if (type == "array") return v.is_array();
  if (type == "string") return v.is_string();
  if (type == "boolean") return v.is_boolean();
  if (type == "null") return v.is_null();
  if (type == "number") return v.is_number();
  if (type == "integer") {
    return v.is_number_integer() || (v.is_number_float() && v.get<double>() == static_cast<int64_t>(v.get<double>()));
  }
  throw std::logic_error("type " + type);
}

inline bool valid(const Json& schema, const Json& v, const Json& root) {
  for (const auto& [key, want] : schema.items()) {
    bool ok = true;
    if (key == "type") {
      if (want.is_array()) {
        ok = std::any_of(want.begin(), want.end(), [&](const Json& t) { return has_type(v, t); });
      } else {
        ok = has_type(v, want);
      }
    } else if (key == "enum") {
      ok = std::find(want.begin(), want.end(), v) != want.end();
    } else if (key == "const") {
      ok = v == want;
    } else if (key == "anyOf") {
      ok = std::any_of(want.begin(), want.end(), [&](const Json& s) { return valid(s, v, root); });
    } else if (key == "$ref") {
      ok = valid(root.at(Json::json_pointer(want.get<std::string>().substr(1))), v, root);
    } else if (key == "required") {
      for (const Json& name : want) ok &= !v.is_object() || v.contains(name.get<std::string>());
    } else if (key == "properties") {
      for (const auto& [name, sub] : want.items()) {
        if (v.is_object() && v.contains(name)) ok &= valid(sub, v[name], root);
      }
    } else if (key == "additionalProperties") {
      if (v.is_object()) {
        for (const auto& [name, value] : v.items()) {
          if (schema.contains("properties") && schema["properties"].contains(name)) continue;
          ok &= want.is_boolean() ? want.get<bool>() : valid(want, value, root);
        }
      }
    } else if (key == "items") {
      const size_t from = schema.contains("prefixItems") ? schema["prefixItems"].size() : 0;
      if (v.is_array()) {
        for (size_t i = from; i < v.size(); ++i) ok &= want.is_boolean() ? want.get<bool>() : valid(want, v[i], root);
      }
    } else if (key == "prefixItems") {
      if (v.is_array()) {
        for (size_t i = 0; i < std::min(want.size(), v.size()); ++i) ok &= valid(want[i], v[i], root);
      }
    } else if (key == "minItems") {
      ok = !v.is_array() || v.size() >= want.get<size_t>();
    } else if (key == "maxItems") {
      ok = !v.is_array() || v.size() <= want.get<size_t>();
    } else if (key == "minLength") {
      ok = !v.is_string() || characters(v) >= want.get<size_t>();
    } else if (key == "maxLength") {
      ok = !v.is_string() || characters(v) <= want.get<size_t>();
    } else if (key == "minimum") {
      ok = !v.is_number() || v.get<double>() >= want.get<double>();
    } else if (key == "maximum") {
      ok = !v.is_number() || v.get<double>() <= want.get<double>();
    } else if (key == "pattern") {
      if (want != "^[A-Z]{2}-[0-9]{1,4}$") throw std::logic_error("pattern " + want.dump());
      const std::string s = v.is_string() ? v.get<std::string>() : "AA-1";
      ok = s.size() >= 4 && s.size() <= 7 && s[2] == '-';
      for (size_t i = 0; ok && i < s.size(); ++i) {
        if (i < 2) ok = s[i] >= 'A' && s[i] <= 'Z';
        if (i > 2) ok = s[i] >= '0' && s[i] <= '9';
      }
    } else if (key != "$defs" && key != "title" && key != "description") {
      throw std::logic_error("keyword " + key);
    }
    if (!ok) return false;
  }
  return true;
}

}  // namespace kvasir::text
