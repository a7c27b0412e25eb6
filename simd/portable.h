// Eight lanes in plain C++, which any compiler makes into the vectors of the baseline it builds for. The list of what
// an instruction set has to offer: each file beside this one has the same operations.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace kvasir::simd {
namespace {

constexpr int W = 8;
constexpr int kRegisters = 8;  // some become memory
#define KVASIR_SIMD_HALF_COLUMNS 0

struct V {
  float x[W];
};
template <class F>
inline V each(const F& f) {
  V v;
  for (int i = 0; i < W; ++i) v.x[i] = f(i);
  return v;
}
inline V load(const float* p) {
  V v;
  __builtin_memcpy(v.x, p, sizeof v.x);
  return v;
}
inline void store(float* p, V v) { __builtin_memcpy(p, v.x, sizeof v.x); }
inline V set1(float x) {
  return each([=](int) { return x; });
}
inline V hold(V x) { return x; }
inline V load_first(int n, const float* p) {
  float lanes[W] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
inline void store_first(int n, float* p, V x) {
  float lanes[W];
  store(lanes, x);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}
inline V zero() { return set1(0); }
inline V add(V a, V b) {
  return each([&](int i) { return a.x[i] + b.x[i]; });
}
inline V sub(V a, V b) {
  return each([&](int i) { return a.x[i] - b.x[i]; });
}
inline V mul(V a, V b) {
  return each([&](int i) { return a.x[i] * b.x[i]; });
}
inline V div_v(V a, V b) {
  return each([&](int i) { return a.x[i] / b.x[i]; });
}
inline V fma_v(V a, V b, V c) {
  return each([&](int i) { return a.x[i] * b.x[i] + c.x[i]; });
}
// With one rounding, whatever that costs; fma_v is with one where there is an instruction for it.
inline V fused(V a, V b, V c) {
  return each([&](int i) { return __builtin_fmaf(a.x[i], b.x[i], c.x[i]); });
}
inline V max_v(V a, V b) {
  return each([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; });
}
inline V min_v(V a, V b) {
  return each([&](int i) { return a.x[i] < b.x[i] ? a.x[i] : b.x[i]; });
}
inline V abs_v(V a) {
  return each([&](int i) { return __builtin_fabsf(a.x[i]); });
}
// x * 2^n, n in the low bits of what exp2_v rounded.
inline V add_exponent(V x, V n) {
  return each([&](int i) {
    return __builtin_bit_cast(float,
                              __builtin_bit_cast(uint32_t, x.x[i]) + (__builtin_bit_cast(uint32_t, n.x[i]) << 23));
  });
}
inline V two_halves(float low, float) { return set1(low); }  // no vector holds two groups
inline V zero_below(V a, V limit, V x) {
  return each([&](int i) { return a.x[i] < limit.x[i] ? 0.0f : x.x[i]; });
}
inline V select_ge(V a, V b, V yes, V no) {
  return each([&](int i) { return a.x[i] >= b.x[i] ? yes.x[i] : no.x[i]; });
}
inline V iota() {
  return each([](int i) { return float(i); });
}
inline float first(V a) { return a.x[0]; }
// Lane i is the 8 floats of row i folded by `both`, halves first.
template <class F>
inline V fold_rows(const float* rows, const F& both) {
  auto column = [rows](int lane) { return each([&](int i) { return rows[i * W + lane]; }); };
  auto quarter = [&](int lane) {
    return both(both(column(lane), column(lane + 4)), both(column(lane + 2), column(lane + 6)));
  };
  return both(quarter(0), quarter(1));
}

inline float half_to_float(uint32_t h) {
  uint32_t sign = (h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 1023;
  if (e == 31) return __builtin_bit_cast(float, sign | 0x7f800000u | (m << 13));
  if (e == 0) return __builtin_bit_cast(float, sign | __builtin_bit_cast(uint32_t, float(m) * 0x1p-24f));
  return __builtin_bit_cast(float, sign | ((e + 112) << 23) | (m << 13));
}
inline uint16_t float_to_half(float f) {
  uint32_t u = __builtin_bit_cast(uint32_t, f), sign = (u >> 16) & 0x8000, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return uint16_t(sign | 0x7e00);
  if (a >= 0x477ff000u) return uint16_t(sign | 0x7c00);
  if (a < 0x38800000u)
    return uint16_t(sign | (__builtin_bit_cast(uint32_t, __builtin_bit_cast(float, a) + 0.5f) - 0x3f000000u));
  return uint16_t(sign | ((a - 0x38000000u + 0xfffu + ((a >> 13) & 1)) >> 13));
}
inline float f16_scalar(const uint8_t* p) {
  uint16_t h;
  __builtin_memcpy(&h, p, 2);
  return half_to_float(h);
}
inline V load_f16(const uint8_t* p) {
  return each([&](int i) { return f16_scalar(p + 2 * i); });
}
inline V load_bf16(const uint8_t* p) {
  return each([&](int i) {
    uint16_t h;
    __builtin_memcpy(&h, p + 2 * i, 2);
    return __builtin_bit_cast(float, uint32_t(h) << 16);
  });
}
inline V load_i8(const uint8_t* p) {
  return each([&](int i) { return float(int8_t(p[i])); });
}
inline V load_i4(const uint8_t* p) {
  return each([&](int i) {
    int nibble = i & 1 ? p[i / 2] >> 4 : p[i / 2] & 15;
    return float(nibble >= 8 ? nibble - 16 : nibble);
  });
}
inline float e4m3_scalar(uint32_t b) {
  uint32_t low = b & 0x7fu, sign = (b & 0x80u) << 8;
  return half_to_float(low == 0x7f ? sign | 0x7e00 : sign | (low << 7)) * 256.0f;
}
inline V load_e4m3(const uint8_t* p) {
  return each([&](int i) { return e4m3_scalar(p[i]); });
}
inline void store_f16(uint8_t* p, V v) {
  uint16_t h[W];
  for (int i = 0; i < W; ++i) h[i] = float_to_half(v.x[i]);
  __builtin_memcpy(p, h, sizeof h);
}
inline void store_bf16(uint8_t* p, V v) {
  uint16_t h[W];
  for (int i = 0; i < W; ++i) {
    uint32_t u = __builtin_bit_cast(uint32_t, v.x[i]);
    h[i] =
        (u & 0x7fffffffu) > 0x7f800000u ? uint16_t((u >> 16) | 0x40) : uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
  }
  __builtin_memcpy(p, h, sizeof h);
}
struct Words {
  uint32_t x[W];
};
inline Words load_some(const uint8_t* p, int bytes) {
  Words w = {};
  __builtin_memcpy(w.x, p, size_t(bytes));
  return w;
}
inline Words load_words(const uint8_t* p) { return load_some(p, W * 4); }
inline void store_words(uint32_t* p, const Words& w) { __builtin_memcpy(p, w.x, sizeof w.x); }
inline void transpose(Words r[W]) {
  for (int i = 0; i < W; ++i)
    for (int j = 0; j < i; ++j) {
      const uint32_t x = r[i].x[j];
      r[i].x[j] = r[j].x[i];
      r[j].x[i] = x;
    }
}
template <DType kType, int kElement>
inline V element_of(const Words& w) {
  return each([&](int i) {
    const uint32_t x = w.x[i];
    if constexpr (kType == DType::f16) return half_to_float(x >> (16 * kElement) & 0xffff);
    if constexpr (kType == DType::bf16) return __builtin_bit_cast(float, x >> (16 * kElement) << 16);
    if constexpr (kType == DType::i8) return float(int8_t(x >> (8 * kElement)));
    if constexpr (kType == DType::i4) return float(int32_t(x << (28 - 4 * kElement)) >> 28);
    if constexpr (kType == DType::f8_e4m3) return e4m3_scalar(x >> (8 * kElement) & 0xff);
    return __builtin_bit_cast(float, x);
  });
}

}  // namespace
}  // namespace kvasir::simd
