#include "model/cuda/upload.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"

namespace kvasir::model::cuda {
namespace {

using attention::cuda::check;

// Large enough that a copy of it is at the link's speed, small enough that three stay cheap to pin.
constexpr int64_t kStage = int64_t(32) << 20;
// What one thread copies at a time: little enough that a small weight has work for all.
constexpr int64_t kCopied = int64_t(128) << 10;

}  // namespace

// Its threads stay warm: weights come one right after another.
Upload::Upload(int threads, cudaStream_t stream) : pool_(threads), stream_(stream) { pool_.begin_step(); }

Upload::~Upload() {
  pool_.end_step();
  for (Stage& s : stages_) {
    if (!s.copied) continue;
    cudaEventSynchronize(s.copied);
    cudaEventDestroy(s.copied);
  }
}

// One whose last copy is over.
Result<Upload::Stage*> Upload::next_stage(int64_t unit) {
  Stage& s = stages_[next_];
  next_ = (next_ + 1) % stages_.size();
  if (s.copied)
    KVASIR_TRY(check(cudaEventSynchronize(s.copied), "upload"));
  else
    KVASIR_TRY(check(cudaEventCreateWithFlags(&s.copied, cudaEventDisableTiming), "upload"));
  if (const int64_t size = std::max(kStage, unit); size > s.size) {
    KVASIR_TRY(s.memory.allocate(size_t(size)));
    s.size = size;
  }
  return &s;
}

Status Upload::write(void* to, int64_t bytes, int64_t unit, const Make& make) {
  return write_spaced(to, bytes, unit, 0, make);
}

Status Upload::write_spaced(void* to, int64_t bytes, int64_t unit, int64_t block, const Make& make) {
  for (int64_t at = 0; at < bytes;) {
    KVASIR_ASSIGN(Stage * stage, next_stage(unit));
    const int64_t size = std::min(bytes - at, stage->size / unit * unit);
    std::byte* made = stage->memory.bytes();
    // Some chunks for each thread, so that none waits long for the last.
    const int64_t units = (size + unit - 1) / unit, grain = std::max<int64_t>(1, units / (8 * pool_.threads()));
    pool_.for_each(units, grain,
                   [&](int64_t i, int) { make(at + i * unit, std::min(unit, size - i * unit), made + i * unit); });
    auto* place = static_cast<std::byte*>(to) + (block > 0 ? 2 * at : at);
    KVASIR_TRY(check(block > 0 ? cudaMemcpy2DAsync(place, size_t(2 * block), made, size_t(block), size_t(block),
                                                   size_t(size / block), cudaMemcpyHostToDevice, stream_)
                               : cudaMemcpyAsync(place, made, size_t(size), cudaMemcpyHostToDevice, stream_),
                     "upload"));
    KVASIR_TRY(check(cudaEventRecord(stage->copied, stream_), "upload"));
    at += size;
  }
  return {};
}

Status Upload::allocate(DeviceMemory* memory, int64_t bytes) {
  const auto found = spare_.find(bytes);
  if (found == spare_.end() || found->second.empty()) return memory->allocate(size_t(bytes));
  *memory = std::move(found->second.back());
  found->second.pop_back();
  return {};
}

Status Upload::copy(void* to, const void* from, int64_t bytes) {
  return write(to, bytes, kCopied, [&](int64_t at, int64_t size, std::byte* out) {
    std::memcpy(out, static_cast<const std::byte*>(from) + at, size_t(size));
  });
}

}  // namespace kvasir::model::cuda
