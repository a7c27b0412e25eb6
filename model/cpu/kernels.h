// The inner loops, once per instruction set: every set gives the same bits, since lanes are output rows
// and the order of a row's sums is fixed.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "model/cpu/packed.h"

namespace kvasir::model::cpu {

// Activations of 32 inputs as integers: x = d * v, v = 256 * high + low. Two int8 planes cost a second dot
// product where one plane alone (llama.cpp's way) costs accuracy: 0.033 in mean |log-probability| against
// 0.0005 on SmolLM2.
struct QuantBlock {
  float d;
  float sum[2];      // d * sum of v: of the block in [0], or of its halves
  int32_t minus128;  // -128 * sum of v
};

// Rows of activations as the integer kernels read them: a block is 32 high bytes, then 32 low ones.
struct QuantRows {
  int8_t* q;           // [rows, cols / 32, 2, 32]
  QuantBlock* blocks;  // [rows, cols / 32]
  int64_t cols;        // a multiple of 32
};

struct Kernels {
  std::string_view name;
  // cols is a multiple of 32.
  void (*quantize)(const float* x, int64_t cols, bool halves, int8_t* q, QuantBlock* blocks);
  // y[t, 0..15] of one group for `rows` rows; adds when `add`. Only `valid` columns are written.
  void (*integer)(const PackedMatrix& m, int64_t group, const QuantRows& x, int64_t first, int64_t rows, float* y,
                  int64_t y_stride, int valid, bool add);
  void (*floating)(const PackedMatrix& m, int64_t group, const float* x, int64_t x_stride, int64_t rows, float* y,
                   int64_t y_stride, int valid, bool add);
  void (*norm)(const float* x, const float* weight, int64_t cols, float eps, bool add, float* out);
  void (*silu)(const float* gate, const float* up, int64_t n, float* out);
  void (*gelu)(const float* gate, const float* up, int64_t n, float* out);
  // The greatest value, and the sum of exp(x - it). NaN or Inf anywhere makes the sum NaN.
  void (*softmax_sums)(const float* x, int64_t n, float* max, float* sum);
  // exp((x - shift) * scale), 0 below 1e-38.
  void (*exponentials)(const float* x, int64_t n, float shift, float scale, float* out);
};

extern const Kernels kKernelsBase;
#if defined(__x86_64__)
extern const Kernels kKernelsAvx2, kKernelsAvxVnni, kKernelsAvx512, kKernelsAmx;
#endif

std::vector<const Kernels*> runnable_kernels();  // best first
const Kernels& best_kernels();

}  // namespace kvasir::model::cpu
