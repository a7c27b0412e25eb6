// Reading one head's K or V of a tile: as rows (lanes along head_dim) and as columns (lanes along keys).
#pragma once

#include "attention/cpu/prefetch.h"
#include "simd/simd.h"

namespace kvasir::attention::cpu {
namespace {

using namespace simd;  // the vectors of this translation unit

constexpr int kPrefetchEvery = 4;  // rows or steps
constexpr int kPackedEvery = 16;   // keys

// f(Count<rows>) for the few rows that read the cache themselves.
template <class F>
inline void by_few_rows(int rows, const F& f) {
  switch (rows) {
    case 1: return f(Count<1>{});
    case 2: return f(Count<2>{});
    case 3: return f(Count<3>{});
    case 4: return f(Count<4>{});
    case 5: return f(Count<5>{});
    case 6: return f(Count<6>{});
    case 7: return f(Count<7>{});
    default: return f(Count<8>{});
  }
}

constexpr int bits_of(DType type) {
  return type == DType::f32 ? 32 : type == DType::f16 || type == DType::bf16 ? 16 : type == DType::i4 ? 4 : 8;
}

template <DType kType>
inline V read_vector(const uint8_t* p) {
  if constexpr (kType == DType::f32) return load(reinterpret_cast<const float*>(p));
  if constexpr (kType == DType::f16) return load_f16(p);
  if constexpr (kType == DType::bf16) return load_bf16(p);
  if constexpr (kType == DType::i8) return load_i8(p);
  if constexpr (kType == DType::i4) return load_i4(p);
  if constexpr (kType == DType::f8_e4m3) return load_e4m3(p);
}

#if !KVASIR_SIMD_NIBBLE_TABLE
template <DType kType>
inline void read_four(const uint8_t* p, V scale, V (&x)[4]) {
  for (int v = 0; v < 4; ++v) x[v] = mul(read_vector<kType>(p + v * W * bits_of(kType) / 8), scale);
}
#else
template <DType kType>
inline void read_four(const uint8_t* p, V scale, V (&x)[4]) {
  if constexpr (kType == DType::i4) {
    const V table = nibbles_times(scale);
    for (int v = 0; v < 4; ++v) x[v] = look_up_i4(p + v * W / 2, table);
  } else {
    for (int v = 0; v < 4; ++v) x[v] = mul(read_vector<kType>(p + v * W * bits_of(kType) / 8), scale);
  }
}
#endif

// ---- scales ---------------------------------------------------------------------------------------

// half_vector: groups of eight where a vector holds two of them. four_vectors: each four of them, counted from the
// row's beginning, share a scale.
enum class Scaling { none, tensor, group, half_vector, four_vectors };

// The tile's scales as float32: for columns [head_dim/group][kTile], so that a vector holds one group of many keys;
// for rows [kTile][head_dim/group], as they lie.
template <bool kByRow>
struct ScaleTable {
  alignas(64) float at[kTile * (kMaxHeadDim / 8)];

  explicit ScaleTable(const KvRows& k) {
    const int groups = k.head_dim >> k.group_shift;
    if (k.scale_dtype == DType::f32) {
      collect<float>(k, groups, at);
      return;
    }
    alignas(64) uint16_t half[kTile * (kMaxHeadDim / 8)];
    collect<uint16_t>(k, groups, half);
    const int begin = k.begin / W * W, end = (k.end + W - 1) / W * W;
    auto convert = [&](int from, int to) {
      for (int i = from; i < to; i += W) store(at + i, load_f16(reinterpret_cast<const uint8_t*>(half + i)));
    };
    if constexpr (kByRow)
      convert(begin * groups, end * groups);
    else
      for (int g = 0; g < groups; ++g) convert(g * kTile + begin, g * kTile + end);
  }

