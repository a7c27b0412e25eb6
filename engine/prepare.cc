#include "engine/prepare.h"

#include <algorithm>

#include "core/cat.h"

namespace kvasir::engine {
namespace {

void set_stops(Job& job, const std::vector<int32_t>& end_of_generation) {
  const Request& r = job.request;
  if (!r.ignore_eos) job.stop_set = end_of_generation;
  job.stop_set.insert(job.stop_set.end(), r.stop_tokens.begin(), r.stop_tokens.end());
  std::sort(job.stop_set.begin(), job.stop_set.end());
  job.stop_set.erase(std::unique(job.stop_set.begin(), job.stop_set.end()), job.stop_set.end());
}

Status set_masks(Job& job, int32_t vocab_size) {
  const Request& r = job.request;
  const size_t words = (size_t(vocab_size) + 31) / 32;
  if (!r.allowed_tokens.empty()) {
    job.allowed_mask.assign(words, 0);
    for (int32_t t : r.allowed_tokens) job.allowed_mask[size_t(t) / 32] |= 1u << (t % 32);
  }
  if (r.min_tokens <= 0 || job.stop_set.empty()) return {};
  if (job.allowed_mask.empty())
    job.min_tokens_mask.assign(words, ~0u);
  else
    job.min_tokens_mask = job.allowed_mask;
  if (forbid_stops(job.min_tokens_mask, job.stop_set) || r.allowed_tokens.empty()) return {};
  return invalid_argument(cat("every one of allowed_token_ids ends the answer, and min_tokens is ", r.min_tokens,
                              "; allow an id that does not, or leave min_tokens out"))
      .with_field("allowed_token_ids");
}

Status set_beams(Job& job, int32_t vocab_size) {
  const Request& r = job.request;
  if (!r.beams) return {};
  job.beams.emplace(*r.beams, job.stop_set, *r.max_tokens, r.sampling.logprobs);
  const int32_t candidates = job.beams->candidates();
  job.beam_params.temperature = 0;
  job.beam_params.logprobs = candidates;
  if (candidates <= vocab_size) return {};
  return invalid_argument(cat("beam_width is ", r.beams->width, "; with ", job.stop_set.size(),
                              " tokens that end an answer and a vocabulary of ", vocab_size, " it must be at most ",
                              vocab_size / (candidates / r.beams->width)))
      .with_field("beam_width");
}

}  // namespace

void set_max_tokens(Request& r, const RequestLimits& limits, const model::ModelInfo& info) {
  if (r.max_tokens) return;
  const auto prompt = int64_t(r.prompt.size());
  const int64_t room = info.context_length - prompt;
  if (limits.default_length > 0) {
    r.max_tokens = std::max<int64_t>(limits.default_length - prompt, info.sliding_window);
  } else if (limits.max_output > 0 || limits.max_total > 0 || r.beams) {
    r.max_tokens = room;
    if (limits.max_output > 0) r.max_tokens = std::min(*r.max_tokens, limits.max_output);
    if (limits.max_total > 0) r.max_tokens = std::min(*r.max_tokens, limits.max_total - prompt);
  }
}

Status prepare(Job& job, const model::ModelInfo& info, const std::vector<int32_t>& end_of_generation) {
  const Request& r = job.request;
  set_stops(job, end_of_generation);
  KVASIR_TRY(set_masks(job, info.vocab_size));
  KVASIR_TRY(set_beams(job, info.vocab_size));
  if (r.pooled)
    job.pooled.resize(r.classified ? size_t(info.labels) : r.scored.empty() ? size_t(info.hidden) : r.scored.size());
  if (r.prompt_logprobs >= 0) {
    job.score_params.logprobs = r.prompt_logprobs;
    job.prompt_logprobs.resize(r.prompt.size());
    for (size_t i = 0; i < r.prompt.size(); ++i) job.prompt_logprobs[i].id = r.prompt[i];
  }
  return {};
}

}  // namespace kvasir::engine
