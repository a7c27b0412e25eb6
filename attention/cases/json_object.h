// One JSON object whose every key must be asked for, for readers that refuse what they do not know.
#pragma once

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "core/cat.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/status.h"

namespace kvasir::attention {

using nlohmann::json;

inline Status bad(const std::string& field, std::string message) {
  return invalid_argument(std::move(message)).with_field(field);
}

class Object {
 public:
  Object(std::string name, const json& j) : name_(std::move(name)), j_(j) {}

  Status is_object() const { return j_.is_object() ? Status() : bad(name_, cat(name_, " must be an object")); }
  const json* find(const char* key) {
    asked_.insert(key);
    auto it = j_.find(key);
    return it == j_.end() || it->is_null() ? nullptr : &*it;
  }
  Status get(const char* key, bool* out) {
    const json* v = find(key);
    if (!v) return {};
    if (!v->is_boolean()) return bad(key, cat(key, " is ", v->dump(), "; it must be true or false"));
    *out = v->get<bool>();
    return {};
  }
  template <std::integral T>
  Status get(const char* key, T* out) {
    const json* v = find(key);
    if (!v) return {};
    if (!v->is_number_integer()) return bad(key, cat(key, " is ", v->dump(), "; it must be a whole number"));
    const int64_t n =
        v->is_number_unsigned() && v->get<uint64_t>() > uint64_t(INT64_MAX) ? INT64_MAX : v->get<int64_t>();
    if (n > int64_t(std::numeric_limits<T>::max()) || n < int64_t(std::numeric_limits<T>::min()))
      return bad(key, cat(key, " is ", v->dump(), "; it does not fit"));
    *out = T(n);
    return {};
  }
  template <std::floating_point T>
  Status get(const char* key, T* out) {
    const json* v = find(key);
    if (!v) return {};
    if (!v->is_number() || !std::isfinite(v->get<double>()))
      return bad(key, cat(key, " is ", v->dump(), "; it must be a finite number"));
    *out = T(v->get<double>());
    return {};
  }
  Status get(const char* key, std::string* out) {
    const json* v = find(key);
    if (!v) return {};
    if (!v->is_string()) return bad(key, cat(key, " is ", v->dump(), "; it must be a string"));
    *out = v->get<std::string>();
    return {};
  }
  Status get(const char* key, std::vector<float>* out) {
    const json* v = find(key);
    if (!v) return {};
    if (!v->is_array()) return bad(key, cat(key, " must be a list of numbers"));
    for (const json& x : *v) {
      if (!x.is_number()) return bad(key, cat(key, " holds ", x.dump(), "; it must hold numbers"));
      out->push_back(x.get<float>());
    }
    return {};
  }
  Status get_dtype(const char* key, DType* out) {
    std::string text;
    KVASIR_TRY(get(key, &text));
    if (!text.empty() && !parse_dtype(text, out))
      return bad(key, cat(key, " is '", text, "', which is no element type"));
    return {};
  }
  Status nothing_else() const {
    for (const auto& [key, value] : j_.items())
      if (!asked_.count(key)) return bad(key, cat(name_, " has '", log_escape(key), "', which is not in the contract"));
    return {};
  }

 private:
  std::string name_;
  const json& j_;
  std::set<std::string> asked_;
};

}  // namespace kvasir::attention
