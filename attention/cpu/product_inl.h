// Small matrix products whose every element is one chain of FMAs in order. Included by kernels_inl.h only.

struct Packed {
  const float* b;
  int stride;
  struct Row {
    const float* at;
    V operator()(int n) const { return load(at + n); }
  };
  Row row(int k) const { return {b + k * stride}; }
};

// c[r][n..] = c * correction (or 0) + sum over k in [k0, k1) of a[r][k] * b.row(k)(n..), in order of k.
template <int R, int C, class B>
inline void product(const float* a, int a_stride, const B b, int k0, int k1, const float* correction, float* c,
                    int c_stride, int n, Ahead& ahead) {
  V acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < C; ++i)
      acc[r][i] = correction ? mul(load(c + r * c_stride + n + i * W), set1(correction[r])) : zero();
  for (int k = k0; k < k1;) {
    fetch(ahead);
    for (const int stop = k + kAheadEvery < k1 ? k + kAheadEvery : k1; k < stop; ++k) {
      V x[C];
      const auto row = b.row(k);
      for (int i = 0; i < C; ++i) x[i] = row(n + i * W);
      for (int r = 0; r < R; ++r) {
        V w = set1(a[r * a_stride + k]);
        for (int i = 0; i < C; ++i) acc[r][i] = fma_v(w, x[i], acc[r][i]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < C; ++i) store(c + r * c_stride + n + i * W, acc[r][i]);
}

template <int R, int C, class B>
inline void product_columns(const float* a, int a_stride, const B& b, int k0, int k1, const float* correction, float* c,
                            int c_stride, int n, int n1, Ahead& ahead) {
  for (; n + C * W <= n1; n += C * W) product<R, C>(a, a_stride, b, k0, k1, correction, c, c_stride, n, ahead);
  if constexpr (C > 1) product_columns<R, C / 2>(a, a_stride, b, k0, k1, correction, c, c_stride, n, n1, ahead);
}

// kWideRows: reading b costs more than a load, so that up to eight rows share each read.
template <bool kWideRows, class B>
inline void product_all(const float* a, int rows, int a_stride, const B& b, int k0, int k1, const float* correction,
                        float* c, int c_stride, int n0, int n1, Ahead& ahead) {
  int r = 0;
  auto go = [&](auto count) {
    constexpr int R = decltype(count)::value, kVectors = R <= 2 ? kFewColumns : kColumns;
    constexpr int C = kWideRows && R > 4 ? kWideColumns : kVectors;
    product_columns<R, C>(a + r * a_stride, a_stride, b, k0, k1, correction ? correction + r : nullptr,
                          c + r * c_stride, c_stride, n0, n1, ahead);
    r += R;
  };
  while (rows - r > 8) go(Count<6>{});
  if constexpr (kWideRows) {
    if (rows - r == 8) return go(Count<8>{});
    if (rows - r == 7) return go(Count<7>{});
  }
  if (rows - r > 6) go(Count<4>{});
  switch (rows - r) {
    case 6: return go(Count<6>{});
    case 5: return go(Count<5>{});
    case 4: return go(Count<4>{});
    case 3: return go(Count<3>{});
    case 2: return go(Count<2>{});
    case 1: return go(Count<1>{});
    default: return;
  }
}

void scores(const float* q, int rows, int q_stride, int head_dim, const float* kt, int begin, int end, float* s,
            Ahead* ahead) {
  product_all<false>(q, rows, q_stride, Packed{kt, kTile}, 0, head_dim, nullptr, s, kTile, begin / W * W,
                     (end + W - 1) / W * W, *ahead);
}

// The same straight from turned keys, converted where they are used: for few rows.
template <int R, int C, class Turned>
inline void turned_product(const float* q, int q_stride, const Turned keys, int head_dim, float* s, int j,
                           Ahead& ahead) {
  constexpr int kPer = Turned::kPer, kChunk = kPer > kAheadEvery ? kPer : kAheadEvery;
  V acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < C; ++i) acc[r][i] = zero();
  for (int d = 0; d < head_dim;) {
    fetch(ahead);
    for (const int stop = d + kChunk < head_dim ? d + kChunk : head_dim; d < stop; d += kPer) {
      typename Turned::Word word[C];
      for (int i = 0; i < C; ++i) word[i] = keys.word(d / kPer, d, j + i * W, j + i * W);
      each_element<kPer>(stop - d, [&](auto element) {
        constexpr int e = decltype(element)::value;
        V x[C];
        for (int i = 0; i < C; ++i) x[i] = word[i].template element<e>();
        for (int r = 0; r < R; ++r) {
          V w = set1(q[r * q_stride + d + e]);
          for (int i = 0; i < C; ++i) acc[r][i] = fma_v(w, x[i], acc[r][i]);
        }
      });
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < C; ++i) store(s + r * kTile + j + i * W, acc[r][i]);
}

template <int R, int C, class Turned>
inline void turned_columns(const float* q, int q_stride, const Turned& keys, int head_dim, float* s, int j, int end,
                           Ahead& ahead) {
  for (; j + C * W <= end; j += C * W) turned_product<R, C>(q, q_stride, keys, head_dim, s, j, ahead);
  if constexpr (C > 1) turned_columns<R, C / 2>(q, q_stride, keys, head_dim, s, j, end, ahead);
}

void scores_rows(const float* q, int rows, int q_stride, const KvRows& k, void* spare, float* s, Ahead* ahead) {
  by_type(k, [&]<DType kType, Scaling kScaling>(const float* table) {
    using T = Columns<kType, kScaling, kTile>;
    const int head_dim = k.head_dim, begin = k.begin / W * W, end = (k.end + W - 1) / W * W;
    constexpr int kElement = T::kHalves ? 2 : 4;
    for (int d0 = 0; d0 < head_dim; d0 += T::kStep)
      for (int j = begin; j < end; j += W) {
        T::turn(k.row + j, d0, head_dim, static_cast<char*>(spare) + (d0 / T::kPer * kTile + j) * kElement, *ahead);
      }
    const T keys(spare, table, k);
    auto go = [&](auto count) {
      constexpr int R = decltype(count)::value, C = R > 4 ? kWideColumns : kColumns;
      turned_columns<R, C>(q, q_stride, keys, head_dim, s, begin, end, *ahead);
    };
    switch (rows) {
      case 1: return go(Count<1>{});
      case 2: return go(Count<2>{});
      case 3: return go(Count<3>{});
      case 4: return go(Count<4>{});
      case 5: return go(Count<5>{});
      case 6: return go(Count<6>{});
      case 7: return go(Count<7>{});
      default: return go(Count<8>{});
    }
  });
}

void accumulate(const float* p, int rows, const float* v, int v_stride, int begin, int end, const float* correction,
                float* o, int o_stride, Ahead* ahead) {
  product_all<false>(p, rows, kTile, Packed{v, v_stride}, begin, end, correction, o, o_stride, 0, o_stride, *ahead);
}

void accumulate_rows(const float* p, int rows, const KvRows& v, const float* correction, float* o, int o_stride,
                     Ahead* ahead) {
  int n = (v.head_dim + W - 1) / W * W;
  with_reader(v, [&](const auto& read) {
    product_all<true>(p, rows, kTile, read, v.begin, v.end, correction, o, o_stride, 0, n, *ahead);
  });
}
