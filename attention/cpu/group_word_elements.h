// int8 and int4 as group_sums.h has them, for processors that multiply subnormal numbers as fast as others: bytes
// and nibbles are not converted at all. Bits of a 32-bit word, masked so that those above an element are gone, are a
// number n of at most 24 bits, and as a float they are n * 2^-149. What stands below the element in the word is left
// there: queries are combined, and sums of values split, so that it comes to the same, exactly but for their rounding.
// So a vector of eight elements costs a mask where it took a widening and a conversion.
#pragma once

#include "attention/cpu/group_keys.h"

namespace kvasir::attention::cpu {
namespace {

using namespace simd;  // the vectors of this translation unit

constexpr float kWeightUp = 0x1p60f;         // powers of two that keep products with such numbers in range:
constexpr float kQueryTop = 60, kLow = -60;  // of weights, and of a row's largest query; those below kLow stay below

template <DType T>
constexpr int kWordVectors = T == DType::i8 ? 4 : 8;  // of a block of 32 bytes
template <DType T>
constexpr int kBlockOf = kWordVectors<T>* W;  // elements

template <int kFrom, int kTo, class F>
[[gnu::always_inline]] inline void each_of(const F& f) {
  if constexpr (kFrom < kTo) {
    f(Count<kFrom>{});
    each_of<kFrom + 1, kTo>(f);
  }
}

// Elements without signs, so much more than they are.
template <DType T>
constexpr float kBias = T == DType::i8 ? 128 : 8;
template <DType T>
[[gnu::always_inline]] inline __m256i unsigned_words(__m256i words) {
  return _mm256_xor_si256(words, _mm256_set1_epi32(T == DType::i8 ? int(0x80808080) : int(0x88888888)));
}
template <DType T>
[[gnu::always_inline]] inline __m256i load_block(const uint8_t* at) {
  return unsigned_words<T>(load_words(at));
}

// a * b + sum. Written out, because the compiler makes of it what overwrites a factor, and moves that first.
[[gnu::always_inline]] inline V add_product(V sum, V a, V b) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
  return sum;
}

// Raw vector v of a block: of int8 u0, u1:u0, u2:u1:u0 and u3:u2:u1 of a word's four bytes; of int4 likewise
// the lowest one to six of its eight nibbles, and then u6 .. u2 and u7 .. u2.
template <DType T, int v>
constexpr int kMaskBits = (v + 1) * bits_of(T) <= 24 ? (v + 1) * bits_of(T)
                          : v + 1 == kWordVectors<T> ? 0
                                                     : 20;

// A mask is read where it is used: the compiler would keep all of them in registers, and sums in memory.
struct Masks {
  alignas(32) uint32_t at[7][W];
};
constexpr Masks kLowest = [] {
  Masks masks = {};
  for (int i = 0; i < 7; ++i)
    for (uint32_t& word : masks.at[i]) word = (1u << 4 * i) - 1;
  return masks;
}();
template <DType T, int v>
[[gnu::always_inline]] inline V raw_of(__m256i word) {
  const __m256i from = (v + 1) * bits_of(T) <= 24 ? word : _mm256_srli_epi32(word, 8);
  if constexpr (kMaskBits<T, v> == 0) return _mm256_castsi256_ps(from);
  __m256i low;
  asm("vpand %2, %1, %0" : "=x"(low) : "x"(from), "m"(kLowest.at[kMaskBits<T, v> / 4]));
  return _mm256_castsi256_ps(low);
}

// Raw vectors x and what they stand for, u, are each a linear function of the other: here u of x; what multiplies x
// is the transposed one of what multiplies u.
template <DType T>
inline void part_raw(const V (&x)[kWordVectors<T>], V (&u)[kWordVectors<T>]) {
  u[0] = x[0];
  if constexpr (T == DType::i8) {
    u[1] = mul(sub(x[1], x[0]), set1(0x1p-8f));
    u[2] = mul(sub(x[2], x[1]), set1(0x1p-16f));
    u[3] = mul(sub(x[3], mul(sub(x[2], x[0]), set1(0x1p-8f))), set1(0x1p-16f));
  } else {
    for (int i = 1; i < 6; ++i) u[i] = mul(sub(x[i], x[i - 1]), set1(1.0f / float(1 << 4 * i)));
    u[6] = mul(sub(x[6], mul(sub(x[5], x[1]), set1(0x1p-8f))), set1(0x1p-16f));
    u[7] = mul(sub(x[7], x[6]), set1(0x1p-20f));
  }
}
template <DType T>
inline void combine_raw(const V (&q)[kWordVectors<T>], V (&c)[kWordVectors<T>]) {
  auto times = [](V x, float by) { return mul(x, set1(by)); };
  if constexpr (T == DType::i8) {
    c[3] = times(q[3], 0x1p-16f);
    c[2] = sub(times(q[2], 0x1p-16f), times(q[3], 0x1p-24f));
    c[1] = sub(times(q[1], 0x1p-8f), times(q[2], 0x1p-16f));
    c[0] = add(sub(q[0], times(q[1], 0x1p-8f)), times(q[3], 0x1p-24f));
  } else {
    for (int i = 0; i < 5; ++i)
      c[i] = sub(times(q[i], 1.0f / float(1 << 4 * i)), times(q[i + 1], 1.0f / float(16 << 4 * i)));
    c[1] = add(c[1], times(q[6], 0x1p-24f));
    c[5] = sub(times(q[5], 0x1p-20f), times(q[6], 0x1p-24f));
    c[6] = sub(times(q[6], 0x1p-16f), times(q[7], 0x1p-20f));
    c[7] = times(q[7], 0x1p-20f);
  }
}

// Subnormal numbers are numbers, whatever the thread's owner says of them.
class KeepSubnormals {
 public:
  KeepSubnormals() {
    if (was_ & kDropped) _mm_setcsr(was_ & ~kDropped);
  }
  ~KeepSubnormals() {
    if (was_ & kDropped) _mm_setcsr(was_);
  }
  KeepSubnormals(const KeepSubnormals&) = delete;

