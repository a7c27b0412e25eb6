// int8 and int4 caches whose scales meet sums instead of elements: of a key the sum over each group, of a value the
// key's weight. What is multiplied is the integers as floats, so that a group costs one multiplication and each further
// row nothing but its FMAs. Included after kernels_inl.h by instruction sets whose vectors have eight lanes.
//
//   score[j]  = for each lane, over the groups in order, fma of (chain of fma over the group's elements) by the scale;
//               then the tree of the lanes' sums
//   out[d]    = out[d] * correction, then fma over the tile's keys of weight * scale; int4 begins at 0 and is added
//
// int4 stands as `raw` vectors, two for sixteen elements: u = the even ones + 8, and t = 16 * the odd ones + u, which a
// conversion of whole bytes gives. Queries are divided, and sums of values parted, so that it comes to the same.

constexpr int kPair = 2 * W;  // elements that are read together
constexpr int kLeastGroup = kPair;

struct GroupSums {
  int head_dim, group, groups, q_stride;
  const float* queries;  // [row][q_stride], raw
  float* own;            // where those of int4 are made
  float* first;          // [row][group][lane]: what a sum begins with
  float* weights;        // [row][key] of one group
  float* all;            // [row]: the sum of those
  float* tile;           // keys [raw element][key], and then values [key][raw element], as floats
  float* sums;           // [row][raw element] of int4's values
};

inline GroupSums& group_sums(uint8_t* memory) { return *reinterpret_cast<GroupSums*>(memory); }

template <class F>
inline void each_part(int rows, int head_dim, const F& f) {
  f(&GroupSums::own, rows * head_dim);
  f(&GroupSums::first, rows * (head_dim / kLeastGroup) * W);
  f(&GroupSums::weights, rows * kTile);
  f(&GroupSums::all, rows);
  f(&GroupSums::tile, kTile * head_dim);
  f(&GroupSums::sums, rows * head_dim);
}

int64_t group_sums_bytes(int rows, int head_dim) {
  int64_t n = 128;
  each_part(rows, head_dim, [&](auto, int64_t floats) { n += (floats * 4 + 63) / 64 * 64; });
  return n;
}

// ---- elements -------------------------------------------------------------------------------------

// Of bytes: u and t as above.
inline void part_bytes(__m256i bytes, V& u, V& t) {
  const __m256i odd_and_u = _mm256_xor_si256(bytes, _mm256_set1_epi32(8));
  u = _mm256_cvtepi32_ps(_mm256_and_si256(odd_and_u, _mm256_set1_epi32(15)));
  t = _mm256_cvtepi32_ps(odd_and_u);
}

template <DType T>
[[gnu::always_inline]] inline void read_pair(const uint8_t* row, int d, V (&x)[2]) {
  if constexpr (T == DType::i8) {
    x[0] = load_i8(row + d), x[1] = load_i8(row + d + W);
  } else {
    part_bytes(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + d / 2))), x[0], x[1]);
  }
}

// One of the two.
template <DType T, int kWhich>
[[gnu::always_inline]] inline V read_one(const uint8_t* row, int d) {
  if constexpr (T == DType::i8) return load_i8(row + d + kWhich * W);
  V x[2];
  read_pair<T>(row, d, x);
  return x[kWhich];
}

inline void apart(V a, V b, V& even, V& odd) {
  auto in_order = [](V x) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8)); };
  even = in_order(_mm256_shuffle_ps(a, b, 0x88)), odd = in_order(_mm256_shuffle_ps(a, b, 0xdd));
}
inline void together(V even, V odd, V& a, V& b) {
  const V low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
  a = _mm256_permute2f128_ps(low, high, 0x20), b = _mm256_permute2f128_ps(low, high, 0x31);
}

