// Scores of eight rows whose lanes are summed without leaving the registers: sixteen sums, of two keys, are taken
// together at once. (Where a store takes as long as two products, putting sums down and reading them again takes a
// quarter of a score.) They are the sums of scores_of_rows (product_inl.h). Included by kernels_inl.h where V has
// sixteen lanes only.

// Fewer rows ask for lines too seldom this way, and float32 waits for its own.
template <int R, class Reader>
constexpr bool folds() {
  return R == 8 && (Reader::kElement == DType::f16 || Reader::kElement == DType::bf16);
}

// Elements [d, d + W) of key j, whose row lies at `at`.
template <class Reader>
inline V read_at(const Reader& keys, const uint8_t* at, int j, int d) {
  auto row = keys.row(j);
  row.at = at;
  return row(d);
}

template <class Reader>
inline void folded_scores(const float* q, int q_stride, const Reader keys, int head_dim, int begin, int end, float* s,
                          Ahead& ahead) {
  constexpr int R = 8;
  for (int j = begin; j < end; j += 16) {
    V folded[R];  // the score of row r for the two keys of a turn in lanes r and 8 + r
    for (int t = 0; t < 8; ++t) {
      const int first = j + t + t / 4 * 4, second = first + 4;              // so that they end in order
      const uint8_t *at = keys.row(first).at, *next = keys.row(second).at;  // read once: fetch() leaves them alone
      V sums[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) sums[i] = zero();
      for (int d = 0; d < head_dim; d += W) {
        if (d / W % 2 == 0) fetch(ahead);  // as stops() counts
        const V x = read_at(keys, at, first, d), y = read_at(keys, next, second, d);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const V w = hold(load(q + r * q_stride + d));
          sums[r] = fma_v(w, x, sums[r]);
          sums[R + r] = fma_v(w, y, sums[R + r]);
        }
      }
      folded[t] = fold(sums, add);
    }
    turn_fours(folded);
    turn_fours(folded + 4);
    for (int r = 0; r < 4; ++r) {
      store(s + r * kTile + j, fours_apart<0>(folded[r], folded[r + 4]));
      store(s + (r + 4) * kTile + j, fours_apart<1>(folded[r], folded[r + 4]));
    }
  }
}