 private:
  template <class T>
  static void collect(const KvRows& k, int groups, T* to) {
    if (kByRow && groups == 1) return collect_rows<sizeof(T)>(k, to);
    if (kByRow && groups == 2) return collect_rows<2 * sizeof(T)>(k, to);
    const int each = kByRow ? 1 : kTile, row = kByRow ? groups : 1;
    const int begin = k.begin / W * W, end = (k.end + W - 1) / W * W;
    for (int j = begin; j < end; ++j)
      for (int g = 0; g < groups; ++g)
        __builtin_memcpy(to + g * each + j * row, k.scales[j] + int(sizeof(T)) * g, sizeof(T));
  }
  template <int kBytes>
  static void collect_rows(const KvRows& k, void* to) {
    const int begin = k.begin / W * W, end = (k.end + W - 1) / W * W;
    for (int j = begin; j < end; ++j) __builtin_memcpy(static_cast<char*>(to) + j * kBytes, k.scales[j], kBytes);
  }
};

// ---- rows -----------------------------------------------------------------------------------------

// Rows of a tile, dequantized W elements at a time; past head_dim they are 0. Everything is held by value:
// vector stores may alias anything, and what is behind a reference would be read again after each of them.
template <DType kType, Scaling kScaling, bool kWhole>
struct RowReader {
  const uint8_t* const* rows;
  const float* table;
  V scale;
  int head_dim, group_shift, groups;

  RowReader(const KvRows& k, const float* scales)
      : rows(k.row),
        table(scales),
        scale(set1(k.scale)),
        head_dim(k.head_dim),
        group_shift(k.group_shift),
        groups(k.grouped ? k.head_dim >> k.group_shift : 0) {}

  static constexpr bool kFour = kScaling == Scaling::four_vectors;
  static constexpr bool kPlain = kWhole && kScaling == Scaling::none;  // read() is all there is to a vector
  static V read(const uint8_t* row, int d) { return read_vector<kType>(row + d * bits_of(kType) / 8); }