void group_sums_begin(const float* q, int rows, int q_stride, const CacheKind& kind, uint8_t* memory) {
  GroupSums& m = group_sums(memory);
  const int dim = kind.head_dim;
  m.head_dim = dim, m.group = kind.grouped ? kind.group : dim, m.groups = dim / m.group;
  m.queries = q, m.q_stride = q_stride;
  uint8_t* at = memory + 128;
  each_part(rows, dim, [&](auto member, int64_t floats) {
    m.*member = reinterpret_cast<float*>(at);
    at += (floats * 4 + 63) / 64 * 64;
  });
  if (kind.dtype == DType::i8) return;
  m.queries = m.own, m.q_stride = dim;
  for (int r = 0; r < rows; ++r)
    for (int g = 0; g < m.groups; ++g) {
      V less = zero();
      for (int d = g * m.group; d < (g + 1) * m.group; d += kPair) {
        V even, odd;
        apart(load(q + r * q_stride + d), load(q + r * q_stride + d + W), even, odd);
        odd = mul(odd, set1(0.0625f));
        less = fma_v(set1(-8.0f), even, less);
        store(m.own + r * dim + d, sub(even, odd));
        store(m.own + r * dim + d + W, odd);
      }
      store(m.first + (r * m.groups + g) * W, less);
    }
}
void group_sums_end() {}

// Two groups' float16 scales, which lie together, as [group][key].
inline void two_groups_scales(const KvRows& k, int offset, float* to) {
  alignas(64) uint32_t both[kTile];
  const int begin = k.begin / W * W, end = (k.end + W - 1) / W * W;
  for (int j = begin; j < end; ++j) __builtin_memcpy(both + j, k.scales[j] + offset, 4);
  for (int j = begin; j < end; j += W) {
    const __m256i x = load_words(reinterpret_cast<const uint8_t*>(both + j));
    const __m256i halves =
        _mm256_packus_epi32(_mm256_and_si256(x, _mm256_set1_epi32(0xffff)), _mm256_srli_epi32(x, 16));
    const __m256i in_order = _mm256_permute4x64_epi64(halves, 0xd8);
    store(to + j, _mm256_cvtph_ps(_mm256_castsi256_si128(in_order)));
    store(to + kTile + j, _mm256_cvtph_ps(_mm256_extracti128_si256(in_order, 1)));
  }
}

// f(scales of the tile as [group][key]).
template <class F>
inline void with_scales(const KvRows& k, int groups, const F& f) {
  alignas(64) float table[kTile * (kMaxHeadDim / kLeastGroup)];
  if (!k.grouped) {
    for (int j = 0; j < kTile; j += W) store(table + j, set1(k.scale));
    return f(table);
  }
  if (groups == 1) return f(ScaleTable<true>(k).at);
  if (k.scale_dtype != DType::f16 || groups % 2 != 0) return f(ScaleTable<false>(k).at);
  for (int g = 0; g < groups; g += 2) two_groups_scales(k, 2 * g, table + g * kTile);
  f(table);
}

// ---- scores ---------------------------------------------------------------------------------------

template <DType T, int R>
[[gnu::noinline]] void direct_sums(const GroupSums& m, int row, const KvRows& keys, const float* scales, float* s,
                                   Ahead& ahead) {
  constexpr int K = keys_at_once(R);
  const int group = m.group, groups = m.groups, stride = m.q_stride;
  const float* q = m.queries + row * stride;
  const float* first = m.first + row * groups * W;
  const int end = (keys.end + W - 1) / W * W;
  alignas(64) float lanes[R * W * W];
  for (int j = keys.begin / W * W; j < end; j += W) {
    for (int k = 0; k < W; k += K) {
      const uint8_t* at[K];
      for (int i = 0; i < K; ++i) at[i] = keys.row[j + k + i];
      auto add_group = [&](int g, auto is_first) {
        V acc[K][R];
        for (int r = 0; r < R; ++r) {
          const V begin = T == DType::i4 ? load(first + (r * groups + g) * W) : zero();
          for (int i = 0; i < K; ++i) acc[i][r] = begin;
        }
        for (int d = g * group; d < (g + 1) * group; d += kPair) {
          if (k == 0) fetch(ahead);
          const float* of_d = q + d;
          V w[2][K >= R ? R : 1];
          if constexpr (K >= R)
            for (int v = 0; v < 2; ++v)
              for (int r = 0; r < R; ++r) w[v][r] = hold(load(of_d + r * stride + v * W));
          for (int i = 0; i < K; ++i) {
            V x[2];
            read_pair<T>(at[i], d, x);
            for (int v = 0; v < 2; ++v)
              for (int r = 0; r < R; ++r) {
                if constexpr (K >= R)
                  acc[i][r] = fma_v(w[v][r], x[v], acc[i][r]);
                else
                  acc[i][r] = fma_v(load(of_d + r * stride + v * W), x[v], acc[i][r]);
              }
          }
        }
#pragma GCC unroll 8
        for (int i = 0; i < K; ++i) {
          const V scale = set1(scales[g * kTile + j + k + i]);
          for (int r = 0; r < R; ++r) {
            float* total = lanes + (r * W + k + i) * W;
            V before = zero();
            if constexpr (!decltype(is_first)::value) before = load(total);
            store(total, fma_v(acc[i][r], scale, before));
          }
        }
      };
      add_group(0, Count<1>{});
      for (int g = 1; g < groups; ++g) add_group(g, Count<0>{});
    }
    for (int r = 0; r < R; ++r) store(s + r * kTile + j, sum_rows(lanes + r * W * W));
  }
}

