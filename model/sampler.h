// One row of logits becomes one token, on the host. The order is the usual one: bias, (log-probabilities
// are of this), penalties, mask, temperature, top-k, typical-p, top-p, min-p, draw (or, where that is asked, of this).
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "model/cpu/kernels.h"
#include "model/sampling.h"

namespace kvasir::model {

class Sampler {  // one a thread: it keeps scratch memory
 public:
  explicit Sampler(int32_t vocab) : vocab_(vocab) {}
  // A draw that a constraint refused, to be repeated when its mask is there.
  struct Refused {
    int64_t row = 0;  // the caller's
    float normalizer = 0;
    std::vector<std::pair<int32_t, float>> changed;
  };
  // The row is changed in place. False: its constraint refused the draw and has no mask yet.
  bool sample(std::span<float> logits, const SampleRow& row, Sampled& out, Refused& refused);
  // The same row again, as it was left; `out.late` when the mask is still not there.
  void sample_again(std::span<float> logits, const SampleRow& row, const Refused& refused, Sampled& out);

 private:
  struct Candidate {
    float weight;  // of the most likely token: 1
    int32_t token;
  };
  static bool heavier(const Candidate& a, const Candidate& b) {
    return a.weight != b.weight ? a.weight > b.weight : a.token < b.token;
  }
  bool draw_allowed(std::span<float> logits, const SampleRow& row, Sampled& out);
  int32_t choose(std::span<const float> logits, const SampleRow& row, float max, double sum, uint32_t nth);
  void penalize(std::span<float> logits, const SampleRow& row);
  void forbid(std::span<float> logits, const SampleRow& row);
  void apply(const uint32_t* mask, std::span<float> logits) const;
  double sum_exponentials(std::span<const float> logits, float max, float scale);  // by block in sums_
  void find_within(std::span<const float> logits, float max, float reach);
  void select(std::span<const float> logits, float max, size_t k);
  double weigh(std::span<const float> logits, float max, float scale);
  int32_t draw(std::span<const float> logits, const SampleRow& row, float max, double sum, uint32_t nth);
  double cut(const SamplingParams& p, double total);
  void tell_drawn_from(std::span<const float> logits, const SamplingParams& p, Sampled& out);
  int32_t draw_of_all(std::span<const float> logits, float max, float scale, double target);
  int32_t draw_of_many(std::span<const float> logits, const SamplingParams& p, float max, float scale, double u,
                       double all);
  float lightest_of(double wanted);
  void keep_typical(float share, double& total);
  void keep_heaviest(float share, double total);

  int32_t vocab_;
  const cpu::Kernels& kernels_ = cpu::best_kernels();
  std::vector<int32_t> counts_;                     // by token, zero between rows
  std::vector<std::pair<int32_t, float>> changed_;  // by penalties: the token and what its logit was
  std::vector<int32_t> ids_, found_;
  std::vector<float> sums_, weights_;
  std::vector<double> masses_;
  std::vector<Candidate> candidates_, parted_;
};

}  // namespace kvasir::model
