// int8 and int4 caches by vectors that multiply bytes (AVX-512 VNNI): four of them a lane and instruction, where floats
// take a conversion and a product each. Keys are transposed, sixteen at once, so that a lane is a key; values of four
// keys stand beside each other, so that a lane is an element. The other side are digits (bytes.h), and the sums are the
// very ones of amx_bytes.cc, combined in the same order.
#include "attention/cpu/byte_vectors.h"

#include "core/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "attention/cpu/bytes.h"
#include "attention/cpu/prefetch.h"
#include "simd/transpose16.h"

namespace kvasir::attention::cpu {
namespace {

using simd::transpose;

constexpr int kStep = 64;      // elements that are worked on together
constexpr int kKeyRows = 4;    // rows whose sums stay in registers: of keys,
constexpr int kFirstRows = 2;  // of keys while they are transposed,
constexpr int kValueRows = 2;  // of values
constexpr int64_t kMostGroups = 4, kMostDim = kMostGroups * kStep;
constexpr int kQuads = kTile / 4;
constexpr int kLess = 4;  // digits, and one word that is nothing

// One thread's memory, cut up. The instruction wants one side without signs: the cache's bytes are 128 more than they
// are, and sums begin at what that makes less.
struct ByteScratch {
  int32_t head_dim, rows, groups;
  float byte_worth;
  float* worth;      // [row]: of the query's unit
  int32_t* less;     // [row][group][kLess], by digits
  int8_t* queries;   // [row][64 places][digit][64]
  uint8_t* cache;    // keys [16 of 64][4 elements][16 keys][4], and then values [64 elements][4 keys of 64][64 dwords]
  uint8_t* weights;  // [row of some][group][digit][64 keys]
  float* scales;     // [group][key]
};

inline ByteScratch& cut(uint8_t* memory) { return *reinterpret_cast<ByteScratch*>(memory); }

// Where what a thread needs lies: f(pointer member, bytes) for each part of it.
template <class F>
void each_part(int rows, int head_dim, const F& f) {
  const int64_t wide = rounded_up(head_dim);
  f(&ByteScratch::worth, rounded_up(rows * int64_t(4)));
  f(&ByteScratch::less, rounded_up(rows * kMostGroups * kLess * 4));
  f(&ByteScratch::queries, rows * kDigits * wide);
  f(&ByteScratch::cache, kTile * wide);
  f(&ByteScratch::weights, kValueRows * kMostGroups * kDigits * 64);
  f(&ByteScratch::scales, kMostGroups * kTile * 4);
}

int64_t bytes(int rows, int head_dim) {
  int64_t n = rounded_up(sizeof(ByteScratch));
  each_part(rows, head_dim, [&](auto, int64_t size) { n += size; });
  return n;
}

// What 64 digits of each kind make of bytes that are 128 too large: added to `sums`.
inline void less_for(const void* digits, int32_t* sums) {
  const __m512i none = _mm512_setzero_si512(), ones = _mm512_set1_epi8(1);
  __m512i of[4] = {none, none, none, none};
  for (int p = 0; p < kDigits; ++p)
    of[p] = _mm512_dpbusd_epi32(none, ones, _mm512_loadu_si512(static_cast<const uint8_t*>(digits) + p * 64));
  const __m512i x = _mm512_add_epi32(_mm512_unpacklo_epi32(of[0], of[1]), _mm512_unpackhi_epi32(of[0], of[1]));
  const __m512i y = _mm512_add_epi32(_mm512_unpacklo_epi32(of[2], of[3]), _mm512_unpackhi_epi32(of[2], of[3]));
  const __m512i z = _mm512_add_epi32(_mm512_unpacklo_epi64(x, y), _mm512_unpackhi_epi64(x, y));
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(z), _mm512_extracti64x4_epi64(z, 1));
  const __m128i all = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  auto* at = reinterpret_cast<__m128i*>(sums);
  _mm_storeu_si128(at, _mm_sub_epi32(_mm_loadu_si128(at), _mm_slli_epi32(all, 7)));
}

void begin(const float* q, int rows, int q_stride, const CacheKind& kind, uint8_t* memory) {
  ByteScratch& m = cut(memory);
  m.head_dim = kind.head_dim, m.rows = rows;
  m.groups = kind.grouped ? kind.head_dim / kind.group : 1;
  m.byte_worth = kind.dtype == DType::i4 ? 0.0625f : 1.0f;
  uint8_t* at = memory + rounded_up(sizeof(ByteScratch));
  each_part(rows, kind.head_dim, [&](auto member, int64_t size) {
    m.*member = reinterpret_cast<std::remove_reference_t<decltype(m.*member)>>(at);
    at += size;
  });
  const int wide = kind.head_dim, steps = wide / kStep / m.groups;
  const __m512i places = element_at_place<DType::i4>();
  int8_t digits[kDigits * kMostDim];
  for (int r = 0; r < rows; ++r) {
    m.worth[r] = m.byte_worth * query_digits(q + r * q_stride, wide, digits, wide);
    for (int k = 0; k < wide / kStep; ++k) {
      int8_t* to = m.queries + (r * wide + k * kStep) * kDigits;
      for (int p = 0; p < kDigits; ++p) {
        const __m512i x = _mm512_loadu_si512(digits + p * wide + k * kStep);
        _mm512_storeu_si512(to + p * kStep, kind.dtype == DType::i4 ? _mm512_permutexvar_epi8(places, x) : x);
      }
      int32_t* less = m.less + (r * kMostGroups + k / steps) * kLess;
      if (k % steps == 0) _mm_storeu_si128(reinterpret_cast<__m128i*>(less), _mm_setzero_si128());
      less_for(to, less);
    }
  }
}
void end() {}

// 64 elements of a row and 128 more, in the order of element_at_place.
template <DType T>
inline __m512i bytes_at(const uint8_t* row, int d) {
  const __m512i more = _mm512_set1_epi8(char(0x80));
  if constexpr (T == DType::i8) return _mm512_xor_si512(load64(row + d), more);
  const __m512i both = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + d / 2)));
  const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 0);
  constexpr int kAndThenXor = 0x6a;
  return _mm512_ternarylogic_epi32(_mm512_sllv_epi16(both, shifts), _mm512_set1_epi8(char(0xf0)), more, kAndThenXor);
}

