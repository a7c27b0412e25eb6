#include "server/http/llama_fields.h"

#include <atomic>
#include <random>

#include "core/cat.h"
#include "core/log.h"

namespace kvasir::server::http {
namespace {

constexpr struct {
  const char *name, *why, *off;
} kSamplers[] = {
    {"dynatemp_range", "use temperature", "0"},
    {"mirostat", "use top_p, min_p or typical_p", "0"},
    {"dry_multiplier", "use repeat_penalty, presence_penalty or frequency_penalty", "0"},
    {"xtc_probability", "use temperature, or min_p", "0"},
    {"adaptive_target", "use temperature", "-1"},
    {"tfs_z", "use typical_p", "1"},
    {"samplers", "their order is fixed; give those that are to do nothing the value that is off", "null"},
    {"min_keep", "use min_p, which keeps the likeliest token always", "0"},
};
// Of samplers that are off.
constexpr const char* kTuning[] = {"dynatemp_exponent", "mirostat_tau",       "mirostat_eta",
                                   "dry_base",          "dry_allowed_length", "dry_penalty_last_n",
                                   "xtc_threshold",     "adaptive_decay",     "dry_sequence_breakers"};

// So that nothing is shared with another request, its own repetition included.
std::string salt_of_its_own() {
  static const uint64_t process = std::random_device{}();
  static std::atomic<uint64_t> next{0};
  return cat("alone-", process, '-', next.fetch_add(1));
}

bool penalties_on(const model::SamplingParams& s) {
  return s.repetition_penalty != 1 || s.presence_penalty != 0 || s.frequency_penalty != 0;
}

void read_penalties(Fields& f, model::SamplingParams& sampling) {
  int64_t window = -1;
  bool newline = true;
  f.integer("repeat_last_n", &window);
  for (const char* name : {"penalize_nl", "penalize_newline"}) f.boolean(name, &newline);
  if (window == 0) {
    sampling.repetition_penalty = 1;
    sampling.presence_penalty = sampling.frequency_penalty = 0;
  }
  if (!penalties_on(sampling)) return;
  if (window != -1)
    f.fail("repeat_last_n",
           cat("is ", window, "; penalties are of the whole prompt and answer: send -1, or 0 for none"));
  if (!newline) f.fail("penalize_newline", "is false; penalties are of every token, so it must be true");
}

}  // namespace

void drop_unset(Json& body) {
  if (!body.is_object()) return;
  for (const char* name :
       {"n_predict", "max_tokens", "num_predict", "seed", "top_n_sigma", "t_max_predict_ms", "t_max_prompt_ms"})
    if (auto it = body.find(name); it != body.end() && it->is_number() && it->get<double>() < 0) body.erase(it);
  if (auto it = body.find("seed"); it != body.end() && *it == Json(UINT32_MAX)) body.erase(it);
  if (auto it = body.find("n_probs"); it != body.end() && *it == Json(0)) body.erase(it);
}

void drop_unset_length(Json& body) {
  if (!body.is_object()) return;
  if (auto it = body.find("n_predict"); it != body.end() && *it == Json(-1)) body.erase(it);
}

void pass_over(Fields& f, std::initializer_list<const char*> names, const char* why) {
  for (const char* name : names)
    if (f.has(name)) log_debug("a field is passed over", {{"field", name}, {"why", why}});
}

void read_llama_sampling(Fields& f, GenerateInput& in) {
  for (const auto& [name, why, off] : kSamplers) f.unserved(name, why, off);
  for (const char* name : kTuning) f.note(name);
  read_penalties(f, in.request.sampling);
}

void read_llama_cache(Fields& f, GenerateInput& in) {
  bool cache = true;
  if (f.boolean("cache_prompt", &cache) && !cache && in.request.cache_salt.empty())
    in.request.cache_salt = salt_of_its_own();
  f.unserved("n_cache_reuse", "prefixes are found by themselves; shifted pieces are not", "0");
  pass_over(f, {"id_slot", "slot_id"}, "there are no slots: a prefix is found whoever computed it");
  pass_over(f, {"backend_sampling"}, "the device draws wherever it can");
  pass_over(f, {"speculative.n_max", "speculative.n_min", "speculative.p_min"}, "how far is drafted changes no token");
  pass_over(f, {"n_keep", "n_discard"}, "the context is not shifted: an answer ends where it is full");
}

}  // namespace kvasir::server::http