  struct TileRow {
    const RowReader& of;
    const uint8_t* at;
    const float* scales;
    // The vectors of d, d + W, .. that share a scale.
    void four(int d, V (&x)[4]) const {
      read_four<kType>(at + d * bits_of(kType) / 8, set1(scales[d >> of.group_shift]), x);
    }
    V operator()(int d) const {
      V x;
      if (kWhole || __builtin_expect(d + W <= of.head_dim, 1)) {
        x = read_vector<kType>(at + d * bits_of(kType) / 8);
      } else {
        alignas(64) uint8_t tail[W * 4] = {};
        __builtin_memcpy(tail, at + d * bits_of(kType) / 8, size_t((of.head_dim - d) * bits_of(kType) / 8));
        x = read_vector<kType>(tail);
      }
      if constexpr (kScaling == Scaling::tensor) x = mul(x, of.scale);
      if constexpr (kScaling == Scaling::group || kFour) x = mul(x, set1(scales[d >> of.group_shift]));
      if constexpr (kScaling == Scaling::half_vector) {
        const float low = scales[d / 8];
        x = mul(x, two_halves(low, kWhole || d + 8 < of.head_dim ? scales[d / 8 + 1] : low));
      }
      return x;
    }
  };
  TileRow row(int r) const { return {*this, rows[r], table + r * groups}; }
};

template <DType kType, Scaling kScaling, class F>
inline void with_tail(const KvRows& k, const float* table, const F& f) {
  if (k.head_dim % W == 0)
    f(RowReader<kType, kScaling, true>(k, table));
  else
    f(RowReader<kType, kScaling, false>(k, table));
}

alignas(64) constexpr float kNoScales[kTile] = {};  // a table for those that have none: no null is added to

// f.template operator()<type, scaling>(table) for what the cache holds.
template <bool kByRow, class F>
inline void by_type(const KvRows& k, const F& f) {
  if (k.grouped) {
    const ScaleTable<kByRow> scales(k);
    return k.dtype == DType::i8 ? f.template operator()<DType::i8, Scaling::group>(scales.at)
                                : f.template operator()<DType::i4, Scaling::group>(scales.at);
  }
  switch (k.dtype) {
    case DType::f32: return f.template operator()<DType::f32, Scaling::none>(kNoScales);
    case DType::f16: return f.template operator()<DType::f16, Scaling::none>(kNoScales);
    case DType::bf16: return f.template operator()<DType::bf16, Scaling::none>(kNoScales);
    case DType::i8: return f.template operator()<DType::i8, Scaling::tensor>(kNoScales);
    default: return f.template operator()<DType::f8_e4m3, Scaling::tensor>(kNoScales);
  }
}

template <class F>
inline void with_reader(const KvRows& k, const F& f) {
  by_type<true>(k, [&]<DType kType, Scaling kScaling>(const float* table) {
    if constexpr (kScaling == Scaling::group && W > 8)
      if (k.group < W) return with_tail<kType, Scaling::half_vector>(k, table, f);
    if constexpr (kScaling == Scaling::group)
      if (k.group >= 4 * W && k.head_dim % (4 * W) == 0)
        return f(RowReader<kType, Scaling::four_vectors, true>(k, table));
    with_tail<kType, kScaling>(k, table, f);
  });
}

void pack_values(const KvRows& k, float* v, int stride, Prefetcher* ahead) {
  with_reader(k, [begin = k.begin, end = k.end, head_dim = k.head_dim, v, stride, ahead](const auto reader) {
    for (int j = begin; j < end; ++j) {
      prefetch(*ahead);
      const auto row = reader.row(j);
      for (int d = 0; d < head_dim; d += W) store(v + j * stride + d, row(d));
    }
  });
}

// ---- columns --------------------------------------------------------------------------------------

// Keys are transposed as they lie, in 32-bit words of one, two, four or eight elements: a narrow type costs that
// much less than transposing it once it is float32. Word w of key j comes to out[w * W + j].
template <DType kType>
inline void transpose_words(const uint8_t* const* rows, int d0, int head_dim, uint32_t* out, Prefetcher& ahead) {
  constexpr int kBits = bits_of(kType), kStep = W * 32 / kBits;
  const int left = head_dim - d0, offset = d0 * kBits / 8;
  Words r[W];
  if (left >= kStep) {
    for (int i = 0; i < W; ++i) {
      if (i % kPrefetchEvery == 0) prefetch(ahead);
      r[i] = load_words(rows[i] + offset);
    }
    transpose(r);
    for (int i = 0; i < W; ++i) store_words(out + i * W, r[i]);
  } else {
    for (int i = 0; i < W; ++i) {
      if (i % kPrefetchEvery == 0) prefetch(ahead);
      r[i] = load_some(rows[i] + offset, left * kBits / 8);
    }
    transpose(r);
    for (int i = 0; i * 32 < left * kBits; ++i) store_words(out + i * W, r[i]);
  }
}

#if KVASIR_SIMD_HALF_COLUMNS
// Where the processor converts float16 only when it lies together: transposed in 16-bit units, FP8 as float16.
// Element d of key j comes to out[d * W + j].
template <DType kType>
inline void transpose_halves(const uint8_t* const* rows, int d0, int head_dim, uint16_t* out, Prefetcher& ahead) {
  const int left = head_dim - d0, offset = d0 * bits_of(kType) / 8;
  Words r[W];
  for (int i = 0; i < W; ++i) {
    const uint8_t* at = rows[i] + offset;
    if (i % kPrefetchEvery == 0) prefetch(ahead);
    if constexpr (kType == DType::f16)
      r[i] = left >= 2 * W ? load_words(at) : load_some(at, left * 2);
    else
      r[i] = halves_of_e4m3(left >= 2 * W ? load_half_words(at) : load_half_some(at, left));
  }
  transpose_halves_to(r, out);
}
constexpr bool in_halves(DType type) { return type == DType::f16 || type == DType::f8_e4m3; }
#else
template <DType kType>
inline void transpose_halves(const uint8_t* const*, int, int, uint16_t*, Prefetcher&) {}
inline Words load_half_column(const uint16_t*) { return Words{}; }
inline V half_column(Words) { return zero(); }
constexpr bool in_halves(DType) { return false; }
#endif

// W columns of keys as float32: f(d, vector) for each d in [0, left), from transposed memory.
template <DType kType, Scaling kScaling>
struct Columns {
  static constexpr bool kHalves = in_halves(kType);
  static constexpr int kPer = kHalves ? 1 : 32 / bits_of(kType);
  static constexpr int kStep = kHalves ? 2 * W : W * kPer;  // elements of head_dim in a block

