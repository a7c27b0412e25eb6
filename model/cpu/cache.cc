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
  cache->page_size_ = shape.page_size;
  KVASIR_ASSIGN(cache->view_, kvcache::view_of(shape.form, pages * shape.page_size, shape.layers, shape.kv_heads,
                                               shape.head_dim, !shape.keys_alone));
  const auto planes = kvcache::planes_of(cache->view_);
  for (size_t i = 0; i < planes.size(); ++i) {
    Part& part = cache->parts_[i];
    part.plane = planes[i];
    cache->page_bytes_ += size_t(planes[i].stretches * shape.page_size * planes[i].token_bytes);
    if (planes[i].bytes() > 0) KVASIR_TRY(part.memory.map(size_t(planes[i].bytes()), "kv_memory"));
  }
  if (host_pages > 0) KVASIR_TRY(cache->host_.map(cache->page_bytes_ * size_t(host_pages), "host_kv_memory"));
  cache->view_.data = cache->parts_[0].memory.data();
  cache->view_.scale = cache->parts_[1].memory.data();
  return cache;
}

void Cache::copy(const kvcache::PageCopy& c) {
  for (const Part& p : parts_) {
    const int64_t apart = int64_t(c.from - c.to) * page_size_ * p.plane.token_bytes;
    uint8_t* to = p.memory.data() + int64_t(c.to) * page_size_ * p.plane.token_bytes;
    for (int64_t i = 0; i < p.plane.stretches; ++i, to += p.plane.pitch)
      std::memcpy(to, to + apart, size_t(c.tokens * p.plane.token_bytes));
  }
}

void Cache::move(const kvcache::PageMove& m) {
  uint8_t* host = host_.data() + size_t(m.host) * page_bytes_;
  for (const Part& p : parts_) {
    const int64_t bytes = page_size_ * p.plane.token_bytes;
    uint8_t* device = p.memory.data() + m.device * bytes;
    for (int64_t i = 0; i < p.plane.stretches; ++i, device += p.plane.pitch, host += bytes)
      std::memcpy(m.to_host ? host : device, m.to_host ? device : host, size_t(bytes));
  }
}

}  // namespace kvasir::model::cpu
