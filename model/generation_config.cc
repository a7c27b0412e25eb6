#include "model/generation_config.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/cat.h"

namespace kvasir::model {
namespace {

using nlohmann::json;

// do_sample and max_new_tokens are not asked, as in other servers: a client says whether to draw, and how long.
struct SamplingKey {
  const char* key;
  float SamplingParams::*to;
};
constexpr SamplingKey kNumbers[] = {{"temperature", &SamplingParams::temperature},
                                    {"top_p", &SamplingParams::top_p},
                                    {"min_p", &SamplingParams::min_p},
                                    {"typical_p", &SamplingParams::typical_p},
                                    {"repetition_penalty", &SamplingParams::repetition_penalty}};

Status wrong(const std::string& name, const std::string& key, const json& value, const char* want) {
  return invalid_argument(cat(name, ": ", key, " is ", value.dump().substr(0, 64), "; it must be ", want));
}

Status read_id(const json& value, const std::string& name, std::vector<int32_t>& out) {
  if (!value.is_number_integer() || (value.is_number_unsigned() ? value.get<uint64_t>() > INT32_MAX : true))
    return wrong(name, "eos_token_id", value, "a token id or a list of them");
  out.push_back(value.get<int32_t>());
  return {};
}

}  // namespace

std::string GenerationConfig::sampling_json() const {
  const SamplingParams usual;
  json out = json::object();
  for (const SamplingKey& n : kNumbers)
    // As it was written: 0.7 and not the 0.699999988 of a float.
    if (sampling.*n.to != usual.*n.to) out[n.key] = std::round(double(sampling.*n.to) * 1e6) / 1e6;
  if (sampling.top_k != usual.top_k) out["top_k"] = sampling.top_k;
  return out.dump();
}

Result<GenerationConfig> generation_config_from_json(std::string_view text, const std::string& name) {
  const json all = json::parse(text, nullptr, false);
  if (!all.is_object()) return invalid_argument(cat(name, " is not a JSON object"));
  auto find = [&](const char* key) {
    auto it = all.find(key);
    return it == all.end() || it->is_null() ? nullptr : &*it;
  };
  GenerationConfig out;
  for (const SamplingKey& n : kNumbers)
    if (const json* v = find(n.key)) {
      if (!v->is_number()) return wrong(name, n.key, *v, "a number");
      out.sampling.*n.to = v->get<float>();
    }
  if (const json* v = find("top_k")) {
    if (!v->is_number_integer() || v->get<int64_t>() < 0 || v->get<int64_t>() > INT32_MAX)
      return wrong(name, "top_k", *v, "a whole number from 0 to 2147483647; 0 is off");
    out.sampling.top_k = v->get<int32_t>();
  }
  if (const json* v = find("eos_token_id")) {
    if (!v->is_array()) {
      KVASIR_TRY(read_id(*v, name, out.end_of_generation));
    } else {
      for (const json& id : *v) KVASIR_TRY(read_id(id, name, out.end_of_generation));
    }
  }
  if (Status valid = out.sampling.validate(INT32_MAX); !valid.ok())
    return invalid_argument(cat(name, ": ", valid.message()));
  return out;
}

}  // namespace kvasir::model
