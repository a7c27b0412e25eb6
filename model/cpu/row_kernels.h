// What kernels do with one row of floats: norms, activations, and what drawing a token looks for. Built once for each
// instruction set, written in plain loops over 16 lanes that every compiler turns into vectors.
#pragma once

#include "model/cpu/kernels.h"

// NOLINTBEGIN(misc-definitions-in-headers): each unit is to have its own.
namespace kvasir::model::cpu {
namespace {

inline uint32_t bits_of(float f) { return __builtin_bit_cast(uint32_t, f); }
inline float float_of(uint32_t u) { return __builtin_bit_cast(float, u); }
inline float fma1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

void norm(const float* x, const float* weight, int64_t cols, float eps, bool add, float* out) {
  float lanes[16] = {};
  int64_t whole = cols & ~int64_t(15);
  for (int64_t i = 0; i < whole; i += 16)
    for (int j = 0; j < 16; ++j) lanes[j] = fma1(x[i + j], x[i + j], lanes[j]);
  for (int64_t i = whole; i < cols; ++i) lanes[i - whole] = fma1(x[i], x[i], lanes[i - whole]);
  for (int step = 8; step > 0; step /= 2)
    for (int j = 0; j < step; ++j) lanes[j] += lanes[j + step];
  float scale = 1.0f / __builtin_sqrtf(lanes[0] / float(cols) + eps);
  if (add)
    for (int64_t i = 0; i < cols; ++i) out[i] = out[i] + x[i] * scale * weight[i];
  else
    for (int64_t i = 0; i < cols; ++i) out[i] = x[i] * scale * weight[i];
}

// exp to about 1 ulp for x in [-87, 88]; below, 0 within 1e-38. NaN stays NaN.
inline float exp1(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  float shifted = fma1(x, 1.44269504f, 12582912.0f), n = shifted - 12582912.0f;
  float f = fma1(n, -0.693145752f, x);
  f = fma1(n, -1.42860677e-6f, f);
  float p = 1.98412698e-4f;
  p = fma1(p, f, 1.38888889e-3f);
  p = fma1(p, f, 8.33333333e-3f);
  p = fma1(p, f, 4.16666667e-2f);
  p = fma1(p, f, 1.66666667e-1f);
  p = fma1(p, f, 0.5f);
  p = fma1(p, f, 1.0f);
  p = fma1(p, f, 1.0f);
  return p * float_of((bits_of(shifted) - 0x4b400000u + 127u) << 23);
}

void silu(const float* gate, const float* up, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = gate[i] / (1.0f + exp1(-gate[i])) * up[i];
}

// x * (1 + tanh(u)) / 2 == x / (1 + exp(-2u)), u = sqrt(2/pi) * (x + 0.044715 x^3)
void gelu(const float* gate, const float* up, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    float x = gate[i], u2 = 1.59576912f * x * fma1(0.044715f * x, x, 1.0f);
    out[i] = x / (1.0f + exp1(-u2)) * up[i];
  }
}

// Floats as integers of the same order.
inline int32_t rank_of(float f) {
  const auto bits = int32_t(bits_of(f));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

// By integers, since compilers may not take floats out of their order.
float greatest(const float* x, int64_t n) {
  int32_t most = rank_of(-__builtin_inff()), widest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t rank = rank_of(x[i]), wide = int32_t(bits_of(x[i]) & 0x7fffffffu);
    most = rank > most ? rank : most;
    widest = wide > widest ? wide : widest;
  }
  return widest >= 0x7f800000 ? __builtin_nanf("") : float_of(uint32_t(most ^ ((most >> 31) & 0x7fffffff)));
}

// Whole blocks are passed over together: what is looked for is rare.
template <class Hit, class Take>
void scan(const float* x, int64_t n, const Hit& hit, const Take& take) {
  constexpr int64_t kBlock = 64;
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    uint32_t any = 0;
    for (int64_t j = 0; j < kBlock; ++j) any |= uint32_t(hit(x[i + j]));
    if (!any) continue;
    for (int64_t j = i; j < i + kBlock; ++j)
      if (hit(x[j]) && !take(j)) return;
  }
  for (; i < n; ++i)
    if (hit(x[i]) && !take(i)) return;
}

int64_t find(const float* x, int64_t n, float value) {
  int64_t found = n;
  scan(
      x, n, [value](float v) { return v == value; },
      [&](int64_t i) {
        found = i;
        return false;
      });
  return found;
}

int64_t at_least(const float* x, int64_t n, float least, int32_t* out) {
  int64_t count = 0;
  scan(
      x, n, [least](float v) { return v >= least; },
      [&](int64_t i) {
        out[count++] = int32_t(i);
        return true;
      });
  return count;
}

inline float scaled_exp(float x, float shift, float scale) {
  // A choice between two floats by what exp1() compares, too, would be a jump in gcc's eyes, and no vectors.
  const float v = (x - shift) * scale;
  return float_of(bits_of(exp1(v)) & (uint32_t(v < -87.0f) - 1u));
}

void exponential_sums(const float* x, int64_t n, float shift, float scale, float* sums) {
  for (int64_t begin = 0; begin < n; begin += kSumBlock, ++sums) {
    int64_t end = begin + kSumBlock < n ? begin + kSumBlock : n, whole = begin + ((end - begin) & ~int64_t(15));
    float lanes[16] = {};
    for (int64_t i = begin; i < whole; i += 16)
      for (int j = 0; j < 16; ++j) lanes[j] += scaled_exp(x[i + j], shift, scale);
    for (int64_t i = whole; i < end; ++i) lanes[i - whole] += scaled_exp(x[i], shift, scale);
    for (int step = 8; step > 0; step /= 2)
      for (int j = 0; j < step; ++j) lanes[j] += lanes[j + step];
    *sums = lanes[0];
  }
}

void exponentials(const float* x, int64_t n, float shift, float scale, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = scaled_exp(x[i], shift, scale);
}

}  // namespace
}  // namespace kvasir::model::cpu
// NOLINTEND(misc-definitions-in-headers)
