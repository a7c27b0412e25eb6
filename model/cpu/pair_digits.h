// Two rows of activations in three planes of bytes: what a multiplication of bytes leaves unused of the activations' 12
// bits in two planes is shared by both. Integers a and b of two rows are
//   a = 16 * first + both, b = 15 * second + both
// where 240 values of `both` meet each remainder of a by 16 and of b by 15 once; so first, second and both are bytes as
// long as |a| and |b| are at most 15 * 127 - 120, the range of quantize_to(). Sums of products with the three are exact
// modulo 2^32, and so are those of the rows.
//
// A pair of rows has 128 bytes a block: `first`, `second` and `both`, 32 of each, then what a kernel wants of their
// sums. A row without another has its two planes instead of the three.
#pragma once

#include <utility>

#include "model/cpu/panel_rows.h"

// NOLINTBEGIN(misc-definitions-in-headers): each unit is to have its own.
namespace kvasir::model::cpu {
namespace {

constexpr int kDigits = 3;
constexpr int64_t kDigitBytes = 128;  // of a pair's block
constexpr int kDigitSums = 96;        // where in them

// A tile's digits: those of two pairs, or one, or of one and a single row, or of a single row.
template <int C>
constexpr int kTileRows = C / kDigits * 2 + (C % kDigits != 0 ? 1 : 0);

// f.operator()<i>() for i below N. Where a loop does it gcc 12 keeps sums that are an array in memory.
template <int N, class F>
[[gnu::always_inline]] inline void unrolled(const F& f) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) { (f.template operator()<I>(), ...); }
  (std::make_integer_sequence<int, N>());
}

// The rows of a tile whose digits have these sums, in vectors: f.operator()<row, vector>(the row's sum).
template <int C, int N, class F>
[[gnu::always_inline]] inline void each_row_of(const Blocks::I (&sums)[C][N], const F& f) {
  unrolled<kTileRows<C> * N>([&]<int I>() __attribute__((always_inline)) {
    constexpr int t = I / N, n = I % N, j = t / 2 * kDigits;
    const Blocks::I both = sums[j + (C - j < kDigits ? 1 : 2)][n], scaled = Blocks::left<4>(sums[j + t % 2][n]);
    f.template operator()<t, n>(Blocks::add_i(t % 2 == 0 ? scaled : Blocks::sub_i(scaled, sums[j + t % 2][n]), both));
  });
}

// f.operator()<digits>() for a tile of so many rows, of 1 to 4.
template <class F>
inline void with_digits(int64_t rows, const F& f) {
  switch (rows) {
    case 1: return f.template operator()<2>();
    case 2: return f.template operator()<3>();
    case 3: return f.template operator()<5>();
    default: return f.template operator()<6>();
  }
}

// How quantize_to() writes a row's block, as integers of 16 bits, until its pair is made of it.
struct Int16Blocks {
  static void quantize_block(const float* x, float inverse, int8_t* to, int8_t*) {
    const __m256 magic = _mm256_set1_ps(12582912.0f), by = _mm256_set1_ps(inverse);
    const __m256i most = _mm256_set1_epi16(int16_t(kActivationRange)), least = _mm256_set1_epi16(-kActivationRange);
#pragma GCC unroll 2
    for (int i = 0; i < 32; i += 16) {
      auto whole = [&](const float* p) {
        const __m256 v = _mm256_fmadd_ps(_mm256_loadu_ps(p), by, magic);
        return _mm256_sub_epi32(_mm256_castps_si256(v), _mm256_castps_si256(magic));
      };
      const __m256i v = _mm256_permute4x64_epi64(_mm256_packs_epi32(whole(x + i), whole(x + i + 8)), 0xd8);
      // What is no number must not reach the other row.
      const __m256i kept = _mm256_max_epi16(_mm256_min_epi16(v, most), least);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 2 * i), kept);
    }
  }
  static void plane_sums(const int8_t*, const int8_t*, int32_t*) {}
};

inline __m256i words_at(const int8_t* q) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q)); }

