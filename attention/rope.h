// Rotary frequencies, made once on the host in double: rope_frequencies() turns a model's scaling rule
// into the plain table (Rope::inv_freq, Rope::magnitude) that every back end reads.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/params.h"
#include "core/status.h"

namespace kvasir::attention {

enum class RopeScaling : uint8_t { none, linear, llama3, yarn, longrope, proportional };

struct RopeConfig {
  RopeStyle style = RopeStyle::neox;
  int32_t rotary_dim = 0;
  double base = 10000.0;
  RopeScaling scaling = RopeScaling::none;
  double factor = 1.0;             // linear, llama3, yarn, proportional; longrope when attention_factor is absent
  double part = 1.0;               // proportional: of the pairs are rotated, the first ones
  int64_t original_context = 0;    // what the model was trained on: llama3, yarn, longrope
  int64_t configured_context = 0;  // longrope: chooses the long set once, when above original_context
  double low_freq_factor = 1.0;    // llama3
  double high_freq_factor = 4.0;   // llama3
  double beta_fast = 32.0;         // yarn
  double beta_slow = 1.0;          // yarn
  bool truncate = true;            // yarn: the ramp begins and ends at whole pairs
  double attention_factor = 0.0;   // yarn, longrope: cos and sin are multiplied by it; 0: the rule's own
  double mscale = 0.0;             // yarn: magnitude = g(mscale) / g(mscale_all_dim) when both are set
  double mscale_all_dim = 0.0;
  std::vector<float> short_factor, long_factor;  // longrope, rotary_dim / 2 each
};

Result<Rope> rope_frequencies(const RopeConfig& config);
Result<RopeScaling> parse_rope_scaling(std::string_view type);  // "default", "linear", ..., "proportional"

// cos and sin of `position` for each pair, times the magnitude: out[2*i] and out[2*i+1].
void rope_angles(const Rope& rope, int64_t position, float* out);

}  // namespace kvasir::attention
