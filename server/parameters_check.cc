// What values of parameters are refused, and in which words.
#include <algorithm>

#include "core/cat.h"
#include "core/utf8.h"
#include "server/parameter_members.h"

namespace kvasir::server {
namespace {

Status refuse(const GenerateInput& in, const Parameter& p, std::string what) {
  const char* name = name_of(in, p);
  return invalid_argument(cat(name, what)).with_field(name);
}

std::string not_an_id(int64_t id, const model::ModelInfo& info) {
  return cat(" is ", id, "; it must be a token id from 0 to ", info.vocab_size - 1, " (the vocabulary has ",
             info.vocab_size, ")");
}

int64_t most_of(const Parameter& p, const ServerOptions& limits) {
  return p.most_option ? limits.*p.most_option : INT64_MAX;
}

Status check_number(const GenerateInput& in, const Parameter& p, int64_t value, int64_t most,
                    const model::ModelInfo& info) {
  const bool all = is_logprobs(p) && value == kAllLogprobs;
  if (all && most >= info.vocab_size) return {};
  if (const auto* given = unfit(in, p)) value = given->value_or(value);
  if ((!p.least || value >= *p.least) && value <= most) return {};
  return refuse(
      in, p,
      cat(" is ", value, "; it must be ", p.limit, p.most_option ? cat(" to ", most) : std::string(),
          all ? cat("; all ", info.vocab_size, " of the vocabulary need a max_logprobs of as many") : std::string()));
}

Status check_ids(const GenerateInput& in, const Parameter& p, const std::vector<int32_t>& ids, int64_t most,
                 const model::ModelInfo& info) {
  const auto* given = unfit(in, p);
  if (given && !*given) return refuse(in, p, " is empty, so nothing could be drawn; leave it out to allow every id");
  if (!p.most_option && ids.size() > size_t(info.vocab_size))
    return refuse(in, p, cat(" has ", ids.size(), " entries; the model has ", info.vocab_size, " ids"));
  if (p.most_option && int64_t(ids.size()) > most)
    return refuse(in, p, cat(" has ", ids.size(), " ids; at most ", most, " are taken"));
  auto wrong = std::find_if(ids.begin(), ids.end(), [&](int32_t id) { return id < 0 || id >= info.vocab_size; });
  if (!given && wrong == ids.end()) return {};
  return refuse(in, p, not_an_id(given ? **given : *wrong, info));
}

Status check_bias(const GenerateInput& in, const Parameter& p, const std::vector<std::pair<int32_t, float>>& all,
                  int64_t most, const model::ModelInfo& info) {
  if (int64_t(all.size()) > most)
    return refuse(in, p, cat(" has ", all.size(), " entries; at most ", most, " are taken"));
  if (const auto* given = unfit(in, p)) return refuse(in, p, not_an_id(**given, info));
  for (const auto& [token, bias] : all) {
    if (token < 0 || token >= info.vocab_size) return refuse(in, p, not_an_id(token, info));
    if (!(bias >= -100 && bias <= 100))
      return refuse(in, p, cat(" of token ", token, " is ", bias, "; it must be from -100 to 100"));
  }
  return {};
}

Status check_texts(const GenerateInput& in, const Parameter& p, const std::vector<std::string>& texts, int64_t most,
                   const ServerOptions& limits) {
  const char* name = name_of(in, p);
  if (int64_t(texts.size()) > most)
    return refuse(in, p, cat(" has ", texts.size(), " strings; at most ", most, " are taken"));
  for (size_t i = 0; i < texts.size(); ++i) {
    if (texts[i].empty()) return refuse(in, p, cat('[', i, "] is empty; leave it out instead"));
    if (texts[i].size() > size_t(limits.max_stop_bytes))
      return refuse(in, p,
                    cat('[', i, "] has ", texts[i].size(), " bytes; at most ", limits.max_stop_bytes, " are taken"));
    KVASIR_TRY(check_utf8(texts[i], name));
  }
  return {};
}

Status check_one(const GenerateInput& in, const Parameter& p, const ServerOptions& limits,
                 const model::ModelInfo& info) {
  const int64_t most = most_of(p, limits);
  return visit_member(p, in, [&](const auto& value) -> Status {
    using T = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<T, float>) {
      if (p.number->good(in.request.sampling)) return {};
      return refuse(in, p, cat(" is ", value, "; it must be ", p.number->limits()));
    } else if constexpr (std::is_same_v<T, int32_t>) {
      const bool unset = is_logprobs(p) && value == -1 && !unfit(in, p);
      return unset ? Status() : check_number(in, p, value, most, info);
    } else if constexpr (std::is_same_v<T, std::optional<int64_t>>) {
      return value ? check_number(in, p, *value, most, info) : Status();
    } else if constexpr (std::is_same_v<T, std::vector<int32_t>>) {
      return check_ids(in, p, value, most, info);
    } else if constexpr (std::is_same_v<T, std::vector<std::pair<int32_t, float>>>) {
      return check_bias(in, p, value, most, info);
    } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
      return check_texts(in, p, value, most, limits);
    } else if constexpr (std::is_same_v<T, std::string>) {
      if (value.size() <= 256) return {};
      return refuse(in, p, cat(" has ", value.size(), " bytes; at most 256 are taken"));
    } else {
      return {};
    }
  });
}

}  // namespace

Status check_parameters(const GenerateInput& in, const ServerOptions& limits, const model::ModelInfo& info) {
  for (const Parameter& p : parameters()) KVASIR_TRY(check_one(in, p, limits, info));
  const engine::Request& r = in.request;
  for (const char* name : {"repetition_penalty", "presence_penalty", "frequency_penalty"})
    if (const Parameter& p = parameter(name); !limits.penalties && p.number->set(r.sampling))
      return refuse(in, p, ": penalties are turned off on this server (enable_penalty); leave it out");
  if (!r.sampling.logprob_token_ids.empty() && r.sampling.logprobs < 0)
    return refuse(in, parameter("logprob_token_ids"),
                  cat(" is set, but no log-probabilities are asked for; set ",
                      in.wire == Wire::chat ? "logprobs: true" : name_of(in, parameter("logprobs")), " too"));
  if (r.max_tokens && r.min_tokens > *r.max_tokens)
    return refuse(
        in, parameter("min_tokens"),
        cat(" is ", r.min_tokens, "; it must be at most ", name_of(in, parameter("max_tokens")), ", ", *r.max_tokens));
  return {};
}

}  // namespace kvasir::server
