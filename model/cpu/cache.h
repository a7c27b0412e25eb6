// The keys and values of some layers in the host's memory, with their scales, and its second tier: the same pages, each
// in one piece.
// (For a network on a CPU the second tier is memory like the first; it is there so that both devices do the same.)
#pragma once

#include <array>
#include <memory>

#include "kvcache/form.h"
#include "kvcache/orders.h"
#include "model/cache_form.h"

namespace kvasir::model::cpu {

class Cache {
 public:
  static Result<std::unique_ptr<Cache>> make(const CacheShape& shape, int64_t pages, int64_t host_pages);
  const kvcache::CacheView& view() const { return view_; }
  void copy(const kvcache::PageCopy& c);
  void move(const kvcache::PageMove& m);

 private:
  // Mapped, so that pages nobody has used yet take no memory.
  class Mapping {
   public:
    Mapping() = default;
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Status map(size_t bytes, const char* option);
    uint8_t* data() const { return static_cast<uint8_t*>(data_); }

   private:
    void* data_ = nullptr;
    size_t bytes_ = 0;
  };

  struct Part {
    kvcache::Plane plane;
    Mapping memory;
  };

  int32_t page_size_ = 0;
  size_t page_bytes_ = 0;
  kvcache::CacheView view_;
  std::array<Part, 2> parts_;  // elements, scales
  Mapping host_;
};

}  // namespace kvasir::model::cpu
