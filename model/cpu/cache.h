// The keys and values of some layers in the host's memory, and its second tier: the same pages, each in one piece.
// (For a network on a CPU the second tier is memory like the first; it is there so that both devices do the same.)
#pragma once

#include <memory>

#include "kvcache/orders.h"
#include "kvcache/view.h"

namespace kvasir::model::cpu {

struct CacheShape {
  DType dtype = DType::f16;
  int32_t layers = 0, kv_heads = 0, head_dim = 0, page_size = 16;
};

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

  uint8_t* at(int64_t run, int32_t page) const;  // a run: the keys or values of one head of one layer
  int64_t runs() const { return 2 * int64_t(view_.layers) * view_.kv_heads; }

  int32_t page_size_ = 0;
  size_t run_bytes_ = 0;  // of one page
  kvcache::CacheView view_;
  Mapping memory_, host_;
};

}  // namespace kvasir::model::cpu
