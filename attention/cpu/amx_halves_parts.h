// float16 as bfloat16 parts, 32 elements at a time by operations on 16-bit words: converting to float32 and splitting
// that takes twice as many.
//
// A float16 is sign, 5 bits of exponent, 10 of fraction. `high` is its sign, exponent and upper 7 bits as a bfloat16,
// whose exponent lacks what their biases differ by: the value, cut off, times 2^-112. `low` is what was cut off, three
// bits, looked up: exactly that times 2^-38 (a table's entry for none is 2^-64 of the last bit instead of 0, and 0 for
// 0). Subnormal, infinite and undefined elements have no such form; they are rare, and go to two parts of their own,
// times 2^-38 too, and 0 elsewhere: what is 0 adds nothing, so that it cannot matter what else a register holds.
#pragma once

#include "attention/cpu/amx_tile.h"
#include "attention/cpu/prefetch.h"

namespace kvasir::attention::cpu {
namespace {

constexpr int kHighPower = 112, kLowPower = 38;  // of two, that operands of those parts are multiplied by

struct alignas(64) Words32 {
  uint16_t at[32];
};
constexpr Words32 kLowBits = [] {
  Words32 table = {};
  for (int i = 0; i < 32; ++i) {
    const int bits = i % 8, top = bits >= 4 ? 2 : bits >= 2 ? 1 : 0;
    if (bits > 0) table.at[i] = uint16_t(((102 - kLowPower + top) << 7) | ((bits << (7 - top)) & 0x7f));
  }
  return table;
}();
constexpr Words32 all_words(uint16_t x) {
  Words32 all = {};
  for (uint16_t& w : all.at) w = x;
  return all;
}
// In memory, for a broadcast from a general register takes a shuffle's port.
constexpr Words32 kValueBits = all_words(0x8fff), kExponentBits = all_words(0x8f80);
// An exponent of 0 or of all ones, and no other, is 0 or 1 once 1 is added to it.
constexpr Words32 kOneMore = all_words(0x0400), kPastOne = all_words(0x7800);
inline __m512i words(const Words32& w) { return _mm512_load_si512(w.at); }

[[gnu::always_inline]] inline void split(__m512i x, __m512i* high, __m512i* low) {
  const __m512i moved = _mm512_srai_epi16(x, 3);
  *high = _mm512_and_si512(moved, words(kValueBits));
  *low = _mm512_add_epi16(_mm512_and_si512(moved, words(kExponentBits)), _mm512_permutexvar_epi16(x, words(kLowBits)));
}

// The upper halves of 32 floats.
inline __m512i upper_halves(__m512 a, __m512 b) {
  const __m512i odd =
      _mm512_setr_epi32(0x00030001, 0x00070005, 0x000b0009, 0x000f000d, 0x00130011, 0x00170015, 0x001b0019, 0x001f001d,
                        0x00230021, 0x00270025, 0x002b0029, 0x002f002d, 0x00330031, 0x00370035, 0x003b0039, 0x003f003d);
  return _mm512_permutex2var_epi16(_mm512_castps_si512(a), odd, _mm512_castps_si512(b));
}
inline __m512 top_half(__m512 x) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(int(0xffff0000))));
}

constexpr int kHalfParts = 4;          // high, low, and two of elements set apart
constexpr int kPartBytes = 2 * kUnit;  // of 32 elements of 32 keys
constexpr int kBlockBytes = kHalfParts * kPartBytes;

struct Block {
  uint8_t* at;
  bool* has_apart;  // has any: otherwise its last two parts are left out
};

// The elements of x without parts, if any, which became its line of a block's first ones.
inline void set_apart(__m512i x, Block block, uint8_t* line) {
  const __mmask32 apart = _mm512_testn_epi16_mask(_mm512_add_epi16(x, words(kOneMore)), words(kPastOne)) &
                          _mm512_test_epi16_mask(x, _mm512_set1_epi16(0x7fff));
  if (apart == 0) return;
  if (!*block.has_apart) __builtin_memset(block.at + 2 * kPartBytes, 0, 2 * kPartBytes);
  *block.has_apart = true;
  for (int part = 0; part < 2; ++part)
    _mm512_mask_storeu_epi16(line + part * kPartBytes, apart, _mm512_setzero_si512());
  const __m512i those = _mm512_maskz_mov_epi16(apart, x);
  const __m512 down = _mm512_set1_ps(1.0f / float(int64_t(1) << kLowPower));
  __m512 a = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(those)), down);
  __m512 b = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(those, 1)), down);
  for (int part = 2; part < kHalfParts; ++part) {
    _mm512_store_si512(line + part * kPartBytes, upper_halves(a, b));
    a = _mm512_sub_ps(a, top_half(a)), b = _mm512_sub_ps(b, top_half(b));
  }
}

