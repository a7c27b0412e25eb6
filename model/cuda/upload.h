// Weights on their way to the device: while one stretch is copied, threads make the next in pinned memory.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "attention/cuda/memory.h"
#include "core/status.h"
#include "core/thread_pool.h"

namespace kvasir::model::cuda {

using attention::cuda::DeviceMemory;

class Upload {
 public:
  Upload(int threads, cudaStream_t stream);
  ~Upload();
  Upload(const Upload&) = delete;

  ThreadPool& pool() { return pool_; }
  cudaStream_t stream() const { return stream_; }

  // Writes bytes [at, at + size) of what is uploaded, at a multiple of the unit and no more than one, to `out`.
  using Make = std::function<void(int64_t at, int64_t size, std::byte* out)>;
  // In the stream's order. All of it has been made when this returns, so the source may go.
  Status write(void* to, int64_t bytes, int64_t unit, const Make& make);
  // The same, and on the device a gap as wide as a block follows each block; a unit is some blocks.
  Status write_spaced(void* to, int64_t bytes, int64_t unit, int64_t block, const Make& make);
  Status copy(void* to, const void* from, int64_t bytes);

  // Memory of the device: some that was given back, or new. What is given back may be in use by what the stream does
  // before; experts' weights, thousands of few sizes that become tiles at once, need no more than a layer's so.
  Status allocate(DeviceMemory* memory, int64_t bytes);
  void give_back(DeviceMemory memory, int64_t bytes) { spare_[bytes].push_back(std::move(memory)); }

 private:
  struct Stage {
    attention::cuda::PinnedMemory memory;
    cudaEvent_t copied = nullptr;
    int64_t size = 0;
  };
  Result<Stage*> next_stage(int64_t unit);

  ThreadPool pool_;
  cudaStream_t stream_;
  std::array<Stage, 3> stages_;
  size_t next_ = 0;
  std::map<int64_t, std::vector<DeviceMemory>> spare_;  // by bytes
};

}  // namespace kvasir::model::cuda
