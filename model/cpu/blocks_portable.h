// Blocks of weights in plain C++: what the others are tested against, and the list of what they have.
#pragma once

#include "model/cpu/kernels.h"
#include "simd/portable.h"

namespace kvasir::model::cpu {
namespace {

struct Blocks {
  static constexpr int kTile = 1, kAhead = 1, kLocality = 3;
  static constexpr bool kMakesBlocks = false;
  struct I {
    int32_t v[simd::W];
  };
  struct W {
    const uint8_t* p;
  };
  template <class Op>
  static I each(const Op& op) {
    I out;
    for (int i = 0; i < simd::W; ++i) out.v[i] = op(i);
    return out;
  }
  static uint16_t half_at(const uint8_t* p, int i) { return uint16_t(p[2 * i] | (p[2 * i + 1] << 8)); }
  static I load_i(const int32_t* p) {
    I out;
    __builtin_memcpy(out.v, p, sizeof out.v);
    return out;
  }
  static void store_i(uint8_t* p, const I& a) { __builtin_memcpy(p, a.v, sizeof a.v); }
  static I all(int32_t v) {
    return each([=](int) { return v; });
  }
  static I bytes(const uint8_t* p) {
    return each([&](int i) { return int32_t(p[i]); });
  }
  // Half to even, of less than 2^22.
  static I rounded(const simd::V& a) {
    return each([&](int i) { return __builtin_bit_cast(int32_t, a.x[i] + 12582912.0f) - 0x4b400000; });
  }
  static simd::V as_float(const I& a) {
    return simd::each([&](int i) { return __builtin_bit_cast(float, a.v[i]); });
  }
  // E4M3 of 16 rows, two neighbours of each, times 2^-8; codes of no numbers are taken for those they would be.
  static void two_e4m3(const uint8_t* p, simd::V* first, simd::V* second) {
    auto small = [](uint32_t b) { return simd::half_to_float((b & 0x7fu) << 7 | (b & 0x80u) << 8); };
    for (int i = 0; i < 16 / simd::W; ++i, p += 2 * simd::W) {
      first[i] = simd::each([&](int j) { return small(p[2 * j]); });
      second[i] = simd::each([&](int j) { return small(p[2 * j + 1]); });
    }
  }
  static I look_up(const uint8_t* values, const I& codes) {
    return each([&](int i) {
      const auto four = uint32_t(codes.v[i]);
      return int32_t(values[four & 15] | uint32_t(values[four >> 8 & 15]) << 8 |
                     uint32_t(values[four >> 16 & 15]) << 16 | uint32_t(values[four >> 24]) << 24);
    });
  }
  static simd::V to_float(const I& a) {
    return simd::each([&](int i) { return float(a.v[i]); });
  }
  static W load4(const uint8_t* p) { return {p}; }
  static W load8(const uint8_t* p) { return {p}; }
  template <int bits, int zero>
  static I dot(const W& w, const int8_t* x, int first, int count, int32_t offset) {
    I out;
    for (int r = 0; r < simd::W; ++r) {
      int32_t sum = offset;
      for (int c = first; c < first + count; ++c)
        for (int j = 0; j < 4; ++j) {
          sum += w.p[64 * c + 4 * r + j] * (16 * x[4 * c + j] + x[32 + 4 * c + j]);
        }
      out.v[r] = sum;
    }
    return out;
  }
  struct Pair {
    I d, m;
  };
  static I zero_i() {
    return each([](int) { return 0; });
  }
  static I add_i(const I& a, const I& b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
  }
  static I and_i(const I& a, int32_t mask) {
    return each([&](int i) { return a.v[i] & mask; });
  }
  template <int n>
  static I left(const I& a) {
    return each([&](int i) { return int32_t(uint32_t(a.v[i]) << n); });
  }
  template <int n>
  static I right(const I& a) {
    return each([&](int i) { return a.v[i] >> n; });
  }
  template <Packing P>
  static Pair load_pair(const uint8_t* p, int half, int part) {
    auto at = [&](int i) { return int32_t(int16_t(half_at(p, i))); };
    const int row = part * simd::W;
    if constexpr (packing_info(P).zero != 0) return {each([&](int i) { return at(row + i); }), zero_i()};
    return {each([&](int i) { return at(32 * half + 2 * (row + i)); }),
            each([&](int i) { return at(32 * half + 2 * (row + i) + 1); })};
  }
  template <bool zero>
  static void add_products(const W& w, const int8_t* x, int first, int count, const int32_t* sums, const Pair& pair,
                           I& high, I& low) {
    for (int r = 0; r < simd::W; ++r) {
      int32_t h = sums[0], l = sums[1];
      for (int c = first; c < first + count; ++c)
        for (int j = 0; j < 4; ++j) {
          const int byte = w.p[64 * (c % 4) + 4 * r + j], q = c < 4 ? byte & 15 : byte >> 4;
          h += q * x[4 * c + j], l += q * x[32 + 4 * c + j];
        }
      high.v[r] += pair.d.v[r] * h + pair.m.v[r] * (sums[2] >> 16);
      low.v[r] += pair.d.v[r] * l + pair.m.v[r] * (sums[3] >> 16);
    }
  }
};

}  // namespace
}  // namespace kvasir::model::cpu
