// What kernels multiply: forms of 16 rows of weights (packed.h says how they lie).
#pragma once

#include <cstdint>

namespace kvasir::model::cpu {

constexpr int kGroup = 16;

enum class Packing : uint8_t {
  i4_zero,    // Q4_0 as integers of its rows
  i4_min,     // Q4_1, INT4, likewise
  i4_halves,  // likewise, for each 16
  n4_zero,    // Q4_0, exact: m = -8 d, f16 scales
  n4_min,     // Q4_1, exact: f16 scales
  n4_wide,    // INT4, exact: f32 scales
  n8_zero,    // Q8_0: m = -128 d, f16 scales
  n8_float,   // likewise, f32 scales
  n8_wide,    // at most 6 bits, f32 scales
  n8_halves,  // likewise, for each 16
  f32,
  f16,
  bf16,
  f8,  // E4M3, f32 scales
};
struct PackingInfo {
  int quant_bytes;  // of 16 rows x 32 inputs
  int scale_bytes;  // likewise
  bool quantized, halves;
  int zero;      // the integer that stands for 0, where there are no minima
  bool of_rows;  // weights are integers of their rows

  // Else float32.
  constexpr bool f16_scales() const { return !of_rows && scale_bytes / (zero == 0 ? 2 : 1) / (halves ? 2 : 1) == 32; }
};
constexpr PackingInfo packing_info(Packing p) {
  switch (p) {
    case Packing::i4_zero: return {256, 32, true, false, 8, true};
    case Packing::i4_min: return {256, 64, true, false, 0, true};
    case Packing::i4_halves: return {256, 128, true, true, 0, true};
    case Packing::n4_zero: return {256, 32, true, false, 8, false};
    case Packing::n4_min: return {256, 64, true, false, 0, false};
    case Packing::n4_wide: return {256, 128, true, false, 0, false};
    case Packing::n8_zero: return {512, 32, true, false, 128, false};
    case Packing::n8_float: return {512, 64, true, false, 128, false};
    case Packing::n8_wide: return {512, 128, true, false, 0, false};
    case Packing::n8_halves: return {512, 256, true, true, 0, false};
    case Packing::f32: return {2048, 0, false, false, 0, false};
    case Packing::f16:
    case Packing::bf16: return {1024, 0, false, false, 0, false};
    case Packing::f8: return {512, 0, false, false, 0, false};
  }
  return {};
}

}  // namespace kvasir::model::cpu
