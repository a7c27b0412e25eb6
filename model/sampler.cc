#include "model/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/cat.h"
#include "model/cpu/kernels.h"
#include "model/philox.h"

namespace kvasir::model {
namespace {

// Of a nucleus: more candidates than these are looked at in passes over the whole row.
constexpr size_t kFew = 2048;

// Weights by their leading bits, from 1 downwards: 32 classes each time they halve.
constexpr uint32_t kOne = 0x3f800000, kClassBits = 18, kClasses = (kOne >> kClassBits) + 1;
uint32_t class_of(float weight) { return (kOne - std::min(kOne, std::bit_cast<uint32_t>(weight))) >> kClassBits; }

// A token the mask forbids: finite, so that only a broken row has NaN or Inf.
constexpr float kNever = std::numeric_limits<float>::lowest();

}  // namespace

Status SamplingNumber::check(const SamplingParams& p) const {
  if (good(p)) return {};
  return invalid_argument(cat(name, " is ", p.*to, "; it must be ", limits())).with_field(name);
}

std::string SamplingNumber::limits() const {
  return above_low ? cat("more than ", low, " and at most ", high, "; ", hint)
                   : cat("a number from ", low, " to ", high, "; ", hint);
}

Status SamplingParams::validate(int32_t vocab_size) const {
  for (const SamplingNumber& n : kSamplingNumbers) KVASIR_TRY(n.check(*this));
  if (top_k < 0) return invalid_argument(cat("top_k is ", top_k, "; it must be 0 (off) or more")).with_field("top_k");
  if (logprobs < -1 || logprobs > vocab_size)
    return invalid_argument(cat("logprobs is ", logprobs, "; it must be from 0 to ", vocab_size))
        .with_field("logprobs");
  auto known = [&](int32_t token) { return token >= 0 && token < vocab_size; };
  if (!std::all_of(logprob_token_ids.begin(), logprob_token_ids.end(), known))
    return invalid_argument(cat("logprob_token_ids names a token beyond the vocabulary of ", vocab_size))
        .with_field("logprob_token_ids");
  for (const auto& sequence : bad_sequences)
    if (sequence.empty() || !std::all_of(sequence.begin(), sequence.end(), known))
      return invalid_argument(cat("bad_words has tokens beyond the vocabulary of ", vocab_size))
          .with_field("bad_words");
  for (auto& [token, bias] : logit_bias) {
    if (token < 0 || token >= vocab_size)
      return invalid_argument(cat("logit_bias names token ", token, "; the vocabulary has ", vocab_size))
          .with_field("logit_bias");
    if (!(bias >= -100 && bias <= 100))
      return invalid_argument(cat("logit_bias of token ", token, " is ", bias, "; it must be from -100 to 100"))
          .with_field("logit_bias");
  }
  return {};
}

namespace {

// Of the logits of tokens that may be drawn at all.
double deviation(std::span<const float> logits) {
  double sum = 0, squares = 0, n = 0;
  for (const float l : logits) {
    if (l == kNever) continue;
    sum += double(l), squares += double(l) * double(l), n += 1;
  }
  const double mean = sum / n;
  return std::sqrt(std::max(0.0, squares / n - mean * mean));
}

float logprob_of(int32_t token, std::span<const float> logits, float normalizer,
                 const std::vector<std::pair<int32_t, float>>& changed) {
  for (auto& [t, raw] : changed)
    if (t == token) return raw - normalizer;
  return logits[size_t(token)] - normalizer;
}

void add_named(int32_t token, float logprob, std::vector<TokenLogprob>& all) {
  if (std::none_of(all.begin(), all.end(), [&](const TokenLogprob& t) { return t.token == token; }))
    all.push_back({token, logprob});
}

void tell_drawn(std::span<const float> logits, const SamplingParams& p, float normalizer,
                const std::vector<std::pair<int32_t, float>>& changed, Sampled& out) {
  if (out.token < 0) return;
  out.logprob = logprob_of(out.token, logits, normalizer, changed);
  if (!p.logprob_token_ids.empty()) add_named(out.token, out.logprob, out.top);
}

}  // namespace

bool Sampler::sample(std::span<float> logits, const SampleRow& row, Sampled& out, Refused& refused) {
  const SamplingParams& p = *row.params;
  for (auto& [token, bias] : p.logit_bias) logits[size_t(token)] += bias;
  float max = kernels_.greatest(logits.data(), vocab_);
  if (std::isnan(max)) {
    out.bad_logits = true;
    return true;
  }
  const double sum = sum_exponentials(logits, max, 1);
  const float normalizer = max + float(std::log(sum));
  const bool raw = !p.post_sampling_probs || row.score_only;
  for (int32_t t : p.logprob_token_ids)
    if (raw) add_named(t, logits[size_t(t)] - normalizer, out.top);
  if (raw && p.logprob_token_ids.empty() && p.logprobs > 0) {
    select(logits, max, size_t(p.logprobs));
    for (int32_t t : found_) out.top.push_back({t, logits[size_t(t)] - normalizer});
  }
  if (row.score_only) {
    out.token = row.target;
    out.logprob = row.target >= 0 && row.target < vocab_ ? logits[size_t(row.target)] - normalizer : 0;
    return true;
  }
  changed_.clear();
  if (p.repetition_penalty != 1 || p.presence_penalty != 0 || p.frequency_penalty != 0) penalize(logits, row);
  if (!p.bad_sequences.empty()) forbid(logits, row);
  if (row.mask) apply(row.mask, logits);
  const bool same = changed_.empty() && !row.mask;
  if (!same) max = kernels_.greatest(logits.data(), vocab_);
  if (max == kNever) {
    out.nothing_allowed = true;
    return true;
  }
  out.token = choose(logits, row, max, same && p.temperature == 1 ? sum : 0, 0);
  if (row.constraint && !row.constraint->take(out.token, false) && !draw_allowed(logits, row, out)) {
    refused.normalizer = normalizer;
    refused.changed = changed_;
    return false;
  }
  if (raw)
    tell_drawn(logits, p, normalizer, changed_, out);
  else
    tell_drawn_from(logits, p, out);
  return true;
}

void Sampler::sample_again(std::span<float> logits, const SampleRow& row, const Refused& refused, Sampled& out) {
  if (!draw_allowed(logits, row, out)) {
    out.token = -1;
    out.late = true;
  } else if (row.params->post_sampling_probs) {
    tell_drawn_from(logits, *row.params, out);
  } else {
    tell_drawn(logits, *row.params, refused.normalizer, refused.changed, out);
  }
}

// Among what the constraint allows. False: it does not know yet.
bool Sampler::draw_allowed(std::span<float> logits, const SampleRow& row, Sampled& out) {
  const uint32_t* mask = row.constraint->mask();
  if (mask == nullptr) return false;
  apply(mask, logits);
  const float max = kernels_.greatest(logits.data(), vocab_);
  out.nothing_allowed = max == kNever;  // a dead end for this request alone
  out.token = out.nothing_allowed ? -1 : choose(logits, row, max, 0, 1);
  if (!out.nothing_allowed && !row.constraint->take(out.token, true)) out.nothing_allowed = true, out.token = -1;
  return true;
}

int32_t Sampler::choose(std::span<const float> logits, const SampleRow& row, float max, double sum, uint32_t nth) {
  if (row.params->temperature == 0) return int32_t(kernels_.find(logits.data(), vocab_, max));
  return draw(logits, row, max, sum, nth);
}

void Sampler::penalize(std::span<float> logits, const SampleRow& row) {
  const SamplingParams& p = *row.params;
  counts_.resize(size_t(vocab_), 0);
  auto known = [&](int32_t t) { return t >= 0 && t < vocab_; };
  auto count = [&](int32_t t) {
    if (known(t) && counts_[size_t(t)]++ == 0) changed_.push_back({t, logits[size_t(t)]});
  };
  for (int32_t t : row.output) count(t);
  if (row.last) count(*row.last);
  const size_t in_output = changed_.size();
  if (p.repetition_penalty != 1)
    for (int32_t t : row.prompt)
      if (known(t) && counts_[size_t(t)] == 0) counts_[size_t(t)] = 1, changed_.push_back({t, logits[size_t(t)]});
  for (size_t i = 0; i < changed_.size(); ++i) {
    float& l = logits[size_t(changed_[i].first)];
    int32_t& n = counts_[size_t(changed_[i].first)];
    if (p.repetition_penalty != 1) l = l > 0 ? l / p.repetition_penalty : l * p.repetition_penalty;
    if (i < in_output) l -= p.presence_penalty + p.frequency_penalty * float(n);
    n = 0;
  }
}

// The last token of each sequence whose others the output ends with.
void Sampler::forbid(std::span<float> logits, const SampleRow& row) {
  auto from_end = [&](size_t n) {
    if (row.last && n == 0) return *row.last;
    return row.output[row.output.size() - 1 - (row.last ? n - 1 : n)];
  };
  const size_t drawn = row.output.size() + (row.last ? 1 : 0);
  for (const std::vector<int32_t>& sequence : row.params->bad_sequences) {
    const size_t before = sequence.size() - 1;
    bool there = before <= drawn;
    for (size_t n = 0; there && n < before; ++n) there = from_end(n) == sequence[before - 1 - n];
    if (!there) continue;
    float& l = logits[size_t(sequence.back())];
    changed_.push_back({sequence.back(), l});
    l = kNever;
  }
}

void Sampler::apply(const uint32_t* mask, std::span<float> logits) const {
  for (int32_t first = 0; first < vocab_; first += 32) {
    const uint32_t word = mask[first / 32];
    if (word == ~0u) continue;
    float* l = logits.data() + first;
    const int32_t n = std::min(32, vocab_ - first);
    if (word == 0)
      std::fill_n(l, n, kNever);
    else
      for (int32_t i = 0; i < n; ++i) l[i] = (word >> i) & 1 ? l[i] : kNever;
  }
}

double Sampler::sum_exponentials(std::span<const float> logits, float max, float scale) {
  sums_.resize((size_t(vocab_) + cpu::kSumBlock - 1) / cpu::kSumBlock);
  kernels_.exponential_sums(logits.data(), vocab_, max, scale, sums_.data());
  double sum = 0;
  for (float s : sums_) sum += s;
  return sum;
}

// All tokens within `reach` of the greatest logit, ascending.
void Sampler::find_within(std::span<const float> logits, float max, float reach) {
  ids_.resize(size_t(vocab_));
  const float least = std::max(max - reach, std::nextafter(kNever, 0.0f));
  found_.assign(ids_.data(), ids_.data() + kernels_.at_least(logits.data(), vocab_, least, ids_.data()));
}

// The k greatest, greatest first; equal ones by id. Sorting all would be a waste: few are near the greatest.
void Sampler::select(std::span<const float> logits, float max, size_t k) {
  for (float reach : {8.0f, 64.0f, 512.0f, std::numeric_limits<float>::max()}) {
    find_within(logits, max, reach);
    if (found_.size() >= k) break;
  }
  k = std::min(k, found_.size());
  auto greater = [&](int32_t a, int32_t b) {
    return logits[size_t(a)] != logits[size_t(b)] ? logits[size_t(a)] > logits[size_t(b)] : a < b;
  };
  if (k < found_.size()) std::nth_element(found_.begin(), found_.begin() + int64_t(k), found_.end(), greater);
  found_.resize(k);
  std::sort(found_.begin(), found_.end(), greater);
}

// Makes candidates_ of found_, with their weights, and says what these add up to.
double Sampler::weigh(std::span<const float> logits, float max, float scale) {
  weights_.clear();
  for (int32_t t : found_) weights_.push_back(logits[size_t(t)]);
  kernels_.exponentials(weights_.data(), int64_t(weights_.size()), max, scale, weights_.data());
  candidates_.clear();
  double total = 0;
  for (size_t i = 0; i < found_.size(); ++i) {
    if (weights_[i] == 0) continue;
    candidates_.push_back({weights_[i], found_[i]});
    total += weights_[i];
  }
  return total;
}

int32_t Sampler::draw(std::span<const float> logits, const SampleRow& row, float max, double sum, uint32_t nth) {
  const SamplingParams& p = *row.params;
  const float scale = std::min(1.0f / p.temperature, 1e8f);  // logits that differ at all differ by more than 1e-8
  const double u = uniform(p.seed, row.choice, row.position, nth);
  const bool some = p.top_k > 0 && p.top_k < vocab_;
  const float reach = p.top_n_sigma > 0 ? p.top_n_sigma * float(deviation(logits)) : 0;
  if (!some && p.top_n_sigma <= 0 && p.top_p >= 1 && p.min_p <= 0 && p.typical_p >= 1) {
    if (sum == 0) sum = sum_exponentials(logits, max, scale);
    return draw_of_all(logits, max, scale, u * sum);
  }
  // The greatest weight is 1. What is too light for any of the filters is not even looked at.
  double total = 0;
  if (some) {
    select(logits, max, size_t(p.top_k));
    if (p.top_n_sigma > 0) std::erase_if(found_, [&](int32_t t) { return logits[size_t(t)] < max - reach; });
    total = weigh(logits, max, scale);
  } else if (p.top_n_sigma > 0) {
    find_within(logits, max, reach);
    total = weigh(logits, max, scale);
  } else if (p.typical_p < 1) {
    find_within(logits, max, 88 / scale);
    total = weigh(logits, max, scale);
  } else if (p.top_p < 1) {
    const double all = sum == 0 ? sum_exponentials(logits, max, scale) : sum;
    size_t likely = 0;  // of every 64th token, those within reach
    for (size_t t = 0; t < logits.size(); t += 64) likely += logits[t] >= max - 6 / scale;
    if (64 * likely <= 2 * kFew) {
      find_within(logits, max, 6 / scale);
      total = weigh(logits, max, scale);
    }
    if (total < double(p.top_p) * all) return draw_of_many(logits, p, max, scale, u, all);
    total = all;
  } else {
    find_within(logits, max, (0.01f - std::log(p.min_p)) / scale);  // a little more than those of min_p
    total = weigh(logits, max, scale);
  }
  const double target = u * cut(p, total);
  double below = 0;
  for (const Candidate& c : candidates_)
    if ((below += c.weight) > target) return c.token;
  return candidates_.back().token;
}

// Of candidates_, which weigh `total`, those that the parameters leave; what these weigh.
double Sampler::cut(const SamplingParams& p, double total) {
  if (p.typical_p < 1) keep_typical(p.typical_p, total);
  if (p.top_p < 1) keep_heaviest(p.top_p, total);
  if (p.min_p > 0) {
    float heaviest = 0;
    for (const Candidate& c : candidates_) heaviest = std::max(heaviest, c.weight);
    std::erase_if(candidates_, [&](const Candidate& c) { return c.weight < p.min_p * heaviest; });
  }
  total = 0;
  for (const Candidate& c : candidates_) total += c.weight;
  return total;
}

// What the drawn token was drawn from. Drawing itself takes shorter ways through the same cuts, so this is computed
// anew, and only for who asks.
void Sampler::tell_drawn_from(std::span<const float> logits, const SamplingParams& p, Sampled& out) {
  if (out.token < 0) return;
  const float max = kernels_.greatest(logits.data(), vocab_);
  double total = 1;
  if (p.temperature == 0) {
    candidates_.assign(1, {1, out.token});
  } else {
    const float scale = std::min(1.0f / p.temperature, 1e8f);
    if (p.top_k > 0 && p.top_k < vocab_)
      select(logits, max, size_t(p.top_k));
    else
      find_within(logits, max, 88 / scale);  // what is further away weighs nothing
    if (p.top_n_sigma > 0) {
      const float least = max - p.top_n_sigma * float(deviation(logits));
      std::erase_if(found_, [&](int32_t t) { return logits[size_t(t)] < least; });
    }
    total = cut(p, weigh(logits, max, scale));
    const bool among =
        std::any_of(candidates_.begin(), candidates_.end(), [&](const Candidate& c) { return c.token == out.token; });
    if (!among) {  // at a border that was drawn otherwise, by a rounding
      candidates_.push_back({std::exp((logits[size_t(out.token)] - max) * scale), out.token});
      total += candidates_.back().weight;
    }
  }
  auto logprob = [&](int32_t token) {
    const auto it =
        std::find_if(candidates_.begin(), candidates_.end(), [&](const Candidate& c) { return c.token == token; });
    return it == candidates_.end() ? kNever : float(std::log(double(it->weight) / total));
  };
  out.logprob = logprob(out.token);
  if (!p.logprob_token_ids.empty()) {
    for (int32_t t : p.logprob_token_ids) add_named(t, logprob(t), out.top);
    return add_named(out.token, out.logprob, out.top);
  }
  const size_t shown = std::min(candidates_.size(), size_t(std::max(0, p.logprobs)));
  std::partial_sort(candidates_.begin(), candidates_.begin() + int64_t(shown), candidates_.end(), heavier);
  for (size_t i = 0; i < shown; ++i)
    out.top.push_back({candidates_[i].token, float(std::log(double(candidates_[i].weight) / total))});
}

// Among all tokens, by the sums of their blocks; only the block that is hit is looked into.
int32_t Sampler::draw_of_all(std::span<const float> logits, float max, float scale, double target) {
  size_t block = 0, last = 0;  // rounding may leave the target past the end: then it is the last that weighs anything
  double below = 0;
  for (; block < sums_.size(); ++block) {
    if (sums_[block] > 0) last = block;
    if (below + sums_[block] > target) break;
    below += sums_[block];
  }
  if (block == sums_.size()) block = last, below = target - sums_[last];
  const int64_t first = int64_t(block) * cpu::kSumBlock, n = std::min(cpu::kSumBlock, vocab_ - first);
  weights_.resize(size_t(n));
  kernels_.exponentials(logits.data() + first, n, max, scale, weights_.data());
  int64_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (weights_[size_t(i)] == 0) continue;
    found = i;
    if ((below += weights_[size_t(i)]) > target) break;
  }
  return int32_t(first + found);
}

