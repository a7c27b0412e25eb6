// The keys and values of some layers in a GPU's memory, with their scales, and its second tier in pinned memory of the
// host: the same pages, each in one piece, so that a move is one transfer an array.
#pragma once

#include <array>
#include <memory>

#include "attention/cuda/memory.h"
#include "kvcache/form.h"
#include "kvcache/orders.h"
#include "model/cache_form.h"

namespace kvasir::model::cuda {

class Cache {
 public:
  static Result<std::unique_ptr<Cache>> make(const CacheShape& shape, int64_t pages, int64_t host_pages);
  const kvcache::CacheView& view() const { return view_; }
  Status copy(const kvcache::PageCopy& c, cudaStream_t stream);
  Status move(const kvcache::PageMove& m, cudaStream_t stream);

 private:
  struct Part {
    kvcache::Plane plane;
    attention::cuda::DeviceMemory memory;
  };
  int32_t page_size_ = 0;
  size_t page_bytes_ = 0;
  kvcache::CacheView view_;
  std::array<Part, 2> parts_;  // elements, scales
  attention::cuda::PinnedMemory host_;
};

}  // namespace kvasir::model::cuda
