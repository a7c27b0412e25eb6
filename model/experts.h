// A mixture of experts: an MLP that is many, of which a router chooses a few for each token.
#pragma once

#include <cstdint>
#include <vector>

#include "core/status.h"

namespace kvasir::model {

// What an expert's score is: its softmax among all, its softmax among the chosen ones, or the sigmoid of its logit.
enum class ExpertScores : uint8_t { softmax, of_chosen, sigmoid };

struct Routing {
  int32_t experts = 0;  // 0: there is one MLP
  int32_t used = 0;     // by a token
  ExpertScores scores_of = ExpertScores::softmax;
  bool normalized = false;  // the chosen ones' scores are made to sum to 1
  bool corrected = false;   // a number an expert is added to its score where they are chosen, and only there
  uint8_t group_best = 2;   // one or two
  float scale = 1;          // of what is added up
  int32_t groups = 1;       // of experts that follow one another; chosen is among the `used_groups` best groups,
  int32_t used_groups = 1;  // by the sum of the best `group_best` scores in each

  // The experts of one row by falling score, and what each counts. Of equal ones the first; NaN is chosen last.
  // `correction` is null where there is none.
  void choose(const float* logits, const float* correction, int32_t* chosen, float* weights) const;
};

struct ExpertsConfig {
  Routing routing;
  int32_t ffn = 0;           // of each
  int32_t shared_ffn = 0;    // of an MLP that every token has beside them; 0: none
  bool shared_gate = false;  // which counts as the sigmoid of its gate
  bool router_bias = false, bias = false;
  bool scaled = false;    // each has a number that its part of the sum is multiplied by
  bool by_turns = false;  // files have gates and what they open row by row, where one tensor holds both
  // 0: their MLPs are the model's. Else (clamp(up) + 1) * g * sigmoid(slope * g), up clamped within +-limit and g, the
  // gate, at limit.
  float limit = 0, slope = 1.702f;
  std::vector<bool> dense;  // layers that have one MLP; empty: none

  bool in_layer(int32_t layer) const { return routing.experts > 0 && (dense.empty() || !dense[size_t(layer)]); }
  Status validate(int32_t layers) const;
};

}  // namespace kvasir::model