// The tile's wanted keys as raw floats, a key a lane.
template <DType T>
void turn_keys(const GroupSums& m, const KvRows& keys, Ahead& ahead) {
  constexpr int kStep = W * 32 / bits_of(T);
  alignas(64) uint32_t words[W * W];
  for (int j = keys.begin / W * W; j < keys.end; j += W)
    for (int d0 = 0; d0 < m.head_dim; d0 += kStep) {
      turn_words<T>(keys.row + j, d0, m.head_dim, words, ahead);
      const int bytes = (m.head_dim - d0 < kStep ? m.head_dim - d0 : kStep) * bits_of(T) / 8;
      for (int b = 0; b < bytes; b += 4) {
        const __m256i word = load_words(reinterpret_cast<const uint8_t*>(words + b / 4 * W));
        each_element<4>(4, [&](auto e) {
          constexpr int kByte = decltype(e)::value;
          const __m256i x = _mm256_srai_epi32(_mm256_slli_epi32(word, 24 - 8 * kByte), 24);
          if constexpr (T == DType::i8) {
            store(m.tile + (d0 + b + kByte) * kTile + j, _mm256_cvtepi32_ps(x));
          } else {
            V u, t;
            part_bytes(x, u, t);
            float* to = m.tile + (d0 + (b + kByte) / W * kPair + (b + kByte) % W) * kTile + j;
            store(to, u), store(to + W * kTile, t);
          }
        });
      }
    }
}

template <DType T, int R>
inline void turned_sums(const GroupSums& m, int row, const float* scales, float* s, int n, Ahead& ahead) {
  const int group = m.group, groups = m.groups, stride = m.q_stride;
  const float* q = m.queries + row * stride;
  const float* first = m.first + row * groups * W;
  by_lane_pairs<R, 1>(s, n, ahead, [&](int lane, V(&low)[R][1], V(&high)[R][1]) {
    for (int r = 0; r < R; ++r) low[r][0] = high[r][0] = zero();
    for (int g = 0; g < groups; ++g) {
      V sum[2][R];
      for (int h = 0; h < 2; ++h)
        for (int r = 0; r < R; ++r)
          sum[h][r] = T == DType::i4 ? set1(first[(r * groups + g) * W + lane + h * W / 2]) : zero();
      for (int d = g * group + lane; d < (g + 1) * group; d += W)
        for (int h = 0; h < 2; ++h) {
          const V x = load(m.tile + (d + h * W / 2) * kTile + n);
          for (int r = 0; r < R; ++r) sum[h][r] = fma_v(set1(q[r * stride + d + h * W / 2]), x, sum[h][r]);
        }
      const V scale = load(scales + g * kTile + n);
      for (int r = 0; r < R; ++r) {
        low[r][0] = fma_v(sum[0][r], scale, low[r][0]);
        high[r][0] = fma_v(sum[1][r], scale, high[r][0]);
      }
    }
  });
}

template <DType T>
void turned_rows(const GroupSums& m, int row, int rows, const KvRows& k, const float* scales, float* s, Ahead& ahead) {
  auto go = [&](auto count, int r) {
    constexpr int R = decltype(count)::value;
    for (int n = k.begin / W * W; n < k.end; n += W) turned_sums<T, R>(m, row + r, scales, s + r * kTile, n, ahead);
  };
  int r = 0;
  for (; rows - r >= 6; r += 6) go(Count<6>{}, r);
  if (rows - r >= 4) go(Count<4>{}, r), r += 4;
  if (rows - r >= 2) go(Count<2>{}, r), r += 2;
  if (rows - r >= 1) go(Count<1>{}, r);
}

