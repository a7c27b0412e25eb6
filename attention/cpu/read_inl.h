// Reading one head's K or V of a tile: as rows (lanes along head_dim) and as columns (lanes along keys).
// Included by kernels_inl.h only.

inline void fetch(Ahead& ahead) {
  const int n = ahead.left < ahead.each ? ahead.left : ahead.each;
  for (int i = 0; i < n; ++i) __builtin_prefetch(ahead.line[i], 0, 2);  // as far as L2: L1 has too few waiting places
  ahead.line += n;
  ahead.left -= n;
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

// ---- scales ---------------------------------------------------------------------------------------

// half_vector: groups of eight where a vector holds two of them.
enum class Scaling { none, tensor, group, half_vector };

// The tile's scales as float32, [head_dim/group][kTile], so that a vector holds one group of many keys.
struct ScaleTable {
  alignas(64) float at[kTile * (kMaxHeadDim / 8)];

  explicit ScaleTable(const KvRows& k) {
    const int groups = k.head_dim >> k.group_shift;
    const int begin = k.begin / W * W, end = (k.end + W - 1) / W * W;
    if (k.scale_dtype == DType::f32) {
      for (int j = begin; j < end; ++j)
        for (int g = 0; g < groups; ++g) __builtin_memcpy(at + g * kTile + j, k.scales[j] + 4 * g, 4);
      return;
    }
    alignas(64) uint16_t half[kTile * (kMaxHeadDim / 8)];
    for (int j = begin; j < end; ++j)
      for (int g = 0; g < groups; ++g) __builtin_memcpy(half + g * kTile + j, k.scales[j] + 2 * g, 2);
    for (int g = 0; g < groups; ++g)
      for (int j = begin; j < end; j += W)
        store(at + g * kTile + j, load_f16(reinterpret_cast<const uint8_t*>(half + g * kTile + j)));
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
  int head_dim, group_shift;

  RowReader(const KvRows& k, const float* scales)
      : rows(k.row), table(scales), scale(set1(k.scale)), head_dim(k.head_dim), group_shift(k.group_shift) {}

  struct Row {
    const RowReader& of;
    const uint8_t* at;
    const float* scales;
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
      if constexpr (kScaling == Scaling::group) x = mul(x, set1(scales[(d >> of.group_shift) * kTile]));
      if constexpr (kScaling == Scaling::half_vector) {
        const float low = scales[d / 8 * kTile];
        x = mul(x, two_halves(low, kWhole || d + 8 < of.head_dim ? scales[(d / 8 + 1) * kTile] : low));
      }
      return x;
    }
  };
  Row row(int r) const { return {*this, rows[r], table + r}; }
};

template <DType kType, Scaling kScaling, class F>
inline void with_tail(const KvRows& k, const float* table, const F& f) {
  if (k.head_dim % W == 0)
    f(RowReader<kType, kScaling, true>(k, table));
  else
    f(RowReader<kType, kScaling, false>(k, table));
}

// f.template operator()<type, scaling>(table) for what the cache holds.
template <class F>
inline void by_type(const KvRows& k, const F& f) {
  if (k.grouped) {
    const ScaleTable scales(k);
    return k.dtype == DType::i8 ? f.template operator()<DType::i8, Scaling::group>(scales.at)
                                : f.template operator()<DType::i4, Scaling::group>(scales.at);
  }
  switch (k.dtype) {
    case DType::f32: return f.template operator()<DType::f32, Scaling::none>(nullptr);
    case DType::f16: return f.template operator()<DType::f16, Scaling::none>(nullptr);
    case DType::bf16: return f.template operator()<DType::bf16, Scaling::none>(nullptr);
    case DType::i8: return f.template operator()<DType::i8, Scaling::tensor>(nullptr);
    default: return f.template operator()<DType::f8_e4m3, Scaling::tensor>(nullptr);
  }
}

template <class F>
inline void with_reader(const KvRows& k, const F& f) {
  by_type(k, [&]<DType kType, Scaling kScaling>(const float* table) {
    if constexpr (kScaling == Scaling::group && W > 8)
      if (k.group < W) return with_tail<kType, Scaling::half_vector>(k, table, f);
    with_tail<kType, kScaling>(k, table, f);
  });
}

void pack_values(const KvRows& k, float* v, int stride, Ahead* ahead) {
  with_reader(k, [begin = k.begin, end = k.end, head_dim = k.head_dim, v, stride, ahead](const auto reader) {
    for (int j = begin; j < end; ++j) {
      if (j % 4 == 0) fetch(*ahead);
      const auto row = reader.row(j);
      for (int d = 0; d < head_dim; d += W) store(v + j * stride + d, row(d));
    }
  });
}

// ---- columns --------------------------------------------------------------------------------------

// Keys are turned as they lie, in 32-bit words of one, two, four or eight elements: a narrow type costs that
// much less than turning it once it is float32. May write up to seven rows past head_dim.
template <DType kType, Scaling kScaling>
inline void pack_words(const KvRows& k, const float* table, float* kt, Ahead* ahead) {
  constexpr int kBits = bits_of(kType), kPer = 32 / kBits, kStep = W * kPer;
  const V scale = set1(k.scale);
  const int head_dim = k.head_dim, shift = k.group_shift, end = k.end;
  for (int j = k.begin / W * W; j < end; j += W)
    for (int d0 = 0; d0 < head_dim; d0 += kStep) {
      fetch(*ahead);
      Words r[W];
      const int left = head_dim - d0;
      if (left >= kStep)
        for (int i = 0; i < W; ++i) r[i] = load_words(k.row[j + i] + d0 * kBits / 8);
      else
        for (int i = 0; i < W; ++i) r[i] = load_some(k.row[j + i] + d0 * kBits / 8, left * kBits / 8);
      transpose(r);
      auto word = [&](int i) {
        const int d = d0 + i * kPer;
        V by = scale;
        if constexpr (kScaling == Scaling::group) by = load(table + (d >> shift) * kTile + j);
        auto put = [&](auto n) {
          V x = element_of<kType, decltype(n)::value>(r[i]);
          store(kt + (d + decltype(n)::value) * kTile + j, kScaling == Scaling::none ? x : mul(x, by));
        };
        put(Count<0>{});
        if constexpr (kPer > 1) put(Count<1>{});
        if constexpr (kPer > 2) put(Count<2>{}), put(Count<3>{});
        if constexpr (kPer > 4) put(Count<4>{}), put(Count<5>{}), put(Count<6>{}), put(Count<7>{});
      };
      if (left >= kStep) {
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) word(i);
      } else {
        for (int i = 0; i < (left + kPer - 1) / kPer; ++i) word(i);
      }
    }
}

