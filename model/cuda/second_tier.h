// A cache's second tier: pages in pinned memory of the host, each in one piece. Moves cross the link on a stream of
// their own, by way of staging memory on the device, so that they overlap with the steps around them: what comes back
// starts while the step before still runs, what leaves is gathered at once and crosses while the next one runs.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <memory>
#include <span>

#include "attention/cuda/memory.h"
#include "kvcache/form.h"
#include "kvcache/orders.h"

namespace kvasir::model::cuda {

// Where the pages of a cache's arrays lie on the device.
struct PagedArray {
  uint8_t* base = nullptr;
  int64_t stretches = 0, pitch = 0, page = 0;  // bytes
};
using PagedArrays = std::array<PagedArray, 2>;  // elements, scales

struct PageIds {
  static constexpr int kMost = 256;
  int32_t id[kMost];
  int count = 0;

  bool has(int32_t page) const { return std::find(id, id + count, page) != id + count; }
};

class SecondTier {
 public:
  static Result<std::unique_ptr<SecondTier>> make(const PagedArrays& arrays, int64_t host_pages);
  SecondTier() = default;
  SecondTier(const SecondTier&) = delete;
  ~SecondTier();

  // In order, as far as anybody on `stream` can tell.
  Status move(std::span<const kvcache::PageMove> moves, cudaStream_t stream);

 private:
  // One direction's staging memory, free again once `done`.
  struct Way {
    attention::cuda::DeviceMemory staging;
    cudaEvent_t ready = nullptr, done = nullptr;
    PageIds device, host;
  };

  Status flush(cudaStream_t stream);
  Status cross(const Way& way, bool to_host);
  void launch_gather(const Way& way, bool to_staging, cudaStream_t stream) const;

  PagedArrays arrays_;
  int64_t page_bytes_ = 0;
  int most_ = 0;  // pages that a direction's staging memory holds
  Way out_, in_;
  attention::cuda::PinnedMemory host_;
  cudaStream_t link_ = nullptr;
};

}  // namespace kvasir::model::cuda
