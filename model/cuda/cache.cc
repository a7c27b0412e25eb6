#include "model/cuda/cache.h"

#include <cstdint>

namespace kvasir::model::cuda {
namespace {

using attention::cuda::check;

// `rows` stretches of `width` bytes. A pitch of 2^31 and more is beyond what one call takes; there are few rows then.
Status copy_rows(uint8_t* to, const uint8_t* from, int64_t pitch, int64_t width, int64_t rows, cudaStream_t stream) {
  if (rows == 0) return {};
  const auto kind = cudaMemcpyDeviceToDevice;
  if (pitch <= INT32_MAX)
    return check(cudaMemcpy2DAsync(to, size_t(pitch), from, size_t(pitch), size_t(width), size_t(rows), kind, stream),
                 "pages");
  for (int64_t i = 0; i < rows; ++i)
    KVASIR_TRY(check(cudaMemcpyAsync(to + i * pitch, from + i * pitch, size_t(width), kind, stream), "pages"));
  return {};
}

}  // namespace

Result<std::unique_ptr<Cache>> Cache::make(const CacheShape& shape, int64_t pages, int64_t host_pages) {
  auto cache = std::make_unique<Cache>();
  cache->page_size_ = shape.page_size;
  KVASIR_ASSIGN(cache->view_, kvcache::view_of(shape.form, pages * shape.page_size, shape.layers, shape.kv_heads,
                                               shape.head_dim, !shape.keys_alone));
  const auto planes = kvcache::planes_of(cache->view_);
  for (size_t i = 0; i < planes.size(); ++i) {
    Part& part = cache->parts_[i];
    part.plane = planes[i];
    if (planes[i].bytes() > 0) KVASIR_TRY(part.memory.allocate(size_t(planes[i].bytes())));
  }
  if (host_pages > 0) {
    KVASIR_ASSIGN(cache->host_, SecondTier::make(cache->arrays(), host_pages));
  }
  cache->view_.data = cache->parts_[0].memory.get();
  cache->view_.scale = cache->parts_[1].memory.get();
  return cache;
}

Status Cache::copy(const kvcache::PageCopy& c, cudaStream_t stream) {
  for (const Part& p : parts_) {
    const int64_t page = page_size_ * p.plane.token_bytes;
    auto* base = static_cast<uint8_t*>(p.memory.get());
    KVASIR_TRY(copy_rows(base + c.to * page, base + c.from * page, p.plane.pitch, c.tokens * p.plane.token_bytes,
                         p.plane.stretches, stream));
  }
  return {};
}

Status Cache::move(std::span<const kvcache::PageMove> moves, cudaStream_t stream) {
  return moves.empty() ? Status() : host_->move(moves, stream);
}

PagedArrays Cache::arrays() const {
  PagedArrays out;
  for (size_t i = 0; i < out.size(); ++i) {
    const kvcache::Plane& p = parts_[i].plane;
    out[i] = {parts_[i].memory.as<uint8_t>(), p.stretches, p.pitch, page_size_ * p.token_bytes};
  }
  return out;
}

}  // namespace kvasir::model::cuda