  const void* transposed;
  const float* table;
  V scale;
  int group_shift;

  Columns(const void* memory, const float* scales, const KvRows& k)
      : transposed(memory),
        table(scales),
        scale(set1(kHalves && kType == DType::f8_e4m3 ? k.scale * 256.0f : k.scale)),
        group_shift(k.group_shift) {}

  static void transpose_block(const uint8_t* const* rows, int d0, int head_dim, void* out, Prefetcher& ahead) {
    if constexpr (kHalves)
      transpose_halves<kType>(rows, d0, head_dim, static_cast<uint16_t*>(out), ahead);
    else
      transpose_words<kType>(rows, d0, head_dim, static_cast<uint32_t*>(out), ahead);
  }

  // The kPer elements d, d+1, .. that lie together, of keys [j, j+W).
  struct Word {
    Words raw;
    V by;
    template <int kElement>
    V element() const {
      V x;
      if constexpr (kHalves)
        x = half_column(raw);
      else
        x = element_of<kType, kElement>(raw);
      return kScaling == Scaling::none ? x : mul(x, by);
    }
  };
  // `w` counts words from the memory's beginning; `d` is the element and `j` the key for its scale.
  Word word(int w, int d, int j) const {
    Word x;
    if constexpr (kHalves)
      x.raw = load_half_column(static_cast<const uint16_t*>(transposed) + w * W);
    else
      x.raw = load_words(reinterpret_cast<const uint8_t*>(static_cast<const uint32_t*>(transposed) + w * W));
    x.by = scale;
    if constexpr (kScaling == Scaling::group) x.by = load(table + (d >> group_shift) * kTile + j);
    return x;
  }
};

template <int kPer, class F>
inline void each_element(int n, const F& f) {  // the first n of a word
  f(Count<0>{});
  if constexpr (kPer > 1)
    if (n > 1) f(Count<1>{});
  if constexpr (kPer > 2) {
    if (n > 2) f(Count<2>{});
    if (n > 3) f(Count<3>{});
  }
  if constexpr (kPer > 4) {
    if (n > 4) f(Count<4>{});
    if (n > 5) f(Count<5>{});
    if (n > 6) f(Count<6>{});
    if (n > 7) f(Count<7>{});
  }
}

void pack_keys(const KvRows& k, float* kt, Prefetcher* ahead) {
  by_type<false>(k, [&]<DType kType, Scaling kScaling>(const float* table) {
    using C = Columns<kType, kScaling>;
    alignas(64) uint32_t block[W * W];
    const C columns(block, table, k);
    const int head_dim = k.head_dim, end = k.end;
    for (int j = k.begin / W * W; j < end; j += W)
      for (int d0 = 0; d0 < head_dim; d0 += C::kStep) {
        C::transpose_block(k.row + j, d0, head_dim, block, *ahead);
        const int stop = d0 + C::kStep < head_dim ? d0 + C::kStep : head_dim;
        for (int d = d0, w = 0; d < stop; d += C::kPer, ++w) {
          const auto word = columns.word(w, d, j);
          each_element<C::kPer>(stop - d, [&](auto e) {
            store(kt + (d + decltype(e)::value) * kTile + j, word.template element<decltype(e)::value>());
          });
        }
      }
  });
}

}  // namespace
}  // namespace kvasir::attention::cpu
