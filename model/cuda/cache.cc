#include "model/cuda/cache.h"

#include <cstdint>

namespace kvasir::model::cuda {
namespace {

using attention::cuda::check;

// `rows` stretches of `width` bytes. A pitch of 2^31 and more is beyond what one call takes; there are few rows then.
Status copy_rows(void* to, int64_t to_pitch, const void* from, int64_t from_pitch, int64_t width, int64_t rows,
                 cudaMemcpyKind kind, cudaStream_t stream) {
  if (rows == 0) return {};
  if (to_pitch <= INT32_MAX && from_pitch <= INT32_MAX)
    return check(
        cudaMemcpy2DAsync(to, size_t(to_pitch), from, size_t(from_pitch), size_t(width), size_t(rows), kind, stream),
        "pages");
  for (int64_t i = 0; i < rows; ++i)
    KVASIR_TRY(check(cudaMemcpyAsync(static_cast<uint8_t*>(to) + i * to_pitch,
                                     static_cast<const uint8_t*>(from) + i * from_pitch, size_t(width), kind, stream),
                     "pages"));
  return {};
}

}  // namespace

Result<std::unique_ptr<Cache>> Cache::make(const CacheShape& shape, int64_t pages, int64_t host_pages) {
  auto cache = std::make_unique<Cache>();
  cache->page_size_ = shape.page_size;
  KVASIR_ASSIGN(cache->view_,
                kvcache::view_of(shape.form, pages * shape.page_size, shape.layers, shape.kv_heads, shape.head_dim));
  const auto planes = kvcache::planes_of(cache->view_);
  for (size_t i = 0; i < planes.size(); ++i) {
    Part& part = cache->parts_[i];
    part.plane = planes[i];
    cache->page_bytes_ += size_t(planes[i].stretches * shape.page_size * planes[i].token_bytes);
    if (planes[i].bytes() > 0) KVASIR_TRY(part.memory.allocate(size_t(planes[i].bytes())));
  }
  if (host_pages > 0) KVASIR_TRY(cache->host_.allocate(cache->page_bytes_ * size_t(host_pages)));
  cache->view_.data = cache->parts_[0].memory.get();
  cache->view_.scale = cache->parts_[1].memory.get();
  return cache;
}

Status Cache::copy(const kvcache::PageCopy& c, cudaStream_t stream) {
  for (const Part& p : parts_) {
    const int64_t page = page_size_ * p.plane.token_bytes;
    auto* base = static_cast<uint8_t*>(p.memory.get());
    KVASIR_TRY(copy_rows(base + c.to * page, p.plane.pitch, base + c.from * page, p.plane.pitch,
                         c.tokens * p.plane.token_bytes, p.plane.stretches, cudaMemcpyDeviceToDevice, stream));
  }
  return {};
}

Status Cache::move(const kvcache::PageMove& m, cudaStream_t stream) {
  uint8_t* host = host_.as<uint8_t>() + size_t(m.host) * page_bytes_;
  for (const Part& p : parts_) {
    const int64_t page = page_size_ * p.plane.token_bytes;
    uint8_t* device = static_cast<uint8_t*>(p.memory.get()) + m.device * page;
    KVASIR_TRY(copy_rows(m.to_host ? host : device, m.to_host ? page : p.plane.pitch, m.to_host ? device : host,
                         m.to_host ? p.plane.pitch : page, page, p.plane.stretches,
                         m.to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, stream));
    host += page * p.plane.stretches;
  }
  return {};
}

}  // namespace kvasir::model::cuda
