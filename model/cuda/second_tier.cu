#include "model/cuda/second_tier.h"

namespace kvasir::model::cuda {
namespace {

using attention::cuda::check;
using kvcache::PageMove;

constexpr int64_t kStagingBytes = 256 << 20;  // at most, each way: 5 ms of a link of 50 GB/s

}  // namespace

Result<std::unique_ptr<SecondTier>> SecondTier::make(const PagedArrays& arrays, int64_t host_pages) {
  auto tier = std::make_unique<SecondTier>();
  tier->arrays_ = arrays;
  for (const PagedArray& a : arrays) tier->page_bytes_ += a.stretches * a.page;
  tier->most_ =
      int(std::clamp<int64_t>(kStagingBytes / tier->page_bytes_, 1, std::min<int64_t>(PageIds::kMost, host_pages)));
  KVASIR_TRY(tier->host_.allocate(size_t(tier->page_bytes_ * host_pages)));
  KVASIR_TRY(check(cudaStreamCreateWithFlags(&tier->link_, cudaStreamNonBlocking), "stream"));
  for (Way* way : {&tier->out_, &tier->in_}) {
    KVASIR_TRY(way->staging.allocate(size_t(tier->page_bytes_ * tier->most_)));
    for (cudaEvent_t* e : {&way->ready, &way->done})
      KVASIR_TRY(check(cudaEventCreateWithFlags(e, cudaEventDisableTiming), "event"));
  }
  return std::unique_ptr<SecondTier>(std::move(tier));
}

SecondTier::~SecondTier() {
  if (link_) cudaStreamSynchronize(link_);
  for (Way* way : {&out_, &in_})
    for (cudaEvent_t e : {way->ready, way->done})
      if (e) cudaEventDestroy(e);
  if (link_) cudaStreamDestroy(link_);
}

// As many at once as fit. All that come are read on the host before any that leaves is written there, and all that
// leave are gathered on the device before any that came is scattered: where the order says otherwise, a new run begins.
Status SecondTier::move(std::span<const PageMove> moves, cudaStream_t stream) {
  for (const PageMove& m : moves) {
    Way& way = m.to_host ? out_ : in_;
    const bool later = in_.device.has(m.device) || out_.host.has(m.host);
    if (later || way.device.count == most_) KVASIR_TRY(flush(stream));
    way.device.id[way.device.count++] = m.device;
    way.host.id[way.host.count++] = m.host;
  }
  return flush(stream);
}

// The link's stream is in order: what comes waits for what left before, which may be the same pages.
Status SecondTier::flush(cudaStream_t stream) {
  if (in_.device.count > 0) {
    KVASIR_TRY(check(cudaStreamWaitEvent(link_, in_.done), "pages"));
    KVASIR_TRY(cross(in_, false));
    KVASIR_TRY(check(cudaEventRecord(in_.ready, link_), "pages"));
  }
  if (out_.device.count > 0) {
    KVASIR_TRY(check(cudaStreamWaitEvent(stream, out_.done), "pages"));
    launch_gather(out_, true, stream);
    KVASIR_TRY(check(cudaEventRecord(out_.ready, stream), "pages"));
    KVASIR_TRY(check(cudaStreamWaitEvent(link_, out_.ready), "pages"));
    KVASIR_TRY(cross(out_, true));
    KVASIR_TRY(check(cudaEventRecord(out_.done, link_), "pages"));
  }
  if (in_.device.count > 0) {
    KVASIR_TRY(check(cudaStreamWaitEvent(stream, in_.ready), "pages"));
    launch_gather(in_, false, stream);
    KVASIR_TRY(check(cudaEventRecord(in_.done, stream), "pages"));
  }
  for (Way* way : {&out_, &in_}) way->device.count = way->host.count = 0;
  return check(cudaGetLastError(), "pages");
}

// Pages that follow one another on the host, too, are one transfer.
Status SecondTier::cross(const Way& way, bool to_host) {
  const int32_t* host = way.host.id;
  for (int i = 0, n = 1; i < way.host.count; i += n, n = 1) {
    while (i + n < way.host.count && host[i + n] == host[i] + n) ++n;
    std::byte* there = host_.bytes() + host[i] * page_bytes_;
    std::byte* here = way.staging.bytes() + i * page_bytes_;
    KVASIR_TRY(check(cudaMemcpyAsync(to_host ? there : here, to_host ? here : there, size_t(n * page_bytes_),
                                     to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, link_),
                     "pages"));
  }
  return {};
}

namespace {

// A block copies one stretch of one page.
template <class Unit>
__global__ void gather(PagedArray a, __grid_constant__ const PageIds pages, uint8_t* staging, int64_t page_bytes,
                       bool to_staging) {
  auto* in_cache = reinterpret_cast<Unit*>(a.base + blockIdx.x * a.pitch + pages.id[blockIdx.y] * a.page);
  auto* in_staging = reinterpret_cast<Unit*>(staging + blockIdx.y * page_bytes + blockIdx.x * a.page);
  for (int64_t i = threadIdx.x; i < a.page / int64_t(sizeof(Unit)); i += blockDim.x) {
    if (to_staging)
      in_staging[i] = in_cache[i];
    else
      in_cache[i] = in_staging[i];
  }
}

// The widest that every page of these arrays begins and ends on.
bool fits(const PagedArrays& arrays, int64_t unit) {
  return std::all_of(arrays.begin(), arrays.end(),
                     [&](const PagedArray& a) { return a.page % unit == 0 && a.pitch % unit == 0; });
}

}  // namespace

void SecondTier::launch_gather(const Way& way, bool to_staging, cudaStream_t stream) const {
  const auto kernel = fits(arrays_, 16) ? gather<uint4> : fits(arrays_, 4) ? gather<uint32_t> : gather<uint8_t>;
  auto* staging = way.staging.as<uint8_t>();
  for (const PagedArray& a : arrays_) {
    if (a.stretches == 0) continue;
    const dim3 grid(unsigned(a.stretches), unsigned(way.device.count));
    kernel<<<grid, 128, 0, stream>>>(a, way.device, staging, page_bytes_, to_staging);
    staging += a.stretches * a.page;
  }
}

}  // namespace kvasir::model::cuda
