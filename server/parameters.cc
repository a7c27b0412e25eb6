#include "server/parameters.h"

#include <algorithm>
#include <charconv>
#include <climits>
#include <cmath>

#include "core/cat.h"
#include "core/check.h"
#include "core/utf8.h"

namespace kvasir::server {
namespace {

using Json = nlohmann::ordered_json;
using Sampling = model::SamplingParams;
using engine::Request;

constexpr size_t kMostStops = 1024;  // before anyone counts them against the limit
constexpr size_t kMostNamed = 8;     // wrong entries in one message

template <class T>
std::variant<SamplingMember, RequestMember> sampling(T Sampling::*to) {
  return SamplingMember(to);
}
template <class T>
std::variant<SamplingMember, RequestMember> request(T Request::*to) {
  return RequestMember(to);
}

std::vector<Parameter> make_table() {
  std::vector<Parameter> t;
  for (const model::SamplingNumber& n : model::kSamplingNumbers)
    t.push_back({.name = n.name, .to = sampling(n.to), .what = n.what, .number = &n});
  t.insert(t.end(),
           {{.name = "top_k",
             .to = sampling(&Sampling::top_k),
             .what = "the likeliest so many tokens",
             .limit = "0 (off) or more",
             .least = 0},
            {.name = "logprobs",
             .to = sampling(&Sampling::logprobs),
             .what = "each token's log-probability, and those of so many others",
             .limit = "from 0",
             .least = 0,
             .most_option = &ServerOptions::max_logprobs,
             .of_text = false},
            {.name = "prompt_logprobs",
             .to = request(&Request::prompt_logprobs),
             .what = "the same of the prompt's tokens",
             .limit = "from 0",
             .least = 0,
             .most_option = &ServerOptions::max_logprobs,
             .of_text = false},
            {.name = "logit_bias",
             .to = sampling(&Sampling::logit_bias),
             .what = "added to the logits of these token ids",
             .limit = "numbers from -100 to 100",
             .most_option = &ServerOptions::max_logit_bias,
             .of_text = false},
            {.name = "allowed_token_ids",
             .to = request(&Request::allowed_tokens),
             .what = "only these ids are drawn",
             .limit = "a token id"},
            {.name = "logprob_token_ids",
             .to = sampling(&Sampling::logprob_token_ids),
             .what = "the log-probabilities of these ids, and of the drawn one, instead of the likeliest",
             .limit = "a token id",
             .most_option = &ServerOptions::max_logprobs,
             .of_text = false},
            {.name = "post_sampling_probs",
             .to = sampling(&Sampling::post_sampling_probs),
             .what = "log-probabilities are of what is drawn from: after penalties, temperature and cuts",
             .limit = "true or false",
             .of_text = false},
            {.name = "bad_words",
             .to = request(&Request::bad_words),
             .what = "texts whose tokens are not drawn one behind the other",
             .limit = "a string or a list of strings",
             .most_option = &ServerOptions::max_logit_bias},
            {.name = "stop",
             .to = request(&Request::stop_strings),
             .what = "texts that end the answer",
             .limit = "a string or a list of strings",
             .most_option = &ServerOptions::max_stop},
            {.name = "stop_regex",
             .to = request(&Request::stop_regex),
             .what = "regular expressions that end the answer as soon as one matches its text, which stays in it",
             .limit = "a string or a list of strings",
             .most_option = &ServerOptions::max_stop},
            {.name = "stop_token_ids",
             .to = request(&Request::stop_tokens),
             .what = "token ids that end the answer",
             .limit = "a token id",
             .most_option = &ServerOptions::max_stop},
            {.name = "n",
             .to = request(&Request::n),
             .what = "answers to one prompt",
             .limit = "from 1",
             .least = 1,
             .most_option = &ServerOptions::max_choices,
             .of_text = false},
            {.name = "max_tokens",
             .to = request(&Request::max_tokens),
             .what = "the answer's length at most",
             .limit = "0 or more",
             .least = 0},
            {.name = "min_tokens",
             .to = request(&Request::min_tokens),
             .what = "tokens before one may end the answer",
             .limit = "0 or more",
             .least = 0},
            {.name = "thinking_token_budget",
             .to = request(&Request::thinking_budget),
             .what = "tokens that may be thought before the model is made to answer",
             .limit = "-1 (no limit) or more",
             .least = -1},
            {.name = "seed", .to = sampling(&Sampling::seed), .what = "the same draws again", .limit = "64 bits"},
            {.name = "ignore_eos",
             .to = request(&Request::ignore_eos),
             .what = "the model's own end is no end",
             .limit = "true or false"},
            {.name = "include_stop_str_in_output",
             .to = request(&Request::include_stop),
             .what = "show what ended the answer",
             .limit = "true or false"},
            {.name = "skip_special_tokens",
             .to = request(&Request::skip_special),
             .what = "leave out the text of special tokens; true unless said",
             .limit = "true or false"},
            {.name = "priority",
             .to = request(&Request::priority),
             .what = "higher runs first, as far as the key allows",
             .limit = "a whole number",
             .of_embeddings = true},
            {.name = "cache_salt",
             .to = request(&Request::cache_salt),
             .what = "prefixes are shared only under the same salt",
             .limit = "at most 256 bytes",
             .of_text = false,
             .of_embeddings = true},
            {.name = "dimensions",
             .to = request(&Request::dimensions),
             .what = "so many numbers of an embedding, its first ones, normalized anew",
             .limit = "1 or more",
             .least = 1,
             .of_answers = false,
             .of_embeddings = true},
            {.name = "normalize",
             .to = request(&Request::normalize),
             .what = "embeddings of length 1; as the model has it unless said",
             .limit = "true or false",
             .of_answers = false,
             .of_embeddings = true}});
  return t;
}

// What a protocol calls a parameter that has another name in the others.
struct Alias {
  Wire wire;
  const char* name;  // null: there is none such
  const char* parameter;
  bool also = false;  // beside the usual name
};
constexpr Alias kAliases[] = {
    {Wire::v1, "include_stop", "include_stop_str_in_output"},
    {Wire::vllm_inference, "num_sequences", "n"},
    {Wire::vllm_inference, "max_new_tokens", "max_tokens"},
    {Wire::vllm_inference, "min_new_tokens", "min_tokens"},
    {Wire::vllm_inference, "stop_strings", "stop"},
    {Wire::vllm_inference, "include_stop_strings", "include_stop_str_in_output"},
    {Wire::vllm_inference, "output_candidates", "logprobs"},
    {Wire::vllm_inference, "prompt_candidates", "prompt_logprobs"},
    {Wire::ppl, "max_new_tokens", "max_tokens"},
    {Wire::ppl, "stop_tokens", "stop_token_ids"},
    {Wire::ppl, "ignore_eos_token", "ignore_eos"},
    {Wire::messages, "stop_sequences", "stop"},
    {Wire::responses, "max_output_tokens", "max_tokens"},
    {Wire::responses, "top_logprobs", "logprobs"},
    {Wire::chat, "top_logprobs", "logprobs"},
    {Wire::chat, "n_predict", "max_tokens", true},
    {Wire::completions, "n_predict", "max_tokens", true},
    {Wire::responses, "n_predict", "max_tokens", true},
    {Wire::chat, "thinking_budget_tokens", "thinking_token_budget", true},
    {Wire::chat, "repeat_penalty", "repetition_penalty", true},
    {Wire::llama, "n_predict", "max_tokens"},
    {Wire::llama, "max_tokens", "max_tokens", true},
    {Wire::llama, "repeat_penalty", "repetition_penalty"},
    {Wire::llama, "n_probs", "logprobs"},
    {Wire::llama, "thinking_budget_tokens", "thinking_token_budget", true},
    {Wire::llama, "n_cmpl", "n", true},
    {Wire::llama, nullptr, "prompt_logprobs"},
    {Wire::ollama, "num_predict", "max_tokens"},
    {Wire::ollama, "repeat_penalty", "repetition_penalty"},
    {Wire::sglang, "max_new_tokens", "max_tokens"},
    {Wire::sglang, "min_new_tokens", "min_tokens"},
    {Wire::sglang, "sampling_seed", "seed"},
    {Wire::sglang, "no_stop_trim", "include_stop_str_in_output"},
    {Wire::sglang, "top_logprobs_num", "logprobs"},
    {Wire::sglang, nullptr, "prompt_logprobs"},
    {Wire::sglang, nullptr, "logprob_token_ids"},
    {Wire::sglang, "extra_key", "cache_salt"},
    {Wire::chat, "no_stop_trim", "include_stop_str_in_output", true},
    {Wire::completions, "no_stop_trim", "include_stop_str_in_output", true},
    {Wire::chat, "max_completion_tokens", "max_tokens", true},
};

// The members of an input by kind, so that one visitor serves reading and checking.
template <class F>
auto visit_member(const Parameter& p, GenerateInput& in, F&& f) {
  return std::visit(
      [&](const auto& member) {
        return std::visit(
            [&](auto to) {
              if constexpr (std::is_same_v<std::decay_t<decltype(member)>, SamplingMember>)
                return f(in.request.sampling.*to);
              else
                return f(in.request.*to);
            },
            member);
      },
      p.to);
}
template <class F>
auto visit_member(const Parameter& p, const GenerateInput& in, F&& f) {
  return visit_member(p, const_cast<GenerateInput&>(in), [&](const auto& value) { return f(value); });
}

const std::optional<int64_t>* unfit(const GenerateInput& in, const Parameter& p) {
  for (const auto& [row, value] : in.unfit)
    if (row == &p) return &value;
  return nullptr;
}

Status refuse(const GenerateInput& in, const Parameter& p, std::string what) {
  const char* name = name_of(in, p);
  return invalid_argument(cat(name, what)).with_field(name);
}

// How many others beside each token; -1 in such a member is none, and from a client all of them.
bool is_logprobs(const Parameter& p) { return p.most_option == &ServerOptions::max_logprobs; }

int64_t most_of(const Parameter& p, const ServerOptions& limits) {
  return p.most_option ? limits.*p.most_option : p.most.value_or(INT64_MAX);
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
  return refuse(in, p,
                cat(" is ", given ? **given : int64_t(*wrong), "; it must be a token id from 0 to ",
                    info.vocab_size - 1, " (the vocabulary has ", info.vocab_size, ")"));
}

Status check_bias(const GenerateInput& in, const Parameter& p, const std::vector<std::pair<int32_t, float>>& all,
                  int64_t most, const model::ModelInfo& info) {
  if (int64_t(all.size()) > most)
    return refuse(in, p, cat(" has ", all.size(), " entries; at most ", most, " are taken"));
  if (const auto* given = unfit(in, p))
    return refuse(in, p,
                  cat(" is ", **given, "; it must be a token id from 0 to ", info.vocab_size - 1,
                      " (the vocabulary has ", info.vocab_size, ")"));
  for (const auto& [token, bias] : all) {
    if (token < 0 || token >= info.vocab_size)
      return refuse(in, p,
                    cat(" is ", token, "; it must be a token id from 0 to ", info.vocab_size - 1,
                        " (the vocabulary has ", info.vocab_size, ")"));
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

// As int32; what does not fit is kept aside for the judge.
int32_t narrow(const Parameter& p, int64_t value, GenerateInput& in) {
  if (value == int32_t(value)) return int32_t(value);
  if (!unfit(in, p)) in.unfit.emplace_back(&p, value);
  return 0;
}

}  // namespace

bool of_text_alone(Wire wire) {
  return wire == Wire::kserve || wire == Wire::messages || wire == Wire::responses || wire == Wire::ollama;
}

std::span<const Parameter> parameters() {
  static const std::vector<Parameter> table = make_table();
  return table;
}

const Parameter& parameter(std::string_view name) {
  for (const Parameter& p : parameters())
    if (name == p.name) return p;
  KVASIR_CHECK(false, "there is no parameter ", std::string(name));
  std::abort();
}

FoundParameter find_parameter(Wire wire, std::string_view name) {
  for (const Alias& a : kAliases)
    if (a.wire == wire && a.name && name == a.name) return {&parameter(a.parameter), a.name};
  for (const Parameter& p : parameters()) {
    if (name != p.name || !(wire == Wire::embeddings ? p.of_embeddings : p.of_answers)) continue;
    const bool other = name_on(wire, p) != p.name;  // there something else has this name, or nothing
    return other || (of_text_alone(wire) && !p.of_text) ? FoundParameter() : FoundParameter{&p, p.name};
  }
  return {};
}

const char* name_on(Wire wire, const Parameter& p) {
  for (const Alias& a : kAliases)
    if (a.wire == wire && !a.also && std::string_view(a.parameter) == p.name) return a.name;
  return p.name;
}

void took_as(const FoundParameter& found, GenerateInput& in) {
  if (found.name != name_on(in.wire, *found.row)) in.names.emplace_back(found.row, found.name);
}

const char* name_of(const GenerateInput& in, const Parameter& p) {
  for (const auto& [row, name] : in.names)
    if (row == &p) return name;
  const char* name = name_on(in.wire, p);
  return name ? name : p.name;
}

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

std::string set_integer(const Parameter& p, int64_t value, GenerateInput& in) {
  visit_member(p, in, [&](auto& to) {
    using T = std::decay_t<decltype(to)>;
    if constexpr (std::is_same_v<T, int32_t>) {
      if (p.to == parameter("top_k").to && value == -1) value = 0;  // how some say off
      const bool bounded = p.most || p.most_option;
      if (!bounded) value = std::clamp<int64_t>(value, INT32_MIN, INT32_MAX);
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
  return {};
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
      return set_integer(p, int64_t(v.get<uint64_t>()), in);
    } else {
      int64_t value = 0;
      if (!whole_number(v, &value)) return wrong_type(v, "a whole number");
      return set_integer(p, value, in);
    }
    return "";
  });
}

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