// The compiler would broadcast in an instruction of its own, and move sums from register to register.
inline void add_products(__m512i& sums, __m512i bytes, const void* digits) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(bytes), "m"(*static_cast<const int32_t*>(digits)));
}
inline void add_products(__m512i& sums, __m512i bytes, __m512i digits) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(bytes), "v"(digits));
}
inline __m512i four_digits(const void* at) {
  int32_t four;
  __builtin_memcpy(&four, at, 4);
  return _mm512_set1_epi32(four);
}

// ---- scores ---------------------------------------------------------------------------------------

// Elements [d, d + 64) of sixteen keys, four of them a register, a key a lane.
template <DType T>
[[gnu::always_inline]] inline void transpose_keys(const uint8_t* const* rows, int d, __m512i t[16], Prefetcher& ahead) {
  for (int i = 0; i < 16; ++i) {
    if (i % 4 == 0) prefetch(ahead);
    t[i] = bytes_at<T>(rows[i], d);
  }
  transpose(t);
}

inline uint8_t* transposed(const ByteScratch& m, int j, int step) { return m.cache + (j * m.head_dim + step * 1024); }

// How rows come by transposed keys. Transposing is for other ports than products: the first rows do it between theirs,
// and leave keys transposed for the others. (Of heads of 64, which end after one step, it is sooner done beforehand.)
enum class Transposed { in_registers, and_kept, before };

