// Sampling belongs to the request: every random number is a pure function of
// (seed, choice, position, draw), so batch-mates cannot change a seeded result.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/status.h"

namespace kvasir::model {

struct SamplingParams {
  float temperature = 1.0f;  // 0: greedy
  int32_t top_k = 0;         // 0: off
  float top_p = 1.0f;
  float min_p = 0.0f;
  float typical_p = 1.0f;
  float top_n_sigma = 0.0f;
  float repetition_penalty = 1.0f;  // over prompt and output
  float presence_penalty = 0.0f;    // over output
  float frequency_penalty = 0.0f;   // over output
  uint64_t seed = 0;                // the server draws one when the client gave none
  std::vector<std::pair<int32_t, float>> logit_bias;
  int32_t logprobs = -1;                   // -1: none; k >= 0: the chosen token's and the top k's
  bool post_sampling_probs = false;        // they are of what was drawn from, cuts and all
  std::vector<int32_t> logprob_token_ids;  // instead of the top k's, those of these and the drawn one
  // Of each sequence the last token is not drawn where the output ends with those before it.
  std::vector<std::vector<int32_t>> bad_sequences;

  Status validate(int32_t vocab_size) const;
};

// The numbers among them that a client may send. Every protocol reads, checks and documents them by this table: a new
// one is a member above, a row here, its use in the sampler, and a field of kvasir.proto.
struct SamplingNumber {
  const char* name;
  float SamplingParams::*to;
  float low, high;
  bool above_low;          // `low` itself is too little
  const char* hint;        // which value does nothing, for refusals
  const char* what;        // for docs/api.md
  bool on_device = false;  // what draws on a device knows it, too

  bool good(const SamplingParams& p) const {  // a NaN is not
    return (above_low ? p.*to > low : p.*to >= low) && p.*to <= high;
  }
  Status check(const SamplingParams& p) const;
  std::string limits() const;  // "a number from 0 to 1; 0 is off"
  bool set(const SamplingParams& p) const { return p.*to != SamplingParams().*to; }
};
// In the order in which they are judged.
inline constexpr SamplingNumber kSamplingNumbers[] = {
    {"temperature", &SamplingParams::temperature, 0, 100, false, "0 is greedy", "what logits are divided by", true},
    {"top_p", &SamplingParams::top_p, 0, 1, true, "1 is off", "the likeliest tokens that together have this share",
     true},
    {"min_p", &SamplingParams::min_p, 0, 1, false, "0 is off",
     "tokens of this share of the likeliest one's probability", true},
    {"typical_p", &SamplingParams::typical_p, 0, 1, true, "1 is off", "the most typical tokens that have this share",
     true},
    {"top_n_sigma", &SamplingParams::top_n_sigma, 0, 100, false, "0 is off",
     "tokens within so many standard deviations (of all logits) of the greatest logit", true},
    {"repetition_penalty", &SamplingParams::repetition_penalty, 0, 100, true, "1 is off",
     "divides the logits of tokens of prompt and answer", true},
    {"presence_penalty", &SamplingParams::presence_penalty, -2, 2, false, "0 is off",
     "taken from the logits of tokens of the answer", true},
    {"frequency_penalty", &SamplingParams::frequency_penalty, -2, 2, false, "0 is off",
     "the same, as often as each has come", true},
};

struct TokenLogprob {
  int32_t token = 0;
  float logprob = 0;
};

// A grammar that follows a sequence. Called by the thread that draws the sequence's row, one at a time.
class Constraint {
 public:
  virtual ~Constraint() = default;
  // Whether the text may go on with `token`; if so, it has. `masked`: it was drawn from mask().
  virtual bool take(int32_t token, bool masked) = 0;
  // What it may go on with: bit t set = token t. Null: not known yet, and being computed from now on.
  virtual const uint32_t* mask() = 0;
};

// What one row of logits is to become. With a constraint the first draw is as without one, which is most often right;
// one that is refused is repeated among what is allowed, so that together they draw from the allowed distribution;
// only top-k, top-p and min-p cut the first draw before the constraint is asked.
struct SampleRow {
  const SamplingParams* params = nullptr;
  int32_t choice = 0;               // which of n
  int64_t position = 0;             // of the token being drawn
  std::span<const int32_t> prompt;  // for the penalties
  std::span<const int32_t> output;
  // One more of the output, named as in Batch::tokens, where the launch that gives it may still be under way.
  std::optional<int32_t> last;
  const uint32_t* mask = nullptr;  // bit t set = token t allowed; null: all
  Constraint* constraint = nullptr;
  // Of a row with a constraint, which follows what is drawn: it is drawn only if the row before it gave this token. -1:
  // whatever that gave.
  int32_t after = -1;
  bool score_only = false;  // prompt log-probabilities: no draw, score `target`
  int32_t target = -1;
};

struct Sampled {
  int32_t token = -1;
  // Of the raw distribution (after bias and mask-free softmax), or with post_sampling_probs of the one drawn from.
  float logprob = 0;
  std::vector<TokenLogprob> top;  // params->logprobs of them, best first; or those that params names
  bool bad_logits = false;        // NaN or Inf in the row: this request fails, its batch-mates do not
  bool nothing_allowed = false;   // no token: mask and constraint leave none
  bool late = false;              // no token: the constraint's mask did not come in time
};

// What a device drew from a row of logits.
struct DeviceDraw {
  int32_t token = -1;
  float logprob = 0;
  int32_t bad_logits = 0;       // NaN or Inf in the row
  int32_t nothing_allowed = 0;  // no token: every one is forbidden
};

}  // namespace kvasir::model