// Elements [32 c, 32 c + 32) of a row; new tokens beside a cyclic cache are float32, and float16 by what they hold.
template <DType T>
[[gnu::always_inline]] inline __m512i halves(const uint8_t* row, int c) {
  if constexpr (T == DType::f16) return _mm512_loadu_si512(row + c * 64);
  const float* p = reinterpret_cast<const float*>(row) + c * 32;
  const __m256i a = _mm512_cvtps_ph(_mm512_loadu_ps(p), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256i b = _mm512_cvtps_ph(_mm512_loadu_ps(p + 16), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
}

// Of a block's lines, whose first is at `line`: one after the other, or two each of two units.
template <bool kTwoUnits>
constexpr int offset_of_line(int i) {
  return kTwoUnits ? i % 2 * kUnit + i / 2 * 64 : i * 64;
}
template <bool kTwoUnits>
__attribute__((noinline, cold)) void set_four_apart(__m512i a, __m512i b, __m512i c, __m512i d, Block block,
                                                    uint8_t* line) {
  set_apart(a, block, line + offset_of_line<kTwoUnits>(0));
  set_apart(b, block, line + offset_of_line<kTwoUnits>(1));
  set_apart(c, block, line + offset_of_line<kTwoUnits>(2));
  set_apart(d, block, line + offset_of_line<kTwoUnits>(3));
}
template <bool kTwoUnits>
[[gnu::always_inline]] inline void put_four(__m512i a, __m512i b, __m512i c, __m512i d, Block block, uint8_t* line) {
  __mmask32 normal = ~__mmask32(0);
  auto put = [&](__m512i x, uint8_t* to) {
    __m512i high, low;
    split(x, &high, &low);
    normal = _mm512_mask_test_epi16_mask(normal, _mm512_add_epi16(x, words(kOneMore)), words(kPastOne));
    _mm512_store_si512(to, high);
    _mm512_store_si512(to + kPartBytes, low);
  };
  put(a, line + offset_of_line<kTwoUnits>(0));
  put(b, line + offset_of_line<kTwoUnits>(1));
  put(c, line + offset_of_line<kTwoUnits>(2));
  put(d, line + offset_of_line<kTwoUnits>(3));
  // Neither 0 nor one of those, nearly always.
  if (__builtin_expect(normal != ~__mmask32(0), 0)) set_four_apart<kTwoUnits>(a, b, c, d, block, line);
}

// Elements [32 c, 32 c + 32) of 32 keys become parts a few keys at a time, while the matrix unit is at others.
template <DType T, bool kPairs>
struct BlockAtWork {
  const uint8_t* const* rows;
  int chunk = 0, row = 32;
  Block block;

  void start(const uint8_t* const* its_rows, int c, Block to) {
    rows = its_rows, chunk = c, block = to, row = 0;
    *block.has_apart = false;
  }
  void some(Prefetcher& ahead) {
    if (row >= 32) return;
    prefetch(ahead);
    const int c = chunk;
    const Block to = block;
    uint8_t* line = to.at + row * (kPairs ? 32 : 64);
    const uint8_t* const* at = rows + (kPairs ? row / 2 : row);
    for (int i = 0; i < 2; ++i) {
      if constexpr (kPairs) {
        // Keys i and i + 16 are a pair. Elements 0 to 3, 8 to 11 .. are one unit, the others another.
        const __m512i a = halves<T>(at[2 * i], c), b = halves<T>(at[2 * i + 16], c);
        const __m512i x = halves<T>(at[2 * i + 1], c), y = halves<T>(at[2 * i + 17], c);
        put_four<true>(_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b), _mm512_unpacklo_epi16(x, y),
                       _mm512_unpackhi_epi16(x, y), to, line + i * 128);
      } else {
        put_four<false>(halves<T>(at[4 * i], c), halves<T>(at[4 * i + 1], c), halves<T>(at[4 * i + 2], c),
                        halves<T>(at[4 * i + 3], c), to, line + i * 256);
      }
    }
    row += 8;
  }
};

}  // namespace
}  // namespace kvasir::attention::cpu