// The scores of rows [row, row + R) for keys [begin, end), whole blocks of sixteen.
template <DType T, int R, Transposed kTransposed>
[[gnu::noinline]] void score_blocks(const ByteScratch& m, int row, const KvRows& keys, int begin, int end, float* s,
                                    Prefetcher& ahead) {
  const int wide = m.head_dim, groups = m.groups, steps = wide / kStep / groups;
  for (int j = begin; j < end; j += 16) {
    const int8_t* queries = m.queries + row * wide * kDigits;
    __m512 scaled[R][kDigits];
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < kDigits; ++p) scaled[r][p] = _mm512_setzero_ps();
    for (int g = 0; g < groups; ++g) {
      const int32_t* less = m.less + (row * kMostGroups + g) * kLess;
      __m512i sums[R][kDigits];
      for (int r = 0; r < R; ++r)
        for (int p = 0; p < kDigits; ++p) sums[r][p] = _mm512_set1_epi32(less[r * kMostGroups * kLess + p]);
      for (int k = g * steps; k < (g + 1) * steps; ++k, queries += kStep * kDigits) {
        __m512i t[16];
        if constexpr (kTransposed == Transposed::before)
          for (int i = 0; i < 16; ++i) t[i] = _mm512_load_si512(transposed(m, j, k) + i * 64);
        else
          transpose_keys<T>(keys.row + j, k * kStep, t, ahead);
        if constexpr (kTransposed == Transposed::and_kept)
          for (int i = 0; i < 16; ++i) _mm512_store_si512(transposed(m, j, k) + i * 64, t[i]);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i)
          for (int r = 0; r < R; ++r)
            for (int p = 0; p < kDigits; ++p)
              add_products(sums[r][p], t[i], queries + r * wide * kDigits + p * kStep + 4 * i);
      }
      const __m512 scale = _mm512_load_ps(m.scales + g * kTile + j);
      for (int r = 0; r < R; ++r)
        for (int p = 0; p < kDigits; ++p)
          scaled[r][p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r][p]), scale, scaled[r][p]);
    }
    for (int r = 0; r < R; ++r) {
      const __m512 x = _mm512_fmadd_ps(scaled[r][2], _mm512_set1_ps(65536.0f),
                                       _mm512_fmadd_ps(scaled[r][1], _mm512_set1_ps(256.0f), scaled[r][0]));
      _mm512_storeu_ps(s + r * kTile + j, _mm512_mul_ps(x, _mm512_set1_ps(m.worth[row + r])));
    }
  }
}

template <DType T>
inline void score_transposed(const ByteScratch& m, int row, int rows, const KvRows& keys, int begin, int end, float* s,
                             Prefetcher& ahead) {
  switch (rows) {
    case 1: return score_blocks<T, 1, Transposed::before>(m, row, keys, begin, end, s, ahead);
    case 2: return score_blocks<T, 2, Transposed::before>(m, row, keys, begin, end, s, ahead);
    case 3: return score_blocks<T, 3, Transposed::before>(m, row, keys, begin, end, s, ahead);
    default: return score_blocks<T, kKeyRows, Transposed::before>(m, row, keys, begin, end, s, ahead);
  }
}

template <DType T>
void scores_of(int row, int rows, const KvRows& k, float* s, ByteScratch& m, Prefetcher& ahead) {
  const int begin = k.begin / 16 * 16, end = (k.end + 15) / 16 * 16;
  collect_scales(k, m.groups, m.scales);
  if (rows == 1) return score_blocks<T, 1, Transposed::in_registers>(m, row, k, begin, end, s, ahead);
  if (rows == 2) return score_blocks<T, 2, Transposed::in_registers>(m, row, k, begin, end, s, ahead);
  const int first = m.head_dim > kStep ? kFirstRows : 0;
  if (first > 0) score_blocks<T, kFirstRows, Transposed::and_kept>(m, row, k, begin, end, s, ahead);
  for (int j = begin; j < end && first == 0; j += 16) {
    __m512i t[16];
    transpose_keys<T>(k.row + j, 0, t, ahead);
    for (int i = 0; i < 16; ++i) _mm512_store_si512(transposed(m, j, 0) + i * 64, t[i]);
  }
  for (int r = first; r < rows; r += kKeyRows)
    score_transposed<T>(m, row + r, rows - r, k, begin, end, s + r * kTile, ahead);
}

void scores(int row, int rows, const KvRows& keys, const KvRows&, float* s, uint8_t* memory, Prefetcher* ahead) {
  if (keys.dtype == DType::i8)
    scores_of<DType::i8>(row, rows, keys, s, cut(memory), *ahead);
  else
    scores_of<DType::i4>(row, rows, keys, s, cut(memory), *ahead);
}

// ---- values ---------------------------------------------------------------------------------------

