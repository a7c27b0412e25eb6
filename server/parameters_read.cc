// Values of parameters, as clients give them, to the members of a request.
#include <algorithm>
#include <charconv>
#include <climits>
#include <cmath>

#include "core/cat.h"
#include "core/utf8.h"
#include "server/parameter_members.h"

namespace kvasir::server {
namespace {

using Json = nlohmann::ordered_json;
using engine::Request;

constexpr size_t kMostStops = 1024;  // before anyone counts them against the limit
constexpr size_t kMostNamed = 8;     // wrong entries in one message

// As int32; what does not fit is kept aside for the judge.
int32_t narrow(const Parameter& p, int64_t value, GenerateInput& in) {
  if (value == int32_t(value)) return int32_t(value);
  if (!unfit(in, p)) in.unfit.emplace_back(&p, value);
  return 0;
}

}  // namespace

void set_ids(const Parameter& p, std::vector<int64_t> ids, GenerateInput& in) {
  visit_member(p, in, [&](auto& to) {
    if constexpr (std::is_same_v<std::decay_t<decltype(to)>, std::vector<int32_t>>) {
      to.clear();
      for (int64_t id : ids) to.push_back(narrow(p, id, in));
    }
  });
  if (ids.empty() && p.to == parameter("allowed_token_ids").to) in.unfit.emplace_back(&p, std::nullopt);
}

void set_bias(std::vector<std::pair<int64_t, float>> bias, GenerateInput& in) {
  const Parameter& p = parameter("logit_bias");
  std::sort(bias.begin(), bias.end());  // an object has no order of its own
  in.request.sampling.logit_bias.clear();
  for (const auto& [id, value] : bias) in.request.sampling.logit_bias.emplace_back(narrow(p, id, in), value);
}

void set_integer(const Parameter& p, int64_t value, GenerateInput& in) {
  visit_member(p, in, [&](auto& to) {
    using T = std::decay_t<decltype(to)>;
    if constexpr (std::is_same_v<T, int32_t>) {
      if (p.to == parameter("top_k").to && value == -1) value = 0;  // how some say off
      if (!p.most_option) value = std::clamp<int64_t>(value, INT32_MIN, INT32_MAX);
      if (is_logprobs(p) && value < 0) in.unfit.emplace_back(&p, value);
      if (is_logprobs(p) && value == -1)
        to = kAllLogprobs;
      else if (!is_logprobs(p) || value >= 0)
        to = narrow(p, value, in);
    } else if constexpr (std::is_same_v<T, std::optional<int64_t>>) {
      to = value;
    } else if constexpr (std::is_same_v<T, uint64_t>) {
      to = uint64_t(value);
      in.draw_seed = false;
    } else if constexpr (std::is_same_v<T, float>) {
      to = float(value);
    }
  });
}

bool whole_number(const Json& v, int64_t* out) {
  if (v.is_number_unsigned()) return *out = int64_t(std::min<uint64_t>(v.get<uint64_t>(), INT64_MAX)), true;
  if (v.is_number_integer()) return *out = v.get<int64_t>(), true;
  if (!v.is_number_float()) return false;
  const double d = v.get<double>();
  if (!(std::fabs(d) < 9e15) || std::nearbyint(d) != d) return false;
  return *out = int64_t(d), true;
}

std::string shown(const Json& value) {
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

namespace {

std::string wrong_type(const Json& value, const char* wanted) {
  return cat("is ", shown(value), "; it must be ", wanted);
}

std::string set_texts(const Json& v, std::vector<std::string>& out) {
  constexpr const char* kWanted = "a string or a list of strings";
  if (v.is_string()) return out = {v.get<std::string>()}, "";
  if (!v.is_array()) return wrong_type(v, kWanted);
  if (v.size() > kMostStops) return cat("has ", v.size(), " entries; the limit is ", kMostStops);
  out.clear();
  for (const Json& e : v) {
    if (!e.is_string()) return wrong_type(e, kWanted);
    out.push_back(e.get<std::string>());
  }
  return "";
}

std::string set_ids_json(const Parameter& p, const Json& v, GenerateInput& in) {
  if (!v.is_array()) return wrong_type(v, "a list of token ids");
  std::vector<int64_t> ids;
  for (const Json& e : v)
    if (!whole_number(e, &ids.emplace_back())) return wrong_type(e, "a whole number, as token ids are");
  set_ids(p, std::move(ids), in);
  return "";
}

std::string set_bias_json(const Json& v, GenerateInput& in) {
  if (!v.is_object()) return "must be an object of token ids and numbers";
  std::vector<std::pair<int64_t, float>> all;
  std::string wrong;
  size_t count = 0;
  for (const auto& [key, value] : v.items()) {
    int64_t id = -1;
    auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
    if (error != std::errc() || end != key.data() + key.size()) {
      if (++count <= kMostNamed) wrong += cat(count > 1 ? ", '" : "'", utf8_prefix(key, 30), '\'');
      continue;
    }
    if (!value.is_number()) return cat("of token ", id, " must be a number");
    all.emplace_back(id, value.get<float>());
  }
  if (count == 1) return cat("has the key ", wrong, ", which is no token id");
  if (count > 1)
    return cat("has the keys ", wrong, count > kMostNamed ? cat(" and ", count - kMostNamed, " more") : "",
               ", which are no token ids");
  set_bias(std::move(all), in);
  return "";
}

}  // namespace

bool takes_text(const Parameter& p) {
  const auto* member = std::get_if<RequestMember>(&p.to);
  return member && (std::holds_alternative<std::string Request::*>(*member) ||
                    std::holds_alternative<std::vector<std::string> Request::*>(*member));
}

std::string set_json(const Parameter& p, const Json& v, GenerateInput& in) {
  return visit_member(p, in, [&](auto& to) -> std::string {
    using T = std::decay_t<decltype(to)>;
    if constexpr (std::is_same_v<T, float>) {
      if (!v.is_number()) return wrong_type(v, "a number");
      to = float(v.get<double>());
    } else if constexpr (std::is_same_v<T, bool> || std::is_same_v<T, std::optional<bool>>) {
      if (!v.is_boolean()) return wrong_type(v, "true or false");
      to = v.get<bool>();
    } else if constexpr (std::is_same_v<T, std::string>) {
      if (!v.is_string()) return wrong_type(v, "a string");
      to = v.get<std::string>();
    } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
      return set_texts(v, to);
    } else if constexpr (std::is_same_v<T, std::vector<int32_t>>) {
      return set_ids_json(p, v, in);
    } else if constexpr (std::is_same_v<T, std::vector<std::pair<int32_t, float>>>) {
      return set_bias_json(v, in);
    } else if (std::is_same_v<T, uint64_t> && v.is_number_unsigned()) {  // all 64 bits
      set_integer(p, int64_t(v.get<uint64_t>()), in);
    } else {
      int64_t value = 0;
      if (!whole_number(v, &value)) return wrong_type(v, "a whole number");
      if (std::is_same_v<T, uint64_t> && value == -1) return "";  // one that is drawn, as where none is given
      set_integer(p, value, in);
    }
    return "";
  });
}

}  // namespace kvasir::server
