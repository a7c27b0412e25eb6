#include "model/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/cat.h"
#include "model/cpu/kernels.h"
#include "model/philox.h"

namespace kvasir::model {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

Status range(const char* field, double value, double low, double high, const char* hint) {
  if (value >= low && value <= high) return {};
  return invalid_argument(cat(field, " is ", value, "; it must be from ", low, " to ", high, hint)).with_field(field);
}

// The k best, best first; equal values by id.
std::vector<TokenLogprob> best(std::span<const float> logits, int32_t k, float normalizer) {
  std::vector<TokenLogprob> heap;  // the worst of the best in front
  auto better = [](const TokenLogprob& a, const TokenLogprob& b) {
    return a.logprob != b.logprob ? a.logprob > b.logprob : a.token < b.token;
  };
  k = std::min<int32_t>(k, int32_t(logits.size()));
  for (int32_t i = 0; i < int32_t(logits.size()) && k > 0; ++i) {
    if (int32_t(heap.size()) < k) {
      heap.push_back({i, logits[size_t(i)]});
      std::push_heap(heap.begin(), heap.end(), better);
    } else if (logits[size_t(i)] > heap.front().logprob) {
      std::pop_heap(heap.begin(), heap.end(), better);
      heap.back() = {i, logits[size_t(i)]};
      std::push_heap(heap.begin(), heap.end(), better);
    }
  }
  std::sort_heap(heap.begin(), heap.end(), better);
  for (TokenLogprob& t : heap) t.logprob -= normalizer;
  return heap;
}

}  // namespace

Status SamplingParams::validate(int32_t vocab_size) const {
  KVASIR_TRY(range("temperature", temperature, 0, 100, "; 0 is greedy"));
  KVASIR_TRY(range("top_k", top_k, 0, INT32_MAX, "; 0 turns it off"));
  if (!(top_p > 0 && top_p <= 1))
    return invalid_argument(cat("top_p is ", top_p, "; it must be above 0 and at most 1")).with_field("top_p");
  KVASIR_TRY(range("min_p", min_p, 0, 1, "; 0 turns it off"));
  if (!(typical_p > 0 && typical_p <= 1))
    return invalid_argument(cat("typical_p is ", typical_p, "; it must be above 0 and at most 1"))
        .with_field("typical_p");
  if (!(repetition_penalty > 0 && repetition_penalty <= 100))
    return invalid_argument(cat("repetition_penalty is ", repetition_penalty, "; it must be above 0 and at most 100"))
        .with_field("repetition_penalty");
  KVASIR_TRY(range("presence_penalty", presence_penalty, -2, 2, ""));
  KVASIR_TRY(range("frequency_penalty", frequency_penalty, -2, 2, ""));
  if (logprobs < -1 || logprobs > vocab_size)
    return invalid_argument(cat("logprobs is ", logprobs, "; it must be from 0 to ", vocab_size))
        .with_field("logprobs");
  for (auto& [token, bias] : logit_bias) {
    if (token < 0 || token >= vocab_size)
      return invalid_argument(cat("logit_bias names token ", token, "; the vocabulary has ", vocab_size))
          .with_field("logit_bias");
    KVASIR_TRY(range("logit_bias", bias, -100, 100, ""));
  }
  return {};
}

Sampled Sampler::sample(std::span<float> logits, const SampleRow& row) {
  const SamplingParams& p = *row.params;
  const cpu::Kernels& kernels = cpu::best_kernels();
  Sampled out;
  for (auto& [token, bias] : p.logit_bias) logits[size_t(token)] += bias;
  float max = 0, sum = 0;
  kernels.softmax_sums(logits.data(), vocab_, &max, &sum);
  if (std::isnan(sum)) {
    out.bad_logits = true;
    return out;
  }
  float normalizer = max + std::log(sum);
  if (p.logprobs > 0) out.top = best(logits, p.logprobs, normalizer);

  if (row.score_only) {
    out.token = row.target;
    out.logprob = row.target >= 0 && row.target < vocab_ ? logits[size_t(row.target)] - normalizer : 0;
    return out;
  }
  // What the row was, where the steps below change it.
  bool penalties = p.repetition_penalty != 1 || p.presence_penalty != 0 || p.frequency_penalty != 0;
  std::vector<float> raw;
  if (penalties) {
    raw.assign(logits.begin(), logits.end());
    penalize(logits, row);
  }
  if (row.mask) {
    bool any = false;
    for (int32_t i = 0; i < vocab_; ++i) {
      bool allowed = (row.mask[i / 32] >> (i % 32)) & 1;
      any |= allowed;
      if (!allowed) logits[size_t(i)] = kNever;
    }
    if (!any) {  // a grammar that allows nothing is a dead end for this request alone
      out.bad_logits = true;
      return out;
    }
  }
  out.token = p.temperature == 0 ? greedy(logits) : draw(logits, row);
  out.logprob = (penalties ? raw[size_t(out.token)] : logits[size_t(out.token)]) - normalizer;
  return out;
}

