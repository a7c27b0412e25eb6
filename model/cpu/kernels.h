// The inner loops, once per instruction set: every set gives the same bits, since lanes are output rows and a row's
// sums are exact or in a fixed order.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "model/cpu/packed.h"

namespace kvasir::model::cpu {

// Rows of activations as the kernels of quantized weights read them: integers of 12 bits, x = d * v, v = 16 * high +
// low, with one d a row, so that a block's products are scaled by its weights' scale alone. Two int8 planes cost a
// second dot product where one plane alone (llama.cpp's way) costs accuracy: 0.033 in mean |log-probability| on
// SmolLM2. A block is 32 high bytes, then 32 low ones. In the same room AMX has its own orders, those of whole tiles,
// and where there are rows enough two rows stand in three planes (pair_digits.h, amx_pairs.h), or with AVX2 and 8-bit
// weights the 16 bits together (panels_avx2.h).
struct QuantRows {
  int8_t* q;         // [rows, cols / 32, 2, 32]
  float* d;          // [rows]
  float* sums;       // [rows, cols / 32] of v, or [rows, cols / 32, 2] of halves, where weights have minima
  int32_t* offsets;  // [rows, cols / 32] -zero point * sum of v, where they have a zero point
  // For weights of_rows, [rows, cols / 32 (, 2), 4]: -8 times each plane's sum, and it in the upper half.
  int32_t* planes;
  int64_t cols;  // a multiple of 32
  int64_t rows;
};

// Memory for such rows, used again and again.
class QuantRoom {
 public:
  QuantRows rows(int64_t rows, int64_t cols) {
    const size_t tall = size_t(rows + 15) & ~size_t(15), blocks = tall * size_t((cols + 63) / 64 * 2);
    if (lines_.size() < blocks) lines_.resize(blocks), sums_.resize(2 * blocks), offsets_.resize(8 * blocks);
    if (d_.size() < tall) d_.resize(tall);
    return {lines_.data()->bytes, d_.data(), sums_.data(), offsets_.data(), offsets_.data(), cols, rows};
  }

 private:
  struct alignas(64) Line {
    int8_t bytes[64];
  };
  std::vector<Line> lines_;
  std::vector<float> d_, sums_;
  std::vector<int32_t> offsets_;
};

constexpr int64_t kSumBlock = 1024;

// A factor of a low-rank adapter, 16 outputs together: [outputs / 16, depth, 16] of float32, or of bfloat16 where
// `half`, so that whoever reads some outputs reads one run of memory.
struct Factor {
  const uint8_t* data = nullptr;
  bool half = false;
  int64_t depth = 0, outputs = 0;  // outputs: filled up to a multiple of 16
};

// Rows of one value head under the gated delta rule, in order. The state is [key_dim, value_dim], both multiples of 16;
// each row lets it fade to `decay`, corrects by `beta` what it gives for the row's key, and reads it by the query.
struct DeltaRows {
  int64_t rows, key_dim, value_dim;
  const float *q, *k;  // [rows, key_dim]
  const float* v;      // [rows, value_dim]
  const float *decay, *beta;
  float* state;
  float* out;  // rows are `stride` apart
  int64_t stride;
};

struct Kernels {
  std::string_view name;
  // Rows 2n and 2n + 1 by one thread, in this order: kernels may keep them as one.
  void (*quantize)(const float* x, Packing packing, const QuantRows& to, int64_t row);
  // y[t, 0..] of `groups` groups for `rows` rows from `first` on, a multiple of 32; adds when `add`.
  void (*integer)(const PackedMatrix& m, int64_t group, int64_t groups, const QuantRows& x, int64_t first, int64_t rows,
                  float* y, int64_t y_stride, bool add);
  void (*floating)(const PackedMatrix& m, int64_t group, int64_t groups, const float* x, int64_t x_stride, int64_t rows,
                   float* y, int64_t y_stride, bool add);
  void (*norm)(const float* x, const float* weight, int64_t cols, float eps, bool add, float* out);
  void (*silu)(const float* gate, const float* up, int64_t n, float* out);
  void (*gelu)(const float* gate, const float* up, int64_t n, float* out);
  // The greatest value; NaN when there is NaN or Inf anywhere.
  float (*greatest)(const float* x, int64_t n);
  // The first index that holds `value`, n where none does; those of at least `least`, ascending, and how many.
  int64_t (*find)(const float* x, int64_t n, float value);
  int64_t (*at_least)(const float* x, int64_t n, float least, int32_t* out);
  // exp((x - shift) * scale) summed over each kSumBlock values, 0 below 1e-38.
  void (*exponential_sums)(const float* x, int64_t n, float shift, float scale, float* sums);
  // exp((x - shift) * scale), 0 below 1e-38.
  void (*exponentials)(const float* x, int64_t n, float shift, float scale, float* out);
  // y[t][i] += the sum over d of x[t][d] * f of output column + i, i < n, for one or two rows t, each by itself.
  void (*low_rank)(const Factor& f, int64_t column, int64_t n, const float* const* x, int rows, float* const* y);
  // out[c] = silu of the sum over taps j of weight[j * stride + c] * x[j][c], c < n.
  void (*short_convolution)(const float* const* x, const float* weight, int64_t stride, int taps, int64_t n,
                            float* out);
  void (*delta_rule)(const DeltaRows& rows);
  bool slow_groups = false;  // of 9 rows and more: a group takes several microseconds
};

extern const Kernels kKernelsPortable;
#if defined(__x86_64__)
extern const Kernels kKernelsAvx2, kKernelsAvxVnni, kKernelsAvx512, kKernelsAmx;
#elif defined(__aarch64__)
extern const Kernels kKernelsNeon, kKernelsNeonDot;
#endif

std::vector<const Kernels*> runnable_kernels();  // best first
const Kernels& best_kernels();

}  // namespace kvasir::model::cpu