#if KVASIR_HALF_COLUMNS
// Where the processor converts float16 only when it lies together: turned in 16-bit units, FP8 as float16.
template <DType kType, Scaling kScaling>
inline void pack_halves(const KvRows& k, float* kt, Ahead* ahead) {
  constexpr int kBytes = bits_of(kType) / 8, kStep = 2 * W;
  const V scale = set1(kType == DType::f8_e4m3 ? k.scale * 256.0f : 1.0f);
  const int head_dim = k.head_dim, end = k.end;
  for (int j = k.begin / W * W; j < end; j += W)
    for (int d0 = 0; d0 < head_dim; d0 += kStep) {
      fetch(*ahead);
      Words r[W];
      const int left = head_dim - d0;
      for (int i = 0; i < W; ++i) {
        const uint8_t* at = k.row[j + i] + d0 * kBytes;
        if constexpr (kType == DType::f16)
          r[i] = left >= kStep ? load_words(at) : load_some(at, left * 2);
        else
          r[i] = halves_of_e4m3(left >= kStep ? load_half_words(at) : load_half_some(at, left));
      }
      HalfColumns columns;
      columns.turn(r);
      auto put = [&](int d) {
        V x = load_f16(columns.of(d));
        store(kt + (d0 + d) * kTile + j, kScaling == Scaling::none ? x : mul(x, scale));
      };
      if (left >= kStep) {
#pragma GCC unroll 32
        for (int d = 0; d < kStep; ++d) put(d);
      } else {
        for (int d = 0; d < left; ++d) put(d);
      }
    }
}
#else
template <DType kType, Scaling kScaling>
inline void pack_halves(const KvRows& k, float* kt, Ahead* ahead) {
  pack_words<kType, kScaling>(k, nullptr, kt, ahead);
}
#endif

void pack_keys(const KvRows& k, float* kt, Ahead* ahead) {
  by_type(k, [&]<DType kType, Scaling kScaling>(const float* table) {
    if constexpr (kType == DType::f16 || kType == DType::f8_e4m3)
      pack_halves<kType, kScaling>(k, kt, ahead);
    else
      pack_words<kType, kScaling>(k, table, kt, ahead);
  });
}
