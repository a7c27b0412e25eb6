#include "model/formats/slices.h"

#include <algorithm>
#include <cstring>

#include "core/cat.h"
#include "core/check.h"

namespace kvasir::model {

static Seeded part_of(const HostTensor& t, int64_t row, int64_t col) {
  Seeded out = *t.seeded;
  if (out.whole_cols == 0) out.whole_cols = t.cols;
  out.row += row, out.col += col;
  return out;
}

HostTensor rows_of(const HostTensor& t, int64_t first, int64_t count) {
  KVASIR_CHECK(first >= 0 && first + count <= t.rows, "rows ", first, " to ", first + count, " of ", t.rows);
  HostTensor out = t;
  out.rows = count, out.bytes = count * t.row_bytes();
  if (t.seeded) return out.seeded = part_of(t, first, 0), out;
  out.data = t.data + first * t.row_bytes();
  const auto scales = t.row_scales.begin() + first * t.scales_a_row();
  out.row_scales.assign(scales, scales + count * t.scales_a_row());
  return out;
}

Result<HostTensor> columns_of(const HostTensor& t, const Share& share) {
  KVASIR_CHECK(share.all == t.cols, t.name, " is ", t.cols, " wide, not ", share.all);
  const TypeInfo& type = *type_info(t.type);
  if (share.first % type.block != 0 || share.count % type.block != 0)
    return invalid_argument(cat(t.name, " is ", type.name, ", in blocks of ", type.block,
                                " columns; a rank's part of it would be columns ", share.first, " to ",
                                share.first + share.count, ": fewer ranks, or weights of another type"))
        .with_field("ranks");
  HostTensor out = t;
  if (const int64_t wide = t.scales_a_row(); wide > 1) {  // a scale for each 128 columns
    if (share.first % 128 != 0 || (share.count % 128 != 0 && share.first + share.count != t.cols))
      return invalid_argument(cat(t.name, " is ", type.name,
                                  " with a scale for each 128 columns; a rank's part of it would be columns ",
                                  share.first, " to ", share.first + share.count,
                                  ": fewer ranks, or weights of another type"))
          .with_field("ranks");
    const int64_t first = share.first / 128, count = (share.count + 127) / 128;
    out.row_scales.clear();
    for (int64_t r = 0; r < t.rows; ++r)
      out.row_scales.insert(out.row_scales.end(), t.row_scales.begin() + r * wide + first,
                            t.row_scales.begin() + r * wide + first + count);
  }
  const int64_t at = share.first / type.block * type.bytes, bytes = share.count / type.block * type.bytes;
  if (t.seeded) {
    out.cols = share.count, out.bytes = t.rows * bytes;
    out.seeded = part_of(t, 0, share.first);
    return out;
  }
  std::shared_ptr<uint8_t[]> to(new uint8_t[size_t(t.rows * bytes)]);
  for (int64_t r = 0; r < t.rows; ++r)
    std::memcpy(to.get() + r * bytes, t.data + r * t.row_bytes() + at, size_t(bytes));
  if (t.group > 0 && (share.first % t.group != 0 || share.count % t.group != 0)) out.group = 0;
  out.cols = share.count, out.bytes = t.rows * bytes, out.data = to.get();
  out.owned = std::move(to);
  return out;
}

HostTensor reordered(HostTensor t, const std::function<int64_t(int64_t)>& from) {
  const int64_t count = t.rows > 1 ? t.rows : t.cols, each = t.bytes / count;
  std::shared_ptr<uint8_t[]> to(new uint8_t[size_t(t.bytes)]);
  std::vector<float> scales(t.row_scales.size());
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to.get() + i * each, t.data + from(i) * each, size_t(each));
    if (t.rows > 1)
      std::copy_n(t.row_scales.begin() + from(i) * t.scales_a_row(), t.scales_a_row(),
                  scales.begin() + i * t.scales_a_row());
  }
  t.data = to.get();
  t.owned = std::move(to);
  t.row_scales = std::move(scales);
  return t;
}

}  // namespace kvasir::model