template <DType T>
void group_scores_of(int row, int rows, const KvRows& k, float* s, const GroupSums& m, Ahead& ahead) {
  with_scales(k, m.groups, [&](const float* scales) {
    if (rows <= kFewRows)
      return by_few_rows(rows,
                         [&](auto count) { direct_sums<T, decltype(count)::value>(m, row, k, scales, s, ahead); });
    turn_keys<T>(m, k, ahead);
    turned_rows<T>(m, row, rows, k, scales, s, ahead);
  });
}

void group_scores(int row, int rows, const KvRows& keys, const KvRows&, float* s, uint8_t* memory, Ahead* ahead) {
  if (keys.dtype == DType::i8)
    group_scores_of<DType::i8>(row, rows, keys, s, group_sums(memory), *ahead);
  else
    group_scores_of<DType::i4>(row, rows, keys, s, group_sums(memory), *ahead);
}

// ---- values ---------------------------------------------------------------------------------------

// o[r][n..] of 2 * P vectors.
template <DType T, int R, int P>
inline void add_some_values(const float* weights, const KvRows& v, const float* correction, float* o, int o_stride,
                            int n, Ahead& ahead) {
  constexpr int kEvery = 16 / P;
  V acc[R][P][2];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < P; ++i)
      for (int h = 0; h < 2; ++h)
        acc[r][i][h] =
            T == DType::i4 ? zero() : mul(load(o + r * o_stride + n + i * kPair + h * W), set1(correction[r]));
  for (int k = v.begin; k < v.end;) {
    fetch(ahead);
    for (const int stop = k + kEvery < v.end ? k + kEvery : v.end; k < stop; ++k) {
      const uint8_t* at = v.row[k];
      V w[R];
      for (int r = 0; r < R; ++r) w[r] = set1(weights[r * kTile + k]);
      for (int i = 0; i < P; ++i) {
        V x[2];
        read_pair<T>(at, n + i * kPair, x);
        for (int r = 0; r < R; ++r)
          for (int h = 0; h < 2; ++h) acc[r][i][h] = fma_v(w[r], x[h], acc[r][i][h]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < P; ++i)
      for (int h = 0; h < 2; ++h) store(o + r * o_stride + n + i * kPair + h * W, acc[r][i][h]);
}

template <DType T, int R, int P>
inline void add_values_to(const float* weights, const KvRows& v, const float* correction, float* o, int o_stride, int n,
                          int n1, Ahead& ahead) {
  for (; n + P * kPair <= n1; n += P * kPair) add_some_values<T, R, P>(weights, v, correction, o, o_stride, n, ahead);
  if constexpr (P > 1) add_values_to<T, R, P / 2>(weights, v, correction, o, o_stride, n, n1, ahead);
}

template <DType T, int R, int P>
[[gnu::noinline]] void add_values(const float* weights, const KvRows& v, const float* correction, float* o,
                                  int o_stride, int n, int n1, Ahead& ahead) {
  add_values_to<T, R, P>(weights, v, correction, o, o_stride, n, n1, ahead);
}

// The same for more rows, a vector at a time.
template <DType T, int R, int kWhich>
[[gnu::noinline]] void add_vectors(const float* weights, const KvRows& v, const float* correction, float* o,
                                   int o_stride, int n, int n1, Ahead& ahead) {
  constexpr int kEvery = 32;
  for (; n < n1; n += kPair) {
    float* out = o + n + kWhich * W;
    V acc[R];
    for (int r = 0; r < R; ++r) acc[r] = T == DType::i4 ? zero() : mul(load(out + r * o_stride), set1(correction[r]));
    for (int k = v.begin; k < v.end;) {
      fetch(ahead);
      for (const int stop = k + kEvery < v.end ? k + kEvery : v.end; k < stop; ++k) {
        const V x = read_one<T, kWhich>(v.row[k], n);
        for (int r = 0; r < R; ++r) acc[r] = fma_v(set1(weights[r * kTile + k]), x, acc[r]);
      }
    }
    for (int r = 0; r < R; ++r) store(out + r * o_stride, acc[r]);
  }
}

// Sums of raw vectors, with all their weights' sum, to what the elements' sums are.
inline void part_sums(const float* sums, int n, float all, float correction, float* o) {
  const V before = set1(correction);
  for (int d = 0; d < n; d += kPair) {
    const V u = load(sums + d), odd = mul(sub(load(sums + d + W), u), set1(0.0625f));
    V a, b;
    together(fma_v(set1(-8.0f), set1(all), u), odd, a, b);
    store(o + d, fma_v(load(o + d), before, a));
    store(o + d + W, fma_v(load(o + d + W), before, b));
  }
}

template <DType T>
void group_values_of(const float* p, int rows, const KvRows& v, const float* correction, float* o, int o_stride,
                     const GroupSums& m, Ahead& ahead) {
  const int dim = m.head_dim, begin = v.begin / W * W;
  const bool parted = T == DType::i4;
  float* to = parted ? m.sums : o;
  const int to_stride = parted ? dim : o_stride;
  if (rows > kFewRows)
    for (int j = v.begin; j < v.end; ++j) {
      fetch(ahead);
      for (int d = 0; d < dim; d += kPair) {
        V x[2];
        read_pair<T>(v.row[j], d, x);
        store(m.tile + j * dim + d, x[0]), store(m.tile + j * dim + d + W, x[1]);
      }
    }
  with_scales(v, m.groups, [&](const float* scales) {
    for (int g = 0; g < m.groups; ++g) {
      const int n = g * m.group, n1 = n + m.group;
      alignas(64) float lanes[W];
      for (int r = 0; r < rows; ++r) {
        V sum = zero();
        for (int j = begin; j < v.end; j += W) {
          const V w = mul(load(p + r * kTile + j), load(scales + g * kTile + j));
          store(m.weights + r * kTile + j, w);
          sum = add(sum, w);
        }
        if (!parted) continue;
        store(lanes, sum);
        m.all[r] = 0;
        for (float lane : lanes) m.all[r] += lane;
      }
      if (rows > kFewRows)
        product_all<false>(m.weights, rows, kTile, Packed{m.tile, dim}, v.begin, v.end, parted ? nullptr : correction,
                           to, to_stride, n, n1, ahead);
      else
        by_few_rows(rows, [&](auto count) {
          constexpr int R = decltype(count)::value;
          if constexpr (R > 4) {
            add_vectors<T, R, 0>(m.weights, v, correction, to, to_stride, n, n1, ahead);
            add_vectors<T, R, 1>(m.weights, v, correction, to, to_stride, n, n1, ahead);
          } else {
            constexpr int kPairs = R == 1 ? 4 : R == 2 ? 2 : 1;
            add_values<T, R, kPairs>(m.weights, v, correction, to, to_stride, n, n1, ahead);
          }
        });
      if (parted)
        for (int r = 0; r < rows; ++r)
          part_sums(m.sums + r * dim + n, m.group, m.all[r], correction[r], o + r * o_stride + n);
    }
  });
}

void group_values(const float* p, int rows, const KvRows& v, const KvRows*, const float* correction, float* o,
                  int o_stride, uint8_t* memory, Ahead* ahead) {
  if (v.dtype == DType::i8)
    group_values_of<DType::i8>(p, rows, v, correction, o, o_stride, group_sums(memory), *ahead);
  else
    group_values_of<DType::i4>(p, rows, v, correction, o, o_stride, group_sums(memory), *ahead);
}

bool group_sums_take(const CacheKind& kind) {
  const bool type = kind.dtype == DType::i8 || (kind.dtype == DType::i4 && kind.grouped);
  return type && kind.head_dim % kPair == 0 && (!kind.grouped || kind.group >= kLeastGroup);
}
bool group_sums_pay(const CacheKind&) { return true; }

int group_sums_stops(int head_dim) { return head_dim * 3 / 4; }  // two in three for keys

// int8's larger tiles are read for as long as they are worked on.
Reach group_sums_reach(const KvRows& keys) {
  return keys.dtype == DType::i8 && keys.head_dim >= 128 ? Reach::all : Reach::next;
}

constexpr Matrix kGroupSums = {group_sums_take, group_sums_pay, group_sums_bytes, group_sums_begin, group_sums_end,
                               group_scores,    group_values,   group_sums_stops, group_sums_reach};