// The sum of a block's magnitudes.
inline int32_t size_of(const int8_t* q) {
  auto half = [&](int i) { return _mm256_abs_epi16(words_at(q + i)); };
  const __m256i twos = _mm256_madd_epi16(_mm256_add_epi16(half(0), half(32)), _mm256_set1_epi16(1));
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(twos), _mm256_extracti128_si256(twos, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

// The sums of a block's halves, as plane_sums() would have them of rows without a high plane.
inline void half_sums(const int8_t* q, int32_t* sums) {
  auto pairs = [&](int i) { return _mm256_madd_epi16(words_at(q + i), _mm256_set1_epi16(1)); };
  const __m256i fours = _mm256_hadd_epi32(pairs(0), pairs(32));
  __m128i halves = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
  halves = _mm_hadd_epi32(halves, halves);
  sums[0] = sums[1] = 0, sums[2] = _mm_cvtsi128_si32(halves), sums[3] = _mm_extract_epi32(halves, 1);
}

// The digits of a pair's block in the room of its integers, or of a row alone in that of its own; then put(their sums
// over the first 16 inputs, over the others).
template <bool alone, class Put>
inline void make_digits(int8_t* block, const Put& put) {
  auto bytes = [](__m256i low, __m256i high) { return _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8); };
  __m256i digits[kDigits][2];
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    const __m256i a = words_at(block + 32 * h);
    if constexpr (alone) {
      digits[0][h] = _mm256_srai_epi16(_mm256_add_epi16(a, _mm256_set1_epi16(8)), 4);
      digits[1][h] = _mm256_sub_epi16(a, _mm256_slli_epi16(digits[0][h], 4));
      digits[2][h] = _mm256_setzero_si256();
    } else {
      // `both` is a - 16 * (a - b) less the nearest 240 * n: a little beside the nearest is as good.
      const __m256i second = words_at(block + 64 + 32 * h), off = _mm256_sub_epi16(a, second),
                    half = _mm256_sub_epi16(_mm256_srai_epi16(a, 1), _mm256_slli_epi16(off, 3)),
                    sixteenths = _mm256_mulhi_epi16(half, _mm256_set1_epi16(8738)),  // of 120: 65536 * 16 / 120
          n = _mm256_srai_epi16(_mm256_add_epi16(sixteenths, _mm256_set1_epi16(8)), 4);
      digits[1][h] = _mm256_add_epi16(off, _mm256_slli_epi16(n, 4));
      digits[0][h] = _mm256_sub_epi16(digits[1][h], n);
      digits[2][h] = _mm256_sub_epi16(a, _mm256_slli_epi16(digits[0][h], 4));
    }
  }
  __m256i fours[kDigits];
#pragma GCC unroll 3
  for (int j = 0; j < kDigits; ++j) {
    const __m256i v = bytes(digits[j][0], digits[j][1]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(block + 32 * j), v);
    fours[j] = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), v), _mm256_set1_epi16(1));
  }
  const __m256i both =
      _mm256_hadd_epi32(_mm256_hadd_epi32(fours[0], fours[1]), _mm256_hadd_epi32(fours[2], _mm256_setzero_si256()));
  put(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
}

// What kernels of of_rows with VNNI want of the sums, each in the upper half of a lane: either half's; or all of them,
// then -8 times them.
inline void put_upper_sums(int8_t* block, bool halves, __m128i first, __m128i second) {
  const __m128i all = _mm_add_epi32(first, second);
  const __m128i one = _mm_slli_epi32(halves ? first : all, 16),
                other =
                    halves ? _mm_slli_epi32(second, 16) : _mm_sub_epi32(_mm_setzero_si128(), _mm_slli_epi32(all, 3));
  int32_t six[8];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(six), one);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(six + kDigits), other);
  __builtin_memcpy(block + kDigitSums, six, 24);
}

// put(a pair's block, its number, sums of its digits over the first 16 inputs, over the others).
template <class Own, class Put>
inline void quantize_digits(const float* x, const PackingInfo& info, const QuantRows& to, int64_t row, const Put& put) {
  const int64_t blocks = to.cols / 32, parts = info.halves ? 2 : 1;
  int32_t* sizes = &fit_of(to, row);  // there is room for more
  quantize_to<Own>(
      x, to, row,
      [&](int64_t b) {
        int8_t* q = to.q + row / 2 * 4 * to.cols + b * kDigitBytes + row % 2 * 64;
        return BlockPlace{q, q, (row * blocks + b) * parts, 1};
      },
      [&](int64_t b, const BlockPlace& at, int32_t* sums) {
        if (info.of_rows) {
          sizes[b] = size_of(at.high);
        } else if (info.zero == 0) {
          half_sums(at.high, sums);
          put_sums(info, at, sums, to);
        }
        int8_t* block = at.high - row % 2 * 64;
        auto put_here = [&](__m128i first, __m128i second) { put(block, b, first, second); };
        if (row % 2 == 1)
          make_digits<false>(block, put_here);
        else if (row + 1 == to.rows)
          make_digits<true>(block, put_here);
      });
  if (info.of_rows) *sizes = find_fit(sizes, blocks);
}

}  // namespace
}  // namespace kvasir::model::cpu
// NOLINTEND(misc-definitions-in-headers)
