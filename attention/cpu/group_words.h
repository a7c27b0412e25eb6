// int8 and int4 by words of elements: the table of group_word_elements.h.
#pragma once

#include <cpuid.h>

#include "attention/cpu/group_sums.h"
#include "attention/cpu/group_word_keys.h"
#include "attention/cpu/group_word_values.h"

namespace kvasir::attention::cpu {
namespace {

using namespace simd;  // the vectors of this translation unit

template <DType T>
void word_scores_of(int row, int rows, const KvRows& k, float* s, const GroupSums& m, Prefetcher& ahead) {
  with_scales(k, m.groups, [&](const float* scales) {
    if (rows <= kFewRows)
      return by_few_rows(rows,
                         [&](auto count) { word_scores<T, decltype(count)::value>(m, row, k, scales, s, ahead); });
    transpose_key_words<T>(m, k, ahead);
    transposed_rows<true>(m, row, rows, k, scales, s, ahead);
    for (int r = 0; r < rows; ++r)
      for (int j = k.begin / W * W; j < k.end; j += W)
        store(s + r * kTile + j, worth_of(load(s + r * kTile + j), m.worth[row + r]));
  });
}

void group_word_scores(int row, int rows, const KvRows& keys, const KvRows&, float* s, uint8_t* memory,
                       Prefetcher* ahead) {
  const KeepSubnormals keep;
  if (keys.dtype == DType::i8)
    word_scores_of<DType::i8>(row, rows, keys, s, group_sums(memory), *ahead);
  else
    word_scores_of<DType::i4>(row, rows, keys, s, group_sums(memory), *ahead);
}

void group_word_values(const float* p, int rows, const KvRows& v, const KvRows*, const float* correction, float* o,
                       int o_stride, uint8_t* memory, Prefetcher* ahead) {
  const KeepSubnormals keep;
  if (v.dtype == DType::i8)
    word_values_of<DType::i8>(p, rows, v, correction, o, o_stride, group_sums(memory), *ahead);
  else
    word_values_of<DType::i4>(p, rows, v, correction, o, o_stride, group_sums(memory), *ahead);
}

// AMD's since Zen 3: others take a hundred cycles and more for one.
bool multiplies_subnormals() {
  unsigned a, b, c, d;
  if (!__get_cpuid(0, &a, &b, &c, &d) || b != signature_AMD_ebx || c != signature_AMD_ecx || d != signature_AMD_edx)
    return false;
  __get_cpuid(1, &a, &b, &c, &d);
  return ((a >> 8) & 15) + ((a >> 20) & 255) >= 0x19;
}

// Words stand 128 above their bytes. Where one scale serves a whole tensor, values may be so much smaller than that
// that taking it away again leaves float32 too few bits; a group's own scale fits its values. Three and more rows of
// int8 share a conversion, and parting sums costs each of them as much.
bool group_words_take(const CacheKind& kind) {
  static const bool fast = multiplies_subnormals();
  const int block = kind.dtype == DType::i8 ? kBlockOf<DType::i8> : kBlockOf<DType::i4>;
  return fast && group_sums_take(kind) && kind.head_dim % block == 0 && kind.grouped && kind.group % block == 0 &&
         (kind.dtype == DType::i4 || kind.query_heads <= 2);
}

int group_word_stops(int head_dim) { return head_dim / 2; }

constexpr TileKernel kGroupWords = {group_words_take,  group_sums_pay,   group_sums_bytes,
                                    group_words_begin, group_sums_end,   group_word_scores,
                                    group_word_values, group_word_stops, group_sums_reach};

}  // namespace
}  // namespace kvasir::attention::cpu
