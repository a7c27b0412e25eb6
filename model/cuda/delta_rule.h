// Kernels of linear attention (model/linear_attention.h) over a step's rows of many sequences, in three launches: the
// convolution makes queries, keys and values of the rows, the delta rule takes each sequence's state over them, and
// what it gives is normed and gated.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "model/linear_attention.h"

namespace kvasir::model::cuda {

constexpr int kTaps = LinearConfig::kGpuTaps;        // of the convolution
constexpr int kMostDim = LinearConfig::kMostGpuDim;  // of keys and of values
constexpr int kColumns = 8;                          // of a state, that lie together
constexpr int kStateColumns = 32;                    // that one block has

constexpr int kFewDim = 64;  // of keys: half of the registers do

// Rows that a state has there.
inline int state_rows(int32_t key_dim) { return key_dim <= kFewDim ? kFewDim : kMostDim; }
// Floats of a slot in one layer: the last inputs of the convolution, [taps - 1, channels], then the states. How
// these lie is in delta_state.cuh; they are filled up with zeros to state_rows().
inline int64_t tail_floats(const LinearConfig& c) { return (kTaps - 1) * c.channels(); }
inline int64_t slot_floats(const LinearConfig& c) { return tail_floats(c) + c.values() * state_rows(c.key_dim); }

struct LinearShape {  // of a layer, as kernels read it
  int32_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
  bool tiled = false;
  int64_t keys = 0, values = 0, channels = 0;
};
inline LinearShape shape_of(const LinearConfig& c) {
  return {c.key_heads, c.value_heads, c.key_dim, c.value_dim, c.tiled, c.keys(), c.values(), c.channels()};
}

struct alignas(16) StateRows {  // of one sequence in a step
  int32_t first = 0, count = 0;
  int32_t slot = -1;  // -1: nobody's, and its rows are read by nobody
  int32_t fresh = 0;  // begins with a state of zeros, whatever the slot holds
};

struct DeltaStep {
  LinearShape shape;
  int64_t rows = 0, sequences = 0;
  int64_t singles = 0;  // sequences at the front that have one row each
  const StateRows* of = nullptr;
  const int32_t* sequence_of = nullptr;  // [rows]

  const float* in = nullptr;     // rows of [queries | keys | values | gates]
  const float* betas = nullptr;  // rows of [betas | alphas]
  float* slots = nullptr;        // this layer's part of slot 0
  int64_t slot_stride = 0;

  const float *conv = nullptr, *decay = nullptr, *bias = nullptr;  // [taps, channels]; [value heads], decay above 0
  const float* norm = nullptr;
  float eps = 0;

  void* mixed = nullptr;  // [rows, channels], bfloat16: what the convolution makes of them, queries and keys normalized
  float2* fades = nullptr;  // [rows, value heads]: the logarithm of what a state fades by, and beta
  float* had = nullptr;     // [rows, values]: what the rule gives
  void* out = nullptr;      // [rows, values], bfloat16
};

void launch_convolution(const DeltaStep& step, cudaStream_t stream);
void launch_delta_rows(const DeltaStep& step, cudaStream_t stream);    // of the singles
void launch_delta_chunks(const DeltaStep& step, cudaStream_t stream);  // of the others
inline void launch_delta_rule(const DeltaStep& step, cudaStream_t stream) {
  if (step.singles > 0) launch_delta_rows(step, stream);
  if (step.singles < step.sequences) launch_delta_chunks(step, stream);
}
// Last, for it also keeps in the slots what the next step's convolution reads.
void launch_gated_norm(const DeltaStep& step, cudaStream_t stream);

// in_out (bfloat16) *= sigmoid(gate), element by element.
void launch_sigmoid_gates(const float* gate, void* in_out, int64_t count, cudaStream_t stream);

}  // namespace kvasir::model::cuda
