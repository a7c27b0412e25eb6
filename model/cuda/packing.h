// How quantized weights lie on the device: blocks of 8 rows by 128 elements, those of two strips of rows that are
// multiplied together side by side: one run of bytes, which the copy engine moves as it is. These are strips 2 * i and
// 2 * i + 1, or strip i of a gate and of what it lets through. Within a block elements lie where the lane that
// multiplies them reads 16 bytes at once: lane 4 * g + t has row g.
//
// q4, q8: elements 32 * j + 8 * t + (0..7) of each group j of 32.
//   q4: [row][t][j] words of 8 nibbles, elements 0 2 4 6 1 3 5 7 from the lowest; then [row][j] d, m: w = d * q + m
//   q4_128: the same words; then [row] d, m of all 128
//   q8: [j / 2][row][t][j % 2] words of 4 bytes twice; then [row][j] d: w = d * (q - 128)
// q6: elements 16 * j + 4 * t + (0..3) of each group j of 16, w = d * q + m.
//   [row][t][j / 2] words of 8 nibbles: elements 0 2 of group j, 0 2 of j + 1, then 1 3 and 1 3;
//   [row][t][j / 4] words of their two high bits: 16 bits of even elements, then of odd ones; then [row][j] d, m
// e4m3: as q8, numbers of 8 bits; then [row] a float32 that all 128 are multiplied by.
// d and m are float16, in units of a float32 of the whole matrix.
#pragma once

#include <cstdint>