// Where a nucleus may have thousands of tokens, sorting or even listing them costs more than a few passes over the row.
int32_t Sampler::draw_of_many(std::span<const float> logits, const SamplingParams& p, float max, float scale, double u,
                              double all) {
  weights_.resize(size_t(vocab_));
  kernels_.exponentials(logits.data(), vocab_, max, scale, weights_.data());
  const float least = std::max(p.min_p, lightest_of(double(p.top_p) * all));  // the heaviest weighs 1
  auto kept = [least](float w) {  // without a branch, which would be foretold wrongly half the time
    return std::bit_cast<float>(std::bit_cast<uint32_t>(w) & (0u - uint32_t(w >= least)));
  };
  masses_.clear();
  double total = 0;
  for (int64_t first = 0; first < vocab_; first += cpu::kSumBlock) {
    const float* w = weights_.data() + first;
    const int64_t n = std::min<int64_t>(cpu::kSumBlock, vocab_ - first), whole = n & ~int64_t(3);
    double a = 0, b = 0, c = 0, d = 0;  // sums that do not wait for one another
    for (int64_t i = 0; i < whole; i += 4)
      a += kept(w[i]), b += kept(w[i + 1]), c += kept(w[i + 2]), d += kept(w[i + 3]);
    for (int64_t i = whole; i < n; ++i) a += kept(w[i]);
    masses_.push_back(a + b + (c + d));
    total += masses_.back();
  }
  const double target = u * total;
  double below = 0;
  size_t block = 0, last = 0;  // rounding may leave the target past the end: then it is the last that weighs anything
  for (; block < masses_.size(); ++block) {
    if (masses_[block] > 0) last = block;
    if (below + masses_[block] > target) break;
    below += masses_[block];
  }
  if (block == masses_.size()) block = last, below = target - masses_[last];
  const int64_t first = int64_t(block) * cpu::kSumBlock, end = std::min<int64_t>(vocab_, first + cpu::kSumBlock);
  int64_t found = first;
  for (int64_t i = first; i < end; ++i) {
    const float w = kept(weights_[size_t(i)]);
    if (w == 0) continue;
    found = i;
    if ((below += w) > target) break;
  }
  return int32_t(found);
}