 private:
  static constexpr unsigned kDropped = 0x8040;  // flush to zero, denormals are zeros
  const unsigned was_ = _mm_getcsr();
};

template <DType T>
inline void combine_queries(const float* q, int rows, int q_stride, GroupSums& m) {
  constexpr int kAll = kWordVectors<T>;
  const __m256i lanes = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(kAll));
  for (int r = 0; r < rows; ++r, q += q_stride) {
    V top = zero();
    for (int d = 0; d < m.head_dim; d += W) top = max_v(top, abs_v(load(q + d)));
    alignas(32) float each[W];
    store(each, top);
    float most = 0;
    for (float x : each) most = x > most ? x : most;
    const int exponent = most > 0x1p-60f ? int(_mm_cvtsi128_si32(_mm_castps_si128(_mm_set_ss(most))) >> 23) - 127 : -60;
    const int e = exponent > 126 ? 126 : exponent;
    auto power = [](int n) { return _mm256_castsi256_ps(_mm256_set1_epi32((127 + n) << 23)); };
    const V up = power(60 - e);
    m.worth[r] = first(power(e));
    for (int g = 0; g < m.groups; ++g) {
      V less = zero();
      for (int d = g * m.group; d < (g + 1) * m.group; d += kBlockOf<T>) {
        V of[kAll], c[kAll];
        for (int v = 0; v < kAll; ++v) {
          of[v] = mul(_mm256_i32gather_ps(q + d + v, lanes, 4), up);
          less = fma_v(set1(-kBias<T>), of[v], less);
        }
        combine_raw<T>(of, c);
        for (int v = 0; v < kAll; ++v) store(m.own + r * m.head_dim + d + v * W, c[v]);
      }
      store(m.first + (r * m.groups + g) * W, mul(mul(less, set1(0x1p-100f)), set1(0x1p-49f)));
    }
  }
}

void group_words_begin(const float* q, int rows, int q_stride, const CacheKind& kind, uint8_t* memory) {
  cut_group_sums(rows, kind, memory);
  GroupSums& m = group_sums(memory);
  m.queries = m.own, m.q_stride = m.head_dim;
  if (kind.dtype == DType::i8)
    combine_queries<DType::i8>(q, rows, q_stride, m);
  else
    combine_queries<DType::i4>(q, rows, q_stride, m);
}

}  // namespace
}  // namespace kvasir::attention::cpu