namespace kvasir::model::cuda {

#ifdef __CUDACC__
#define KVASIR_BOTH __host__ __device__ inline
#else
#define KVASIR_BOTH inline
#endif

// mxfp4: as files have it, for experts to cut up.
enum class Packing : uint8_t { bf16, fp8, q4, q4_128, q6, q8, e4m3, mxfp4 };

constexpr int kBlockRows = 8, kBlockElements = 128;

KVASIR_BOTH constexpr bool is_nibbles(Packing p) { return p == Packing::q4 || p == Packing::q4_128; }
// Whether m is added.
KVASIR_BOTH constexpr bool has_offset(Packing p) { return is_nibbles(p) || p == Packing::q6; }
// Elements that share d and m.
KVASIR_BOTH constexpr int group_elements(Packing p) {
  return p == Packing::q4_128 || p == Packing::e4m3 ? kBlockElements : p == Packing::q6 ? 16 : 32;
}
// Of a row.
KVASIR_BOTH constexpr int quant_bytes(Packing p) { return is_nibbles(p) ? 64 : p == Packing::q6 ? 96 : 128; }
KVASIR_BOTH constexpr int scale_bytes(Packing p) {
  return kBlockElements / group_elements(p) * (p == Packing::q8 ? 2 : 4);
}
KVASIR_BOTH constexpr int block_bytes(Packing p) { return kBlockRows * (quant_bytes(p) + scale_bytes(p)); }
KVASIR_BOTH constexpr int64_t block_count(int64_t cols) { return (cols + kBlockElements - 1) / kBlockElements; }
KVASIR_BOTH constexpr bool is_blocks(Packing p) { return has_offset(p) || p == Packing::q8 || p == Packing::e4m3; }

// Where a strip's block is, of so many steps of 128 elements. `half`: the strips of a gate, 0 where there is none.
KVASIR_BOTH int64_t block_at(int64_t strip, int64_t step, int64_t steps, int64_t half) {
  if (half > 0) strip = strip < half ? 2 * strip : 2 * (strip - half) + 1;
  return (strip / 2 * steps + step) * 2 + strip % 2;
}

// Eight nibbles of a group, in the order above.
KVASIR_BOTH uint32_t nibble_word(const uint8_t* q) {
  uint32_t w = 0;
  for (int i = 0; i < 4; ++i) w |= (uint32_t(q[2 * i]) | uint32_t(q[2 * i + 1]) << 16) << 4 * i;
  return w;
}

// A number of E4M3; the bias of its exponent comes by a product that is exact.
KVASIR_BOTH float e4m3_number(uint8_t b) {
  union {
    uint32_t bits;
    float number;
  } u;
  u.bits = uint32_t(b & 0x80) << 24 | uint32_t(b & 0x7f) << 20;
  return u.number * 0x1p120f;
}

// 32 integers of row r of a block that is zero there, from element 32 * j on; d and m of each half of them, as the bits
// of float16. Those of e4m3 are the lower and the upper half of its float32.
KVASIR_BOTH void pack32(Packing p, uint8_t* block, int r, int j, const uint8_t* q, const uint16_t* d,
                        const uint16_t* m) {
  auto word = [](uint8_t* at) -> uint32_t& { return *reinterpret_cast<uint32_t*>(at); };
  auto half = [](uint8_t* at) -> uint16_t& { return *reinterpret_cast<uint16_t*>(at); };
  uint8_t* scales = block + kBlockRows * quant_bytes(p) + r * scale_bytes(p);
  for (int t = 0; t < 4; ++t) {
    uint8_t* lane = block + r * 64 + t * 16;
    if (is_nibbles(p)) {
      word(lane + j * 4) = nibble_word(q + 8 * t);
    } else if (!has_offset(p)) {
      for (int i = 0; i < 8; ++i) lane[j / 2 * kBlockRows * 64 + j % 2 * 8 + i] = q[8 * t + i];
    } else {
      uint8_t low[8], high[8];  // elements of both groups of 16
      for (int i = 0; i < 8; ++i) {
        const int v = q[i / 4 * 16 + t * 4 + i % 4];
        low[i] = uint8_t(v & 15), high[i] = uint8_t(v >> 4);
      }
      word(lane + j * 4) = nibble_word(low);
      uint32_t bits = 0;
      for (int i = 0; i < 4; ++i) bits |= (uint32_t(high[2 * i]) | uint32_t(high[2 * i + 1]) << 16) << 2 * i;
      word(block + kBlockRows * 64 + r * 32 + t * 8 + j / 2 * 4) |= bits << j % 2 * 8;
    }
  }
  if (p == Packing::e4m3) {
    half(scales) = d[0], half(scales + 2) = m[0];
  } else if (p == Packing::q8) {
    half(scales + 2 * j) = d[0];
  } else if (is_nibbles(p)) {  // those of a q4_128 are the same for each j
    const int at = p == Packing::q4 ? 4 * j : 0;
    half(scales + at) = d[0], half(scales + at + 2) = m[0];
  } else {
    for (int h = 0; h < 2; ++h) half(scales + 8 * j + 4 * h) = d[h], half(scales + 8 * j + 4 * h + 2) = m[h];
  }
}

// Element `col` of row r of a block, without its matrix's unit; to_float makes a number of a float16's bits.
template <class Half>
KVASIR_BOTH float unpack_one(Packing p, const uint8_t* block, int r, int col, Half to_float) {
  auto half = [&](const uint8_t* at) { return to_float(*reinterpret_cast<const uint16_t*>(at)); };
  const int j = col / 32, e = col % 32;
  const uint8_t* scales = block + kBlockRows * quant_bytes(p) + r * scale_bytes(p);
  if (!has_offset(p)) {
    const int at = j / 2 * kBlockRows * 64 + r * 64 + e / 8 * 16 + j % 2 * 8 + e % 8;
    if (p == Packing::e4m3) return *reinterpret_cast<const float*>(scales) * e4m3_number(block[at]);
    return half(scales + 2 * j) * float(block[at] - 128);
  }
  if (is_nibbles(p)) {
    const int at = p == Packing::q4 ? 4 * j : 0;
    const int i = e % 8, place = i / 2 + i % 2 * 4;
    const int q = block[r * 64 + e / 8 * 16 + j * 4 + place / 2] >> place % 2 * 4 & 15;
    return half(scales + at) * float(q) + half(scales + at + 2);
  }
  const int h = e / 16, t = e % 16 / 4, i = h * 4 + e % 4, place = i / 2 + i % 2 * 4;
  const int low = block[r * 64 + t * 16 + j * 4 + place / 2] >> place % 2 * 4 & 15;
  const int high = block[kBlockRows * 64 + r * 32 + t * 8 + j / 2 * 4 + i % 2 * 2 + j % 2] >> i / 2 * 2 & 3;
  return half(scales + 8 * j + 4 * h) * float(low | high << 4) + half(scales + 8 * j + 4 * h + 2);
}

}  // namespace kvasir::model::cuda
