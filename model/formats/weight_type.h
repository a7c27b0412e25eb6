// How weights lie in files. Every quantized type here is seen as one thing: 32 weights with unsigned
// integers q and, for each half of 16, a scale d and an offset m: w = fma(d, q, m), which rounds
// exactly as the formats' own definitions do.
#pragma once

#include <cstdint>
#include <string_view>

namespace kvasir::model {

// The numbers are GGUF's.
enum class WeightType : uint32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q2_k = 10,
  q3_k = 11,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  iq4_nl = 20,
  iq4_xs = 23,
  bf16 = 30,
  mxfp4 = 39,
  // No types of GGUF, but of safetensors:
  nvfp4 = 58,  // before 32 numbers of E2M1: a float32 for all of the tensor, an E4M3 for each 16, two bytes of nothing
  int4 = 59,   // what int4.h makes of words of 4 bits
  i64 = 60,    // these three are parts of other tensors
  i32 = 61,
  u8 = 62,
  f8_e4m3 = 63,  // with scales beside it
};

struct TypeInfo {
  std::string_view name;
  int32_t block;    // weights in a block
  int32_t bytes;    // of a block
  bool quantized;   // unpack32 knows it
  uint8_t bits;     // of q: at most 4 fits a nibble
  int16_t zero;     // m == -zero * d in every block; -1: m is free
  bool halves;      // the two halves of 32 differ in d and m
  bool f16_scales;  // d and m are float16 values
};
constexpr bool of_gguf(WeightType type) { return type < WeightType::nvfp4; }
constexpr bool part_of_others(WeightType type) { return type >= WeightType::i64 && type <= WeightType::u8; }
const TypeInfo* type_info(WeightType type);  // null: not one we read

struct Unpacked {
  uint8_t q[32];
  float d[2], m[2];
  // As they stand in the file: float16 d and m of the block, and in types of 256 what multiplies them for each half,
  // d = of_d * scale, m = -(of_m * min). Of MXFP4 scale[0] is the exponent's byte; of NVFP4 they are those of E4M3, and
  // d is of_row times the number.
  uint16_t of_d, of_m;
  int8_t scale[2], min[2];
  float of_row;
};
// Weights [32*i, 32*i+32) of a row of blocks.
void unpack32(WeightType type, const uint8_t* row, int64_t i, Unpacked* out);

// n weights of a row, from its start; n is a multiple of the type's block.
void dequantize(WeightType type, const uint8_t* row, int64_t n, float* out);

}  // namespace kvasir::model
