// Element types and their exact conversions. float16 and bfloat16 round half to even; FP8 is E4M3
// (finite, saturating at 448, NaN stays NaN). Every back end must agree with these to the bit.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <string_view>

namespace kvasir {

enum class DType : uint8_t { f32, f16, bf16, f8_e4m3, i8, i4, i32, i64, u8 };

const char* dtype_name(DType type);                   // "float16"
bool parse_dtype(std::string_view name, DType* out);  // accepts float16, f16, fp16, half, ...
constexpr int dtype_bits(DType t) {
  switch (t) {
    case DType::f32:
    case DType::i32: return 32;
    case DType::i64: return 64;
    case DType::f16:
    case DType::bf16: return 16;
    case DType::i4: return 4;
    default: return 8;
  }
}
// Bytes of n elements (int4 packs two a byte; n is even there).
constexpr int64_t dtype_bytes(DType t, int64_t n) { return n * dtype_bits(t) / 8; }

inline float bf16_to_f32(uint16_t h) { return std::bit_cast<float>(uint32_t(h) << 16); }
inline uint16_t f32_to_bf16(float f) {
  uint32_t u = std::bit_cast<uint32_t>(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40);  // keep NaN a NaN
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

inline float f16_to_f32(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 1023;
  if (e == 31) return std::bit_cast<float>(sign | 0x7f800000u | (m << 13));
  if (e == 0) return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(float(m) * 0x1p-24f));
  return std::bit_cast<float>(sign | ((e + 112) << 23) | (m << 13));
}
inline uint16_t f32_to_f16(float f) {
  uint32_t u = std::bit_cast<uint32_t>(f), sign = (u >> 16) & 0x8000, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return uint16_t(sign | 0x7e00);   // NaN
  if (a >= 0x477ff000u) return uint16_t(sign | 0x7c00);  // rounds past 65504
  if (a < 0x38800000u) {                                 // subnormal: scale and round once
    float scaled = std::bit_cast<float>(a) + 0.5f;       // ulp of [0.5,1) is 2^-24
    return uint16_t(sign | (std::bit_cast<uint32_t>(scaled) - 0x3f000000u));
  }
  return uint16_t(sign | ((a - 0x38000000u + 0xfffu + ((a >> 13) & 1)) >> 13));
}

inline float e4m3_to_f32(uint8_t b) {
  uint32_t sign = uint32_t(b & 0x80) << 24, e = (b >> 3) & 15, m = b & 7;
  if (e == 15 && m == 7) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (e == 0) return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(float(m) * 0x1p-9f));
  return std::bit_cast<float>(sign | ((e + 120) << 23) | (m << 20));
}
inline uint8_t f32_to_e4m3(float f) {
  uint32_t u = std::bit_cast<uint32_t>(f), a = u & 0x7fffffffu;
  uint8_t sign = uint8_t((u >> 24) & 0x80);
  if (a > 0x7f800000u) return uint8_t(sign | 0x7f);     // NaN
  if (a >= 0x43e00000u) return uint8_t(sign | 0x7e);    // 448 and beyond saturate
  if (a < 0x3c800000u) {                                // below 2^-6: subnormal, step 2^-9
    float scaled = std::bit_cast<float>(a) + 16384.0f;  // ulp of [2^14,2^15) is 2^-9
    return uint8_t(sign | (std::bit_cast<uint32_t>(scaled) - 0x46800000u));
  }
  uint32_t r = (a - 0x3c000000u + 0x7ffffu + ((a >> 20) & 1)) >> 20;
  return uint8_t(sign | (r > 0x7e ? 0x7e : r));
}

}  // namespace kvasir
