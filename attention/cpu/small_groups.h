// Groups so small that a vector, or even a word of a transposed key, holds several: a row's scales are spread out, one
// an element, and tiles are made float32 whatever the number of rows that share them. The products are those of larger
// groups, so the bits are too.
#pragma once

#include "attention/cpu/read.h"

namespace kvasir::attention::cpu {
namespace {

inline bool small_groups(const KvRows& k) { return k.grouped && k.group < kLeastReadGroup; }

// A key's or value's scales as float32, one for each element; past head_dim they are 0.
inline void spread_scales(const KvRows& k, const uint8_t* scales, float* out) {
  alignas(64) float each[kMaxHeadDim];
  const int n = k.head_dim >> k.group_shift;
  if (k.scale_dtype == DType::f32) {
    __builtin_memcpy(each, scales, size_t(n) * 4);
  } else {
    alignas(64) uint16_t half[kMaxHeadDim] = {};
    __builtin_memcpy(half, scales, size_t(n) * 2);
    for (int i = 0; i < n; i += W) store(each + i, load_f16(reinterpret_cast<const uint8_t*>(half + i)));
  }
  for (int d = 0; d < k.head_dim; ++d) out[d] = each[d >> k.group_shift];
  for (int d = k.head_dim; d % W != 0; ++d) out[d] = 0;
}

template <DType kType>
inline void widen_rows(const KvRows& k, float* to, int stride, Prefetcher& ahead) {
  alignas(64) float scales[kMaxHeadDim];
  for (int j = k.begin; j < k.end; ++j) {
    prefetch(ahead);
    spread_scales(k, k.scales[j], scales);
    for (int d = 0; d < k.head_dim; d += W) {
      alignas(64) uint8_t some[W * 4] = {};
      const int n = k.head_dim - d < W ? k.head_dim - d : W;
      __builtin_memcpy(some, k.row[j] + d * bits_of(kType) / 8, size_t(n * bits_of(kType) / 8));
      store(to + j * stride + d, mul(read_vector<kType>(some), load(scales + d)));
    }
  }
}

void pack_all_values(const KvRows& k, float* v, int stride, Prefetcher* ahead) {
  if (!small_groups(k)) return pack_values(k, v, stride, ahead);
  k.dtype == DType::i8 ? widen_rows<DType::i8>(k, v, stride, *ahead) : widen_rows<DType::i4>(k, v, stride, *ahead);
}

[[gnu::noinline]] void pack_widened_keys(const KvRows& k, float* kt, Prefetcher* ahead) {
  alignas(64) float rows[kTile * kMaxHeadDim];
  const int stride = (k.head_dim + W - 1) / W * W;
  pack_all_values(k, rows, stride, ahead);
  KvRows wide = k;
  wide.dtype = DType::f32, wide.grouped = false;
  for (int j = k.begin; j < k.end; ++j) wide.row[j] = reinterpret_cast<const uint8_t*>(rows + j * stride);
  pack_keys(wide, kt, ahead);
}

void pack_all_keys(const KvRows& k, float* kt, Prefetcher* ahead) {
  small_groups(k) ? pack_widened_keys(k, kt, ahead) : pack_keys(k, kt, ahead);
}

}  // namespace
}  // namespace kvasir::attention::cpu