// Elements [d, d + 64) of four keys, theirs in a lane: place 16 l + 4 i + t is lane 4 l + t of register i.
template <DType T>
[[gnu::always_inline]] inline void interleave(const uint8_t* const* rows, int d, __m512i v[4]) {
  __m512i x[4];
  for (int i = 0; i < 4; ++i) x[i] = bytes_at<T>(rows[i], d);
  const __m512i low0 = _mm512_unpacklo_epi8(x[0], x[1]), low1 = _mm512_unpacklo_epi8(x[2], x[3]);
  const __m512i high0 = _mm512_unpackhi_epi8(x[0], x[1]), high1 = _mm512_unpackhi_epi8(x[2], x[3]);
  v[0] = _mm512_unpacklo_epi16(low0, low1), v[1] = _mm512_unpackhi_epi16(low0, low1);
  v[2] = _mm512_unpacklo_epi16(high0, high1), v[3] = _mm512_unpackhi_epi16(high0, high1);
}

// Lanes of four registers as interleave() leaves them, in the order of elements.
template <DType T>
inline void in_order(__m512 x[4]) {
  __m512 t[4];
  for (int i = 0; i < 4; i += 2) {
    t[i] = _mm512_shuffle_f32x4(x[i], x[i + 1], 0x44);
    t[i + 1] = _mm512_shuffle_f32x4(x[i], x[i + 1], 0xee);
  }
  x[0] = _mm512_shuffle_f32x4(t[0], t[2], 0x88), x[1] = _mm512_shuffle_f32x4(t[0], t[2], 0xdd);
  x[2] = _mm512_shuffle_f32x4(t[1], t[3], 0x88), x[3] = _mm512_shuffle_f32x4(t[1], t[3], 0xdd);
  if constexpr (T == DType::i4) {  // even elements, and then odd ones
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int i = 0; i < 4; ++i) t[i] = _mm512_permutex2var_ps(x[i / 2], i % 2 ? high : low, x[i / 2 + 2]);
    for (int i = 0; i < 4; ++i) x[i] = t[i];
  }
}

// Where the digits of four keys stand (weight_digits).
inline int place_of(int quad) { return int(unsigned(quad) % 4 * 4 + unsigned(quad) / 4) * 4; }

// o = o * correction + sum over the tile's keys, for 64 elements of R rows; step(quad, v) gives four keys of them.
template <DType T, int R, class Step>
[[gnu::always_inline]] inline void add_values(const uint8_t* weights, const int32_t (*less)[kLess], const float* worth,
                                              const float* correction, int from, int to, float* o, int o_stride,
                                              const Step step) {
  __m512i sums[R][4][kDigits];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < kDigits; ++p)
      for (int i = 0; i < 4; ++i) sums[r][i][p] = _mm512_set1_epi32(less[r * kMostGroups][p]);
  for (int quad = from; quad < to; ++quad) {
    __m512i v[4];
    step(quad, v);
    const uint8_t* at = weights + place_of(quad);
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < kDigits; ++p) {
        const __m512i w = four_digits(at + (r * kMostGroups * kDigits + p) * 64);
        for (int i = 0; i < 4; ++i) add_products(sums[r][i][p], v[i], w);
      }
  }
  for (int r = 0; r < R; ++r) {
    __m512 x[4];
    for (int i = 0; i < 4; ++i) {
      const __m512i below = _mm512_add_epi32(_mm512_slli_epi32(sums[r][i][1], 8), sums[r][i][0]);
      x[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r][i][2]), _mm512_set1_ps(65536.0f), _mm512_cvtepi32_ps(below));
    }
    in_order<T>(x);
    for (int i = 0; i < 4; ++i) {
      float* out = o + r * o_stride + 16 * i;
      const __m512 before = _mm512_mul_ps(_mm512_loadu_ps(out), _mm512_set1_ps(correction[r]));
      _mm512_storeu_ps(out, _mm512_fmadd_ps(x[i], _mm512_set1_ps(worth[r * kMostGroups]), before));
    }
  }
}

