// The table of parameters, and the names that protocols have for them.
#include "server/parameters.h"

#include <cstdlib>

#include "core/check.h"

namespace kvasir::server {
namespace {

using Sampling = model::SamplingParams;
using engine::Request;

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
            {.name = "seed",
             .to = sampling(&Sampling::seed),
             .what = "the same draws again; -1 is none",
             .limit = "64 bits"},
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

const Parameter* parameter_of_any(std::string_view name) {
  for (const Alias& a : kAliases)
    if (a.name && name == a.name) return &parameter(a.parameter);
  for (const Parameter& p : parameters())
    if (name == p.name) return &p;
  return nullptr;
}

const char* name_on(Wire wire, const Parameter& p) {
  for (const Alias& a : kAliases)
    if (a.wire == wire && !a.also && std::string_view(a.parameter) == p.name) return a.name;
  return p.name;
}

std::vector<const char*> also_named(Wire wire, const Parameter& p) {
  std::vector<const char*> out;
  for (const Alias& a : kAliases)
    if (a.wire == wire && a.also && std::string_view(a.parameter) == p.name) out.push_back(a.name);
  return out;
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

}  // namespace kvasir::server
