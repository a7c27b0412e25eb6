// Plain C++: the kernels every machine runs, and what the others are tested against.
#include "core/dtype.h"
#include "model/cpu/kernels.h"

namespace kvasir::model::cpu {
namespace {

struct V {
  static constexpr int N = 16, kTile = 1;
  struct F {
    float v[16];
  };
  struct I {
    int32_t v[16];
  };
  struct W {
    const uint8_t* p;
    bool nibbles;
  };
  template <class Op>
  static F map(const Op& op) {
    F out;
    for (int i = 0; i < 16; ++i) out.v[i] = op(i);
    return out;
  }
  static F load_f(const float* p) {
    return map([&](int i) { return p[i]; });
  }
  static void store_f(float* p, const F& f) {
    for (int i = 0; i < 16; ++i) p[i] = f.v[i];
  }
  static uint16_t half_at(const uint8_t* p, int i) { return uint16_t(p[2 * i] | (p[2 * i + 1] << 8)); }
  static F load_f16(const uint8_t* p) {
    return map([&](int i) { return f16_to_f32(half_at(p, i)); });
  }
  static F load_bf16(const uint8_t* p) {
    return map([&](int i) { return bf16_to_f32(half_at(p, i)); });
  }
  static F set_f(float f) {
    return map([&](int) { return f; });
  }
  static F mul(const F& a, const F& b) {
    return map([&](int i) { return a.v[i] * b.v[i]; });
  }
  static F add(const F& a, const F& b) {
    return map([&](int i) { return a.v[i] + b.v[i]; });
  }
  static F fma(const F& a, const F& b, const F& c) {
    return map([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
  }
  static I load_i(const int32_t* p) {
    I out;
    for (int i = 0; i < 16; ++i) out.v[i] = p[i];
    return out;
  }
  static F to_float(const I& a) {
    return map([&](int i) { return float(a.v[i]); });
  }
  static W load4(const uint8_t* p) { return {p, true}; }
  static W load8(const uint8_t* p) { return {p, false}; }
  template <int bits, int zero>
  static I dot(const W& w, const int8_t* x, int first, int count, int32_t offset) {
    I out;
    for (int r = 0; r < 16; ++r) {
      int32_t sum = offset;
      for (int c = first; c < first + count; ++c)
        for (int j = 0; j < 4; ++j) {
          int byte = w.p[64 * (w.nibbles ? c % 4 : c) + 4 * r + j];
          sum += (w.nibbles ? (c < 4 ? byte & 15 : byte >> 4) : byte) * (16 * x[4 * c + j] + x[32 + 4 * c + j]);
        }
      out.v[r] = sum;
    }
    return out;
  }
};

}  // namespace
}  // namespace kvasir::model::cpu

#include "model/cpu/kernels_impl.h"

namespace kvasir::model::cpu {
const Kernels kKernelsBase = make_kernels("base");
}
