#include "server/http/fields.h"

#include <algorithm>

#include "core/cat.h"
#include "core/config.h"
#include "core/log.h"
#include "server/parameters.h"

namespace kvasir::server::http {

std::string text_of(const Json& object, const char* key) {
  const Json value = object.value(key, Json());
  return value.is_string() ? value.get<std::string>() : "";
}

Status wrong(const std::string& where, const std::string& what) {
  return invalid_argument(where + " " + what).with_field(where);
}

Result<Json> parse_json(std::string_view text, int max_depth) {
  if (int depth = json_depth(text); depth > max_depth)
    return invalid_argument(cat("the body nests ", depth, " deep; the limit is ", max_depth));
  if (has_zero_byte(text))
    return invalid_argument(cat("the body is not valid JSON, at byte ", text.find('\0') + 1, " of ", text.size()));
  try {
    return Json::parse(text);
  } catch (const Json::parse_error& error) {
    return invalid_argument(cat("the body is not valid JSON, at byte ", error.byte, " of ", text.size()));
  } catch (const Json::exception& error) {
    return invalid_argument("the body is not valid JSON");
  }
}

Fields::Fields(const Json& object, std::string path) : object_(object), path_(std::move(path)) {
  if (!object.is_object())
    status_ =
        invalid_argument(cat(path_.empty() ? "the body" : path_, " is ", object.type_name(), "; it must be an object"));
}

void Fields::fail(std::string_view name, std::string message) {
  if (!status_.ok()) return;
  std::string full = path_.empty() ? std::string(name) : cat(path_, '.', name);
  status_ = invalid_argument(cat(full, ' ', message)).with_field(full);
}

void Fields::adopt(const Status& status) {
  if (status_.ok()) status_ = status;
}

void Fields::wrong_type(std::string_view name, const Json& value, const char* wanted) {
  fail(name, cat("is ", shown(value), "; it must be ", wanted));
}

const Json* Fields::find(std::string_view name) {
  if (!status_.ok()) return nullptr;
  read_.insert(std::string(name));
  auto it = object_.find(name);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

bool Fields::has(std::string_view name) { return find(name) != nullptr; }
const Json* Fields::raw(std::string_view name) { return find(name); }

bool Fields::boolean(std::string_view name, bool* out) {
  const Json* v = find(name);
  if (!v) return false;
  if (!v->is_boolean()) return wrong_type(name, *v, "true or false"), false;
  *out = v->get<bool>();
  return true;
}

bool Fields::integer(std::string_view name, int64_t* out) {
  const Json* v = find(name);
  if (!v) return false;
  if (!whole_number(*v, out)) return wrong_type(name, *v, "a whole number"), false;
  return true;
}

bool Fields::number(std::string_view name, float* out) {
  const Json* v = find(name);
  if (!v) return false;
  if (!v->is_number()) return wrong_type(name, *v, "a number"), false;
  *out = static_cast<float>(v->get<double>());
  return true;
}

bool Fields::string(std::string_view name, std::string* out) {
  const Json* v = find(name);
  if (!v) return false;
  if (!v->is_string()) return wrong_type(name, *v, "a string"), false;
  *out = v->get<std::string>();
  return true;
}

bool Fields::enumeration(std::string_view name, std::string* out, const std::vector<std::string_view>& allowed) {
  std::string value;
  if (!string(name, &value)) return false;
  std::string list;
  for (std::string_view a : allowed) {
    if (a == value) return *out = std::move(value), true;
    list += cat(list.empty() ? "" : ", ", a);
  }
  fail(name, cat("is ", shown(Json(value)), "; it must be one of ", list));
  return false;
}

bool Fields::strings(std::string_view name, std::vector<std::string>* out, size_t most) {
  const Json* v = find(name);
  if (!v) return false;
  if (v->is_string()) return *out = {v->get<std::string>()}, true;
  if (!v->is_array()) return wrong_type(name, *v, "a string or a list of strings"), false;
  if (v->size() > most) return fail(name, cat("has ", v->size(), " entries; the limit is ", most)), false;
  out->clear();
  for (const Json& e : *v) {
    if (!e.is_string()) return wrong_type(name, e, "a string or a list of strings"), false;
    out->push_back(e.get<std::string>());
  }
  return true;
}

bool Fields::integers(std::string_view name, std::vector<int64_t>* out) {
  const Json* v = find(name);
  if (!v) return false;
  if (!v->is_array()) return wrong_type(name, *v, "a list of whole numbers"), false;
  out->clear();
  for (const Json& e : *v)
    if (!whole_number(e, &out->emplace_back())) return wrong_type(name, e, "a list of whole numbers"), false;
  return true;
}

void Fields::parameters(GenerateInput& in) {
  if (!status_.ok()) return;
  wire_ = in.wire;
  for (const auto& [name, value] : object_.items()) {
    const FoundParameter found = find_parameter(in.wire, name);
    if (!found.row || !has(name)) continue;
    took_as(found, in);
    if (std::string wrong = set_json(*found.row, value, in); !wrong.empty()) return fail(name, std::move(wrong));
  }
}

void Fields::unserved(std::string_view name, const char* why, const char* usual) {
  const Json* v = find(name);
  const bool nothing = !v || *v == Json(false) || (v->is_structured() && v->empty()) || *v == "";
  if (!nothing && *v != Json::parse(usual)) fail(name, cat("is not served here: ", why));
}

void Fields::pass_over_the_rest() {
  if (!object_.is_object()) return;
  for (const auto& [name, value] : object_.items())
    if (read_.insert(name).second && !value.is_null())
      log_debug("a field is passed over", {{"field", cat(path_, '.', name.substr(0, 60))}});
}

// A parameter by what another protocol calls it, or a typo.
std::string Fields::meant_by(std::string_view unknown) const {
  if (const Parameter* p = wire_ ? parameter_of_any(unknown) : nullptr)
    if (const char* name = name_on(*wire_, *p); name && find_parameter(*wire_, name).row) return cat("; use ", name);
  if (unknown.size() < 4) return "";  // of so few letters any name is near
  std::vector<std::string> known(read_.begin(), read_.end());
  for (const Parameter& p : server::parameters())
    if (const char* name = wire_ ? name_on(*wire_, p) : nullptr; name && find_parameter(*wire_, name).row) {
      known.emplace_back(name);
      for (const char* also : also_named(*wire_, p)) known.emplace_back(also);
    }
  const std::string near = nearest_name(unknown, known);
  return near.empty() ? "" : cat("; did you mean ", near, "?");
}

Status Fields::finish() {
  if (!status_.ok()) return status_;
  for (const auto& [name, value] : object_.items())
    if (!read_.count(name) && !value.is_null()) {
      const std::string field = name.substr(0, 60);
      status_ = invalid_argument(cat(path_.empty() ? "" : path_ + ".", shown(Json(name)),
                                     " is not a field of this request", meant_by(name)))
                    .with_field(path_.empty() ? field : cat(path_, '.', field));
      return status_;
    }
  return {};
}

}  // namespace kvasir::server::http
