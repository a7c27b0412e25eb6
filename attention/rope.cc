#include "attention/rope.h"

#include <cmath>

#include "core/cat.h"

namespace kvasir::attention {
namespace {

constexpr double kTau = 6.283185307179586476925286766559;

Status bad(const char* field, const std::string& message) {
  return invalid_argument(cat("rope.", field, " ", message)).with_field(cat("rope.", field));
}

bool positive(double x) { return std::isfinite(x) && x > 0; }

// Wavelengths short against the trained context stay, long ones are divided, those between are blended.
double llama3(const RopeConfig& c, double frequency) {
  double wavelength = kTau / frequency, context = double(c.original_context);
  if (wavelength < context / c.high_freq_factor) return frequency;
  if (wavelength > context / c.low_freq_factor) return frequency / c.factor;
  double smooth = (context / wavelength - c.low_freq_factor) / (c.high_freq_factor - c.low_freq_factor);
  return (1 - smooth) * frequency / c.factor + smooth * frequency;
}

// The pair (as a real number) that makes `rotations` turns over the trained context.
double yarn_pair(const RopeConfig& c, double rotations) {
  return c.rotary_dim * std::log(double(c.original_context) / (rotations * kTau)) / (2 * std::log(c.base));
}

double yarn(const RopeConfig& c, double frequency, int pair) {
  double low = yarn_pair(c, c.beta_fast), high = yarn_pair(c, c.beta_slow);
  if (c.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0), high = std::min(high, double(c.rotary_dim - 1));
  if (low == high) high += 0.001;
  double ramp = std::min(std::max((pair - low) / (high - low), 0.0), 1.0);
  return frequency / c.factor * ramp + frequency * (1 - ramp);
}

double yarn_magnitude(const RopeConfig& c) {
  auto grow = [&](double m) { return c.factor <= 1 ? 1.0 : 0.1 * m * std::log(c.factor) + 1.0; };
  if (c.attention_factor != 0) return c.attention_factor;
  if (c.mscale != 0 && c.mscale_all_dim != 0) return grow(c.mscale) / grow(c.mscale_all_dim);
  return grow(1.0);
}

double longrope_magnitude(const RopeConfig& c) {
  if (c.attention_factor != 0) return c.attention_factor;
  double factor = c.configured_context > 0 ? double(c.configured_context) / double(c.original_context) : c.factor;
  return factor <= 1 ? 1.0 : std::sqrt(1 + std::log(factor) / std::log(double(c.original_context)));
}

Status check(const RopeConfig& c) {
  if (c.rotary_dim <= 0 || c.rotary_dim % 2 != 0)
    return bad("rotary_dim", cat("is ", c.rotary_dim, "; it must be even and at least 2"));
  if (!positive(c.base) || c.base == 1)
    return bad("base", cat("is ", c.base, "; it must be finite and above 0, not 1"));
  if (!positive(c.factor)) return bad("factor", cat("is ", c.factor, "; it must be finite and above 0"));
  if (!std::isfinite(c.attention_factor) || c.attention_factor < 0)
    return bad("attention_factor", cat("is ", c.attention_factor, "; it must be finite and above 0"));
  if (!(c.part >= 0 && c.part <= 1))
    return bad("partial_rotary_factor", cat("is ", c.part, "; it must be from 0 to 1"));
  bool needs_context =
      c.scaling == RopeScaling::llama3 || c.scaling == RopeScaling::yarn || c.scaling == RopeScaling::longrope;
  if (needs_context && c.original_context <= 1)
    return bad("original_max_position_embeddings", cat("is ", c.original_context, "; this scaling needs it above 1"));
  if (c.scaling == RopeScaling::llama3 &&
      !(positive(c.low_freq_factor) && std::isfinite(c.high_freq_factor) && c.high_freq_factor > c.low_freq_factor))
    return bad("high_freq_factor",
               cat("is ", c.high_freq_factor, "; it must be above low_freq_factor, which is ", c.low_freq_factor));
  if (c.scaling == RopeScaling::yarn && !(positive(c.beta_slow) && positive(c.beta_fast)))
    return bad("beta_fast", cat("is ", c.beta_fast, " and beta_slow ", c.beta_slow, "; both must be above 0"));
  if (c.scaling == RopeScaling::longrope) {
    const auto& set = c.configured_context > c.original_context ? c.long_factor : c.short_factor;
    const char* name = c.configured_context > c.original_context ? "long_factor" : "short_factor";
    if (int64_t(set.size()) != c.rotary_dim / 2)
      return bad(name, cat("has ", set.size(), " entries; it needs rotary_dim/2 = ", c.rotary_dim / 2));
    for (float f : set)
      if (!positive(f)) return bad(name, cat("holds ", f, "; every entry must be finite and above 0"));
  }
  return {};
}

}  // namespace

Result<RopeScaling> parse_rope_scaling(std::string_view type) {
  if (type == "default" || type == "none") return RopeScaling::none;
  if (type == "linear") return RopeScaling::linear;
  if (type == "llama3") return RopeScaling::llama3;
  if (type == "yarn") return RopeScaling::yarn;
  if (type == "longrope" || type == "su") return RopeScaling::longrope;
  if (type == "proportional") return RopeScaling::proportional;
  return bad("scaling.type", cat("is '", type, "'; known: default, linear, llama3, yarn, longrope, proportional"));
}

Result<Rope> rope_frequencies(const RopeConfig& c) {
  if (c.style == RopeStyle::none) return Rope{};
  KVASIR_TRY(check(c));
  Rope rope;
  rope.style = c.style;
  rope.rotary_dim = c.rotary_dim;
  for (int i = 0; i < c.rotary_dim / 2; ++i) {
    double f = std::pow(c.base, -2.0 * i / c.rotary_dim);
    switch (c.scaling) {
      case RopeScaling::none: break;
      case RopeScaling::linear: f /= c.factor; break;
      case RopeScaling::llama3: f = llama3(c, f); break;
      case RopeScaling::yarn: f = yarn(c, f, i); break;
      case RopeScaling::proportional: f = i < int(c.part * c.rotary_dim / 2) ? f / c.factor : 0; break;
      case RopeScaling::longrope:
        f /= double(c.configured_context > c.original_context ? c.long_factor[size_t(i)] : c.short_factor[size_t(i)]);
    }
    rope.inv_freq.push_back(float(f));
  }
  if (c.scaling == RopeScaling::yarn) rope.magnitude = float(yarn_magnitude(c));
  if (c.scaling == RopeScaling::longrope) rope.magnitude = float(longrope_magnitude(c));
  return rope;
}

void rope_angles(const Rope& rope, int64_t position, float* out) {
  for (size_t i = 0; i < rope.inv_freq.size(); ++i) {
    double angle = double(position) * double(rope.inv_freq[i]);
    out[2 * i] = float(std::cos(angle) * double(rope.magnitude));
    out[2 * i + 1] = float(std::sin(angle) * double(rope.magnitude));
  }
}

}  // namespace kvasir::attention
