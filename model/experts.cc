#include "model/experts.h"

#include <algorithm>
#include <cmath>

#include "core/cat.h"

namespace kvasir::model {
namespace {

constexpr int32_t kMostExperts = 1024, kMostUsed = 64;

Status in_range(const char* field, double value, double low, double high) {
  if (value >= low && value <= high) return {};
  return invalid_argument(cat("the model's ", field, " is ", value, "; it must be from ", low, " to ", high));
}

// The greatest that is not taken yet; the first of those that are NaN when no other is left.
int32_t best(const float* scores, const bool* taken, int32_t first, int32_t count) {
  int32_t out = -1;
  for (int32_t i = first; i < first + count; ++i)
    if (!taken[i] && (out < 0 || scores[i] > scores[out] || (std::isnan(scores[out]) && !std::isnan(scores[i]))))
      out = i;
  return out;
}

// No expert outside the best groups may be chosen.
void take_worst_groups(const Routing& r, const float* choice, bool* taken) {
  const int32_t size = r.experts / r.groups;
  float sums[kMostExperts];
  bool kept[kMostExperts] = {};
  for (int32_t g = 0; g < r.groups; ++g) {
    const int32_t first = best(choice, taken, g * size, size);
    taken[first] = true;
    const int32_t second = r.group_best < 2 ? -1 : best(choice, taken, g * size, size);
    taken[first] = false;
    sums[g] = choice[first] + (second < 0 ? 0.0f : choice[second]);
  }
  for (int32_t k = 0; k < r.used_groups; ++k) kept[best(sums, kept, 0, r.groups)] = true;
  for (int32_t i = 0; i < r.experts; ++i) taken[i] = !kept[i / size];
}

}  // namespace

Status ExpertsConfig::validate(int32_t layers) const {
  const Routing& r = routing;
  if (r.experts == 0) return {};
  KVASIR_TRY(in_range("number of experts", r.experts, 1, kMostExperts));
  KVASIR_TRY(in_range("number of experts a token", r.used, 1, std::min(r.experts, kMostUsed)));
  KVASIR_TRY(in_range("experts' feed-forward size", ffn, 16, 1 << 17));
  KVASIR_TRY(in_range("shared expert's feed-forward size", shared_ffn, 0, 1 << 19));
  KVASIR_TRY(in_range("limit of the experts' gates", limit, 0, 1e6));
  KVASIR_TRY(in_range("slope of the experts' gates", slope, -1e3, 1e3));
  KVASIR_TRY(in_range("scale of the experts' sum", r.scale, 1e-6, 1e6));
  KVASIR_TRY(in_range("groups of experts", r.groups, 1, r.experts));
  KVASIR_TRY(in_range("groups of experts a token", r.used_groups, 1, r.groups));
  if (ffn % 16 != 0)
    return invalid_argument(cat("the model's experts' feed-forward size is ", ffn, "; it must be a multiple of 16"));
  if (r.experts % r.groups != 0 || r.used > r.experts / r.groups * r.used_groups)
    return invalid_argument(cat("the model chooses ", r.used, " of ", r.experts, " experts in ", r.used_groups, " of ",
                                r.groups, " groups, which are too few or of different sizes"));
  if (!dense.empty() && int64_t(dense.size()) != layers)
    return invalid_argument(cat("the model says of ", dense.size(), " of its ", layers, " layers which have experts"));
  return {};
}

void Routing::choose(const float* logits, const float* correction, int32_t* chosen, float* weights) const {
  float scores[kMostExperts], choice[kMostExperts];
  bool taken[kMostExperts] = {};
  float greatest = logits[0], sum = 0;
  for (int32_t i = 1; i < experts; ++i) greatest = std::max(greatest, logits[i]);
  for (int32_t i = 0; i < experts; ++i) {
    scores[i] = scores_of == ExpertScores::sigmoid ? 1 / (1 + std::exp(-logits[i])) : std::exp(logits[i] - greatest);
    sum += scores[i];
  }
  if (scores_of == ExpertScores::softmax)
    for (int32_t i = 0; i < experts; ++i) scores[i] /= sum;
  // Logits are in the order of their scores, and do not become equal where those are too small.
  for (int32_t i = 0; i < experts; ++i) choice[i] = correction ? scores[i] + correction[i] : logits[i];
  if (groups > 1) take_worst_groups(*this, choice, taken);
  sum = 0;
  for (int32_t k = 0; k < used; ++k) {
    chosen[k] = best(choice, taken, 0, experts);
    taken[chosen[k]] = true;
    weights[k] = scores[chosen[k]];
    sum += weights[k];
  }
  const float factor = normalized || scores_of == ExpertScores::of_chosen ? scale / sum : scale;
  for (int32_t k = 0; k < used; ++k) weights[k] *= factor;
}

}  // namespace kvasir::model