// Of weights_, the lightest of the heaviest that together reach `wanted`. Of equal ones those of lower ids are in; the
// others become 0.
float Sampler::lightest_of(double wanted) {
  masses_.assign(kClasses, 0);
  for (const float w : weights_) masses_[class_of(w)] += double(w);
  uint32_t border = 0;
  double above = 0;
  while (border + 1 < kClasses && above + masses_[border] < wanted) above += masses_[border++];
  candidates_.clear();
  for (size_t t = 0; t < weights_.size(); ++t)
    if (class_of(weights_[t]) == border) candidates_.push_back({weights_[t], int32_t(t)});
  std::sort(candidates_.begin(), candidates_.end(), heavier);
  size_t in = 0;
  while (in < candidates_.size() && above < wanted) above += candidates_[in++].weight;
  for (size_t i = in; i < candidates_.size(); ++i) weights_[size_t(candidates_[i].token)] = 0;
  return in == 0 ? std::bit_cast<float>(kOne - (border << kClassBits)) : candidates_[in - 1].weight;
}

// Tokens whose surprise is nearest the distribution's entropy, until they hold `share` of it.
void Sampler::keep_typical(float share, double& total) {
  double entropy = 0;
  for (const Candidate& c : candidates_) entropy -= c.weight / total * std::log(c.weight / total);
  std::vector<std::pair<double, Candidate>> by;
  for (const Candidate& c : candidates_) by.push_back({std::fabs(-std::log(c.weight / total) - entropy), c});
  std::sort(by.begin(), by.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first < b.first : a.second.token < b.second.token;
  });
  candidates_.clear();
  double kept = 0;
  for (auto& [odd, c] : by) {
    candidates_.push_back(c);
    kept += c.weight;
    if (kept / total >= share) break;
  }
  total = kept;
}

// The heaviest until they hold `share` of `total`, by halving: sorting would cost more where many are needed.
void Sampler::keep_heaviest(float share, double total) {
  parted_ = candidates_;
  auto first = parted_.begin(), last = parted_.end();
  for (double wanted = double(share) * total; last - first > 1;) {
    auto middle = first + (last - first) / 2;
    std::nth_element(first, middle, last, heavier);
    double mass = 0;
    for (auto c = first; c != middle; ++c) mass += c->weight;
    if (mass >= wanted)
      last = middle;
    else
      wanted -= mass, first = middle;
  }
  std::erase_if(candidates_, [&](const Candidate& c) { return heavier(*first, c); });
}

}  // namespace kvasir::model
