// Rows whose constraint refused what was drawn of them, drawn again among what it allows: their logits are still where
// they were drawn from, and only masks and tokens cross over.
#pragma once

#include <span>

#include "model/cuda/change.h"
#include "model/cuda/draw.h"
#include "model/draws.h"

namespace kvasir::model::cuda {

// What was last drawn from: rows [first, first + count) of a launch.
struct DrawnFrom {
  float* logits = nullptr;
  int64_t first = 0, count = 0, cols = 0;
  const int32_t* before = nullptr;  // the previous step's tokens
};

class DeviceRedraw {
 public:
  // Waits for the device. `changes`: those of the launch, which have said what its distributions were.
  Status run(const DrawnFrom& from, DeviceChanges& changes, std::span<const MaskedRow> rows, std::span<DeviceDraw> out,
             cudaStream_t stream);

 private:
  static constexpr int64_t kAtOnce = 128;
  Status make_room(int64_t rows, int64_t words);
  Status some(const DrawnFrom& from, DeviceChanges& changes, std::span<const MaskedRow> rows, DeviceDraw* out,
              cudaStream_t stream);

  attention::cuda::PinnedMemory host_, drawn_;  // masks, wishes, which; what comes back
  attention::cuda::DeviceMemory device_, tokens_;
  int64_t room_ = 0, words_ = 0;
};

}  // namespace kvasir::model::cuda
