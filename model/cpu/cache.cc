#include "model/cpu/cache.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "core/cat.h"

namespace kvasir::model::cpu {

Cache::Mapping::~Mapping() {
  if (data_) ::munmap(data_, bytes_);
}

Status Cache::Mapping::map(size_t bytes, const char* option) {
  void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED)
    return resource_exhausted(cat("no memory for a key/value cache of ", bytes, " bytes; lower ", option));
  data_ = p;
  bytes_ = bytes;
  return {};
}

Result<std::unique_ptr<Cache>> Cache::make(const CacheShape& shape, int64_t pages, int64_t host_pages) {
  auto cache = std::make_unique<Cache>();
  kvcache::CacheView& v = cache->view_;
  v.dtype = shape.dtype;
  v.max_tokens = pages * shape.page_size;
  v.layers = shape.layers, v.kv_heads = shape.kv_heads, v.head_dim = shape.head_dim;
  // [layer, key or value, head, token, head_dim]: a head's keys are one run in memory.
  v.strides.token = shape.head_dim;
  v.strides.head = v.max_tokens * v.strides.token;
  v.strides.kv = shape.kv_heads * v.strides.head;
  v.strides.layer = 2 * v.strides.kv;
  cache->page_size_ = shape.page_size;
  cache->run_bytes_ = size_t(dtype_bytes(shape.dtype, int64_t(shape.page_size) * shape.head_dim));
  const size_t page_bytes = cache->run_bytes_ * size_t(cache->runs());
  KVASIR_TRY(cache->memory_.map(std::max<size_t>(1, page_bytes * size_t(pages)), "kv_memory"));
  if (host_pages > 0) KVASIR_TRY(cache->host_.map(page_bytes * size_t(host_pages), "host_kv_memory"));
  v.data = cache->memory_.data();
  return cache;
}

uint8_t* Cache::at(int64_t run, int32_t page) const {
  return memory_.data() +
         dtype_bytes(view_.dtype, run * view_.strides.head + int64_t(page) * page_size_ * view_.strides.token);
}

void Cache::copy(const kvcache::PageCopy& c) {
  const size_t bytes = size_t(dtype_bytes(view_.dtype, int64_t(c.tokens) * view_.strides.token));
  for (int64_t run = 0; run < runs(); ++run) std::memcpy(at(run, c.to), at(run, c.from), bytes);
}

void Cache::move(const kvcache::PageMove& m) {
  uint8_t* host = host_.data() + size_t(m.host) * run_bytes_ * size_t(runs());
  for (int64_t run = 0; run < runs(); ++run, host += run_bytes_) {
    uint8_t* device = at(run, m.device);
    std::memcpy(m.to_host ? host : device, m.to_host ? device : host, run_bytes_);
  }
}

}  // namespace kvasir::model::cpu
