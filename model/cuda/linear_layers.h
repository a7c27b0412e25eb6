// Layers of linear attention on the device: the states of sequences in slots, what a step's rows need on their way
// (delta_rule.h), and, in two sets by turns, which rows are whose. So two steps may be in flight, and a step of decodes
// is the same launches whichever slots its sequences have.
#pragma once

#include <memory>
#include <vector>

#include "attention/cuda/memory.h"
#include "model/batch.h"
#include "model/cuda/delta_rule.h"
#include "model/ops.h"

namespace kvasir::model::cuda {

class LinearLayers {
 public:
  LinearLayers(int64_t max_tokens, cudaStream_t stream) : max_tokens_(max_tokens), stream_(stream) {}

  // The vectors are on the device: [channels, taps], [value heads] twice, and [value_dim], which is kept, as it is.
  Result<int32_t> add(const DeltaRule& rule, const float* conv, const float* decay, const float* bias,
                      const float* norm);
  // Room for the states of so many sequences, once all layers are added; and a copy of one.
  Status set_slots(int64_t slots);
  Status copy(int32_t from, int32_t to);

  // A step: `rows` are those of the batch, or more, each of a sequence of one row, and the ones past its own nobody's.
  // slot: 0 and 1 by turns.
  Status begin(const Batch& batch, int64_t rows, int slot);
  // Of the step's rows [queries | keys | values | gates] and [betas | alphas], in float32; out: [values], in bfloat16.
  Status run(int32_t id, const float* in, const float* betas, void* out);
  // What run() launches kernels with.
  DeltaStep step(int32_t id, const float* in, const float* betas, void* out) const;

 private:
  struct Layer {
    LinearConfig config;
    float eps = 0;
    attention::cuda::DeviceMemory conv, decay, bias;
    const float* norm = nullptr;
    int64_t at = 0;  // in a slot
  };
  struct Table {  // StateRows of each sequence, then which sequence each row is of
    attention::cuda::DeviceMemory device;
    attention::cuda::PinnedMemory host;
  };
  Status make_room(const LinearConfig& c);

  int64_t max_tokens_;
  cudaStream_t stream_;
  std::vector<std::unique_ptr<Layer>> layers_;
  attention::cuda::DeviceMemory slots_, mixed_, fades_, had_;
  int64_t slot_floats_ = 0, slot_count_ = 0, channels_ = 0, heads_ = 0, values_ = 0;  // of the largest layer
  Table tables_[2];
  const Table* table_ = nullptr;  // this step's
  int64_t rows_ = 0, sequences_ = 0, singles_ = 0;
};

}  // namespace kvasir::model::cuda
