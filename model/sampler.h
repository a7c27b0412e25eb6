// One row of logits becomes one token, on the host. The order is the usual one: bias, (log-probabilities
// are of this), penalties, mask, temperature, top-k, typical-p, top-p, min-p, draw.
#pragma once

#include <span>
#include <vector>

#include "model/sampling.h"

namespace kvasir::model {

class Sampler {  // one a thread: it keeps scratch memory
 public:
  explicit Sampler(int32_t vocab) : vocab_(vocab) {}
  // The row is changed in place.
  Sampled sample(std::span<float> logits, const SampleRow& row);

 private:
  void penalize(std::span<float> logits, const SampleRow& row);
  int32_t greedy(std::span<const float> logits) const;
  int32_t draw(std::span<const float> logits, const SampleRow& row);

  int32_t vocab_;
  std::vector<int32_t> counts_, seen_;
  std::vector<float> weights_;
  std::vector<int32_t> order_;
};

}  // namespace kvasir::model
