// Mixtures of experts on the device: each layer's experts in one piece of memory, cut into tiles (expert_tiles.h), and
// the room that a step's rows need on their way through them. Rows choose their experts on the device; the host
// knows how many rows there are, and so which kernels to launch, but never where they went.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "model/cuda/expert_tiles.h"
#include "model/cuda/weight.h"
#include "model/ops.h"

namespace kvasir::model::cuda {

class ExpertLayers {
 public:
  struct Part {  // of one expert
    Weight* weight;
    const float* bias;  // on the device; null: none
  };

  // invariant: a row's result does not depend on how many rows there are.
  ExpertLayers(int64_t max_rows, bool invariant, cudaStream_t stream)
      : max_rows_(max_rows), invariant_(invariant), stream_(stream) {}

  // The weights of `up` and `down` become tiles, and their own memory goes back to `upload`. They are of the experts
  // from `first` on; the others' are on other GPUs.
  Result<int32_t> add(Experts experts, int32_t first, std::span<const Part> up, std::span<const Part> down,
                      Upload& upload);
  const Experts& layer(int32_t id) const { return layers_[size_t(id)]->of; }
  int64_t bytes() const { return bytes_; }

  // out += what `rows` rows of `in` (bfloat16) become by the experts that their logits choose; apart: out, in bfloat16,
  // is what they become by those that are here.
  Status run(int32_t id, const void* in, const float* logits, const float* correction, const float* scales,
             int64_t rows, bool apart, void* out);

 private:
  struct Matrices {
    ExpertMatrix matrix;
    DeviceMemory tiles, bias;
  };
  struct Layer {
    Experts of;
    int32_t first = 0, own = 0;
    Matrices up, down;
  };
  Status fill(Matrices& to, std::span<const Part> parts, Upload& upload);
  Status make_room(const Layer& layer);
  int item_rows(const Layer& layer, int64_t rows) const;

  int64_t max_rows_;
  bool invariant_;
  cudaStream_t stream_;
  std::vector<std::unique_ptr<Layer>> layers_;
  DeviceMemory chosen_, weights_, slot_of_, slot_rows_, items_, experts_;
  DeviceMemory gated_, sums_;  // a row a slot: bfloat16 and float32
  int64_t slots_ = 0, most_items_ = 0, most_experts_ = 0, gated_cols_ = 0, sum_cols_ = 0, bytes_ = 0;
};

}  // namespace kvasir::model::cuda
