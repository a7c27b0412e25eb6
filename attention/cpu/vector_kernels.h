// The loops of kernels.h, written once over a vector type V of W floats and Words of W 32-bit words.
#pragma once

#include "attention/cpu/product.h"
#include "attention/cpu/small_groups.h"
#include "attention/cpu/softmax.h"

namespace kvasir::attention::cpu {
namespace {

using namespace simd;  // the vectors of this translation unit

// ---- conversion -----------------------------------------------------------------------------------

template <DType kType>
inline void widen(const uint8_t* in, int64_t n, float* out) {
  constexpr int kBits = bits_of(kType);
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, read_vector<kType>(in + i * kBits / 8));
  if (i < n) {
    alignas(64) uint8_t tail[W * 4] = {};
    alignas(64) float wide[W];
    __builtin_memcpy(tail, in + i * kBits / 8, size_t((n - i) * kBits / 8));
    store(wide, read_vector<kType>(tail));
    __builtin_memcpy(out + i, wide, size_t(n - i) * 4);
  }
}

void to_f32(const void* in, DType type, int64_t n, float* out) {
  const uint8_t* p = static_cast<const uint8_t*>(in);
  if (type == DType::f16) return widen<DType::f16>(p, n, out);
  if (type == DType::bf16) return widen<DType::bf16>(p, n, out);
  __builtin_memcpy(out, in, size_t(n) * 4);
}

void from_f32(const float* in, DType type, int64_t n, void* out) {
  if (type == DType::f32) {
    __builtin_memcpy(out, in, size_t(n) * 4);
    return;
  }
  uint8_t* p = static_cast<uint8_t*>(out);
  auto narrow = [&](V x, uint8_t* at) { type == DType::f16 ? store_f16(at, x) : store_bf16(at, x); };
  int64_t i = 0;
  for (; i + W <= n; i += W) narrow(load(in + i), p + 2 * i);
  if (i < n) {
    alignas(64) float wide[W] = {};
    alignas(64) uint8_t tail[W * 2];
    __builtin_memcpy(wide, in + i, size_t(n - i) * 4);
    narrow(load(wide), tail);
    __builtin_memcpy(p + 2 * i, tail, size_t(n - i) * 2);
  }
}

void point(const uint8_t** to, int n, const uint8_t* at, int64_t step) {
  for (int j = 0; j < n; ++j) to[j] = at + j * step;
}

// What an instruction set without more of its own has.
constexpr Kernels vector_kernels(const char* name) {
  return {
      name,  W,     pack_all_keys, pack_all_values, scores, scores_rows, softmax, accumulate, accumulate_rows,
      point, stops, reach,         merge,           to_f32, from_f32,
  };
}

}  // namespace
}  // namespace kvasir::attention::cpu