// step(quad, d, v) gives 64 elements of four keys.
template <DType T, int R, class Step>
[[gnu::noinline]] void accumulate_some(const float* p, const KvRows& v, const float* correction, float* o, int o_stride,
                                       ByteScratch& m, const Step step) {
  float worth[R * kMostGroups];
  int32_t less[R * kMostGroups][kLess] = {};
  for (int r = 0; r < R; ++r)
    for (int g = 0; g < m.groups; ++g) {
      const int at = r * kMostGroups + g;
      uint8_t* digits = m.weights + at * kDigits * 64;
      worth[at] = m.byte_worth * weight_digits(p + r * kTile, m.scales + g * kTile, digits);
      less_for(digits, less[at]);
    }
  const int steps = m.head_dim / kStep, each = steps / m.groups;
  for (int k = 0; k < steps; ++k) {
    const int g = k / each;
    add_values<T, R>(m.weights + g * kDigits * 64, less + g, worth + g, correction, v.begin / 4, (v.end + 3) / 4,
                     o + k * kStep, o_stride, [step, k](int quad, __m512i x[4]) { step(quad, k * kStep, x); });
  }
}

template <DType T>
void accumulate_of(const float* p, int rows, const KvRows& v, const float* correction, float* o, int o_stride,
                   ByteScratch& m, Prefetcher& ahead) {
  collect_scales(v, m.groups, m.scales);
  const auto some = [&](auto count, int r, const auto& step) {
    accumulate_some<T, decltype(count)::value>(p + r * kTile, v, correction + r, o + r * o_stride, o_stride, m, step);
  };
  const auto read = [rows = v.row, &ahead](int quad, int d, __m512i x[4]) {
    prefetch(ahead);
    interleave<T>(rows + 4 * quad, d, x);
  };
  if (rows == 1) return some(Count<1>{}, 0, read);
  // The first row interleaves between its products, and leaves what the others read.
  const auto kept = [at = m.cache](int quad, int d) { return at + (d / kStep * kQuads + quad) * 256; };
  const auto read_and_keep = [read, kept](int quad, int d, __m512i x[4]) {
    read(quad, d, x);
    for (int i = 0; i < 4; ++i) _mm512_store_si512(kept(quad, d) + i * 64, x[i]);
  };
  int r = m.head_dim > kStep ? 1 : 0;
  if (r > 0) some(Count<1>{}, 0, read_and_keep);
  for (int quad = v.begin / 4; quad < (v.end + 3) / 4 && r == 0; ++quad) {
    __m512i x[4];
    read_and_keep(quad, 0, x);
  }
  const auto again = [kept](int quad, int d, __m512i x[4]) {
    for (int i = 0; i < 4; ++i) x[i] = _mm512_load_si512(kept(quad, d) + i * 64);
  };
  for (; rows - r >= kValueRows; r += kValueRows) some(Count<kValueRows>{}, r, again);
  if (r < rows) some(Count<1>{}, r, again);
}

void accumulate(const float* p, int rows, const KvRows& v, const KvRows*, const float* correction, float* o,
                int o_stride, uint8_t* memory, Prefetcher* ahead) {
  if (v.dtype == DType::i8)
    accumulate_of<DType::i8>(p, rows, v, correction, o, o_stride, cut(memory), *ahead);
  else
    accumulate_of<DType::i4>(p, rows, v, correction, o, o_stride, cut(memory), *ahead);
}

bool takes(const CacheKind& kind) {
  return (kind.dtype == DType::i8 || kind.dtype == DType::i4) && kind.head_dim % kStep == 0 &&
         kind.head_dim <= kMostDim && (!kind.grouped || kind.group % kStep == 0);
}
bool pays(const CacheKind&) { return true; }

int stops(int head_dim) { return head_dim / kStep * 2 * kQuads; }  // one for four keys, and one for four values

// Of smaller tiles, lines soon needed would be most of the tile.
Reach reach(const KvRows& keys) { return keys.dtype == DType::i8 && keys.head_dim >= 128 ? Reach::all : Reach::later; }

constexpr TileKernel kTileKernel = {takes, pays, bytes, begin, end, scores, accumulate, stops, reach};

}  // namespace

const TileKernel* byte_vectors() {
  const CpuFeatures& has = kvasir::cpu();
  return has.avx512 && has.avx512_vbmi && has.avx512_vnni ? &kTileKernel : nullptr;
}

}  // namespace kvasir::attention::cpu
#else
namespace kvasir::attention::cpu {
const TileKernel* byte_vectors() { return nullptr; }
}  // namespace kvasir::attention::cpu
#endif