void Sampler::penalize(std::span<float> logits, const SampleRow& row) {
  const SamplingParams& p = *row.params;
  counts_.resize(size_t(vocab_), 0);
  seen_.clear();
  auto count = [&](std::span<const int32_t> tokens) {
    for (int32_t t : tokens)
      if (t >= 0 && t < vocab_ && counts_[size_t(t)]++ == 0) seen_.push_back(t);
  };
  count(row.output);
  size_t in_output = seen_.size();
  if (p.repetition_penalty != 1) {
    std::vector<int32_t> times;
    for (int32_t t : seen_) times.push_back(counts_[size_t(t)]);
    count(row.prompt);
    for (size_t i = 0; i < in_output; ++i) counts_[size_t(seen_[i])] = times[i];
    for (int32_t t : seen_) {
      float& l = logits[size_t(t)];
      l = l > 0 ? l / p.repetition_penalty : l * p.repetition_penalty;
    }
  }
  for (size_t i = 0; i < in_output; ++i)
    logits[size_t(seen_[i])] -= p.presence_penalty + p.frequency_penalty * float(counts_[size_t(seen_[i])]);
  for (int32_t t : seen_) counts_[size_t(t)] = 0;
}

int32_t Sampler::greedy(std::span<const float> logits) const {  // the first of equals
  constexpr size_t kBlock = 64;
  float most = kNever;
  size_t found = 0;  // where the block of the greatest begins
  size_t whole = logits.size() / kBlock * kBlock;
  for (size_t i = 0; i < whole; i += kBlock) {
    float lanes[8] = {kNever, kNever, kNever, kNever, kNever, kNever, kNever, kNever};
    for (size_t j = 0; j < kBlock; j += 8)
      for (size_t k = 0; k < 8; ++k) lanes[k] = logits[i + j + k] > lanes[k] ? logits[i + j + k] : lanes[k];
    float best = *std::max_element(lanes, lanes + 8);
    if (best > most) most = best, found = i;
  }
  auto rest = std::max_element(logits.begin() + int64_t(whole), logits.end());
  if (rest != logits.end() && *rest > most) return int32_t(rest - logits.begin());
  return int32_t(std::find(logits.begin() + int64_t(found), logits.end(), most) - logits.begin());
}

int32_t Sampler::draw(std::span<const float> logits, const SampleRow& row) {
  const SamplingParams& p = *row.params;
  float max = logits[size_t(greedy(logits))];
  weights_.resize(size_t(vocab_));
  cpu::best_kernels().exponentials(logits.data(), vocab_, max, 1.0f / p.temperature, weights_.data());
  double u = uniform(row.params->seed, row.choice, row.position, 0);
  auto weight = [&](int32_t t) { return double(weights_[size_t(t)]); };

  bool all = p.top_k == 0 && p.top_p >= 1 && p.min_p <= 0 && p.typical_p >= 1;
  order_.clear();
  // The greatest weight is 1, so min-p is a threshold; what it drops nothing later would bring back.
  float least = p.min_p > 0 ? p.min_p : 0.0f;
  double total = 0;
  for (int32_t i = 0; i < vocab_; ++i) {
    float w = weights_[size_t(i)];
    total += w;
    if (w > 0 && (all || (p.typical_p < 1 || p.top_p < 1) || w >= least)) order_.push_back(i);
  }
  if (!all) {
    auto heavier = [&](int32_t a, int32_t b) {
      return weights_[size_t(a)] != weights_[size_t(b)] ? weights_[size_t(a)] > weights_[size_t(b)] : a < b;
    };
    auto keep = [&](size_t n) {  // the n heaviest, sorted
      n = std::min(n, order_.size());
      std::partial_sort(order_.begin(), order_.begin() + int64_t(n), order_.end(), heavier);
      order_.resize(n);
      total = 0;
      for (int32_t t : order_) total += weight(t);
    };
    if (p.top_k > 0 && size_t(p.top_k) < order_.size()) keep(size_t(p.top_k));
    if (p.typical_p < 1) {
      // Tokens whose surprise is nearest the distribution's entropy, until they hold typical_p of it.
      double entropy = 0;
      for (int32_t t : order_) entropy -= weight(t) / total * std::log(weight(t) / total);
      auto oddness = [&](int32_t t) { return std::fabs(-std::log(weight(t) / total) - entropy); };
      std::vector<std::pair<double, int32_t>> by;
      for (int32_t t : order_) by.emplace_back(oddness(t), t);
      std::sort(by.begin(), by.end());
      double mass = 0, kept = 0;
      order_.clear();
      for (auto& [odd, t] : by) {
        order_.push_back(t);
        kept += weight(t);
        if ((mass = kept / total) >= p.typical_p) break;
      }
      total = kept;
    }
    if (p.top_p < 1) {
      // A heap gives the heaviest one by one: few are needed, sorting all would be a waste.
      auto lighter = [&](int32_t a, int32_t b) { return heavier(b, a); };
      std::make_heap(order_.begin(), order_.end(), lighter);
      std::vector<int32_t> kept;
      double mass = 0;
      for (auto end = order_.end(); end != order_.begin() && mass < double(p.top_p) * total; --end) {
        kept.push_back(order_.front());
        mass += weight(order_.front());
        std::pop_heap(order_.begin(), end, lighter);
      }
      order_ = std::move(kept);
    }
    if (p.min_p > 0) {
      float heaviest = 0;
      for (int32_t t : order_) heaviest = std::max(heaviest, weights_[size_t(t)]);
      std::erase_if(order_, [&](int32_t t) { return weights_[size_t(t)] < p.min_p * heaviest; });
    }
    total = 0;
    for (int32_t t : order_) total += weight(t);
  }
  double target = u * total, below = 0;
  for (int32_t t : order_) {
    below += weight(t);
    if (below > target) return t;
  }
  return order_.back();
}

}  // namespace kvasir::model
