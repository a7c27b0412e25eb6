#include "model/cuda/redraw.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "model/cuda/kernels.h"

namespace kvasir::model::cuda {
namespace {

using attention::cuda::check;

// Where the parts of what is copied begin, and how long it is: wishes first, whose numbers are the longest.
struct Layout {
  size_t which, masks, all;
  Layout(int64_t rows, int64_t words)
      : which(size_t(rows) * sizeof(Wish)),
        masks(which + size_t(rows) * sizeof(int32_t)),
        all(masks + size_t(rows * words) * sizeof(uint32_t)) {}
};

}  // namespace

// With some to spare.
Status DeviceRedraw::make_room(int64_t rows, int64_t words) {
  if (rows <= room_ && words == words_) return {};
  const int64_t room = std::min(kAtOnce, 2 * rows);
  room_ = 0;
  KVASIR_TRY(host_.allocate(Layout(room, words).all));
  KVASIR_TRY(device_.allocate(Layout(room, words).all));
  KVASIR_TRY(drawn_.allocate(size_t(room) * sizeof(DeviceDraw)));
  KVASIR_TRY(tokens_.allocate(size_t(room) * sizeof(int32_t)));
  room_ = room, words_ = words;
  return {};
}

Status DeviceRedraw::run(const DrawnFrom& from, DeviceChanges& changes, std::span<const MaskedRow> rows,
                         std::span<DeviceDraw> out, cudaStream_t stream) {
  for (size_t at = 0; at < rows.size(); at += size_t(kAtOnce)) {
    const size_t count = std::min(size_t(kAtOnce), rows.size() - at);
    KVASIR_TRY(some(from, changes, rows.subspan(at, count), out.data() + at, stream));
  }
  return {};
}

Status DeviceRedraw::some(const DrawnFrom& from, DeviceChanges& changes, std::span<const MaskedRow> rows,
                          DeviceDraw* out, cudaStream_t stream) {
  const auto count = std::ssize(rows);
  const int64_t words = (from.cols + 31) / 32;
  KVASIR_TRY(make_room(count, words));
  const Layout at(count, words);
  auto* wishes = host_.as<Wish>();
  auto* which = reinterpret_cast<int32_t*>(host_.bytes() + at.which);
  bool random = false;
  for (int64_t i = 0; i < count; ++i) {
    const MaskedRow& row = rows[size_t(i)];
    KVASIR_CHECK(row.at >= from.first && row.at < from.first + from.count, "the logits of row ", row.at, " are gone");
    wishes[i] = wish_of(*row.row, int32_t(from.cols), 1);
    which[i] = int32_t(row.at - from.first);
    random |= wishes[i].scale > 0;
    std::memcpy(host_.bytes() + at.masks + size_t(i * words) * sizeof(uint32_t), row.mask,
                size_t(words) * sizeof(uint32_t));
  }
  KVASIR_TRY(check(cudaMemcpyAsync(device_.get(), host_.get(), at.all, cudaMemcpyHostToDevice, stream), "masks"));
  const auto* on_device = reinterpret_cast<const int32_t*>(device_.bytes() + at.which);
  const auto* masks = reinterpret_cast<const uint32_t*>(device_.bytes() + at.masks);
  auto* drawn = drawn_.as<DeviceDraw>();
  auto* tokens = tokens_.as<int32_t>();
  // No row of these is broken: something was drawn from each.
  std::memset(static_cast<void*>(drawn), 0, size_t(count) * sizeof(DeviceDraw));
  launch_forbid(masks, on_device, drawn, from.logits, count, from.cols, stream);
  launch_greatest(from.logits, drawn, tokens, count, from.cols, stream, on_device);
  if (random) launch_draw(from.logits, device_.as<Wish>(), drawn, tokens, count, from.cols, stream, on_device);
  KVASIR_TRY(
      changes.after_redraw(from.logits, on_device, from.before, drawn, tokens, from.first, count, from.cols, stream));
  KVASIR_TRY(check(cudaStreamSynchronize(stream), "draws"));
  std::copy_n(drawn, count, out);
  return {};
}

}  // namespace kvasir::model::cuda
