// Layers of linear attention by the gated delta rule (Qwen 3 Next, Qwen 3.5). Instead of keys and values of every token
// a sequence has one state in such a layer: a matrix [key_dim, value_dim] for each value head, and the last inputs of
// the convolution in front of it. A slot of states is one sequence's in all layers.
#pragma once

#include <cstdint>

#include "core/cat.h"
#include "core/status.h"

namespace kvasir::model {

struct LinearConfig {
  int32_t taps = 0;  // of the convolution, this token's included; 0: the family has no such layers
  int32_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
  bool tiled = false;  // value head h goes with key head h % key_heads; else with h / (value_heads / key_heads)

  int64_t keys() const { return int64_t(key_heads) * key_dim; }
  int64_t values() const { return int64_t(value_heads) * value_dim; }
  int64_t channels() const {
    return 2 * keys() + values();
  }  // [queries | keys | values], which the convolution goes over
  int64_t state_floats() const { return (taps - 1) * channels() + value_heads * int64_t(key_dim) * value_dim; }

  // What a GPU's kernels are made for; each known model is within it.
  static constexpr int32_t kGpuTaps = 4, kMostGpuDim = 128;
  bool fits_gpu() const { return taps == kGpuTaps && key_dim <= kMostGpuDim && value_dim <= kMostGpuDim; }

  Status validate() const {
    struct Field {
      const char* name;
      int64_t value, low, high, multiple;
    };
    for (const Field& f :
         {Field{"linear_conv_kernel_dim", taps, 2, 16, 1}, Field{"linear_num_key_heads", key_heads, 1, 1024, 1},
          Field{"linear_num_value_heads", value_heads, 1, 1024, key_heads},
          Field{"linear_key_head_dim", key_dim, 16, 512, 16}, Field{"linear_value_head_dim", value_dim, 16, 512, 16}})
      if (f.value < f.low || f.value > f.high || f.value % f.multiple != 0)
        return invalid_argument(cat("the model's ", f.name, " is ", f.value, "; it must be a multiple of ", f.multiple,
                                    " from ", f.low, " to ", f.high));
    return {};
  }
};

}  // namespace kvasir::model
