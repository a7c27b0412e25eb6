// The inner loops, once per instruction set: every set gives the same bits, since lanes are output rows
// and the order of a row's sums is fixed.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "model/cpu/packed.h"

namespace kvasir::model::cpu {

// Activations of 32 inputs as integers of 12 bits: x = d * v, v = 16 * high + low. Two int8 planes cost a second dot
// product where one plane alone (llama.cpp's way) costs accuracy: 0.033 in mean |log-probability| on SmolLM2. With
// 4-bit weights both planes fit one AMX product, because 16 times a weight fits its byte; 16 bits did not.
struct QuantBlock {
  float d;
  float sum[2];      // d * sum of v: of the block in [0], or of its halves
  int32_t minus128;  // -128 * sum of v
};

// Rows of activations as the kernels of quantized weights read them: a block is 32 high bytes, then 32 low ones. AMX
// has its own order in the same room, which is that of whole tiles of rows.
struct QuantRows {
  int8_t* q;           // [rows, cols / 32, 2, 32]
  QuantBlock* blocks;  // [rows, cols / 32]
  int64_t cols;        // a multiple of 32
  int64_t rows;
};
constexpr int64_t whole_tiles(int64_t rows) { return (rows + 15) & ~int64_t(15); }

struct Kernels {
  std::string_view name;
  void (*quantize)(const float* x, bool halves, const QuantRows& to, int64_t row);
  // y[t, 0..] of `groups` groups for `rows` rows from `first` on, a multiple of 16; adds when `add`.
  void (*integer)(const PackedMatrix& m, int64_t group, int64_t groups, const QuantRows& x, int64_t first, int64_t rows,
                  float* y, int64_t y_stride, bool add);
  void (*floating)(const PackedMatrix& m, int64_t group, int64_t groups, const float* x, int64_t x_stride, int64_t rows,
                   float* y, int64_t y_stride, bool add);
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
