// The keys and values of some layers in a GPU's memory, with their scales, and its second tier.
#pragma once

#include <array>
#include <memory>
#include <span>

#include "attention/cuda/memory.h"
#include "kvcache/form.h"
#include "kvcache/orders.h"
#include "model/cache_form.h"
#include "model/cuda/second_tier.h"

namespace kvasir::model::cuda {

class Cache {
 public:
  static Result<std::unique_ptr<Cache>> make(const CacheShape& shape, int64_t pages, int64_t host_pages);
  const kvcache::CacheView& view() const { return view_; }
  Status copy(const kvcache::PageCopy& c, cudaStream_t stream);
  Status move(std::span<const kvcache::PageMove> moves, cudaStream_t stream);

 private:
  PagedArrays arrays() const;
  struct Part {
    kvcache::Plane plane;
    attention::cuda::DeviceMemory memory;
  };
  int32_t page_size_ = 0;
  kvcache::CacheView view_;
  std::array<Part, 2> parts_;  // elements, scales
  std::unique_ptr<SecondTier> host_;
};

}  // namespace kvasir::model::cuda
