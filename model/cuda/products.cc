#include "model/cuda/products.h"

#include <algorithm>

#include "core/cat.h"
#include "core/check.h"
#include "model/cuda/few_rows.h"
#include "model/cuda/packed.h"
#include "model/cuda/streamed.h"

namespace kvasir::model::cuda {
namespace {

using attention::cuda::check;

// Packed weights are read once for each 16 rows, or of more rows once for each 128; past so many it is faster to unpack
// them, some at a time, so that what was unpacked is multiplied from L2.
constexpr int64_t kFewPackedRows = 16, kMostPackedRows = 256, kUnpacked = int64_t(16) << 20;

// Of few rows and results the library's products without scales, and another kernel for these, are faster than those
// with.
constexpr int64_t kApartRows = 256, kApartResults = 2 << 20;
bool scaled_apart(int64_t rows, int64_t n) { return rows <= kApartRows && rows * n <= kApartResults; }

int64_t features(const Weight& w, Form form) { return fuses_gates(form) ? w.rows / 2 : w.rows; }

}  // namespace

Result<std::unique_ptr<Products>> Products::open(cudaStream_t stream, bool invariant) {
  auto p = std::make_unique<Products>();
  p->stream_ = stream, p->invariant_ = invariant;
  KVASIR_ASSIGN(p->cublas_, Cublas::open(stream));
  return p;
}

Status Products::make_room(const Weight& w) {
  if (w.packing == Packing::fp8 && w.rows > sum_cols_) {
    sum_cols_ = w.rows;
    return sums_.allocate(size_t(std::min(kApartRows * w.rows, kApartResults)) * sizeof(float));
  }
  if (is_blocks(w.packing) && !unpacked_.get()) return unpacked_.allocate(size_t(kUnpacked) * 2);
  return {};
}

bool Products::reads_bytes(const Weight& w, int64_t rows) const {
  return !invariant_ && w.packing == Packing::fp8 && !streamed_bytes_takes(rows, w.rows, w.cols, Form::bf16);
}

bool Products::scales_apart(const Weight& w, int64_t rows) const {
  return reads_bytes(w, rows) && scaled_apart(rows, w.rows);
}

bool Products::fuses(const Weight& w, int64_t rows, Form form) const {
  const int64_t n = features(w, form);
  if (invariant_) return w.packing != Packing::bf16 && n % 16 == 0 && (!is_blocks(w.packing) || w.half > 0);
  switch (w.packing) {
    case Packing::bf16: return few_rows_takes(rows, n, w.cols, form) || streamed_takes(rows, n, w.cols, form);
    case Packing::fp8: return streamed_bytes_takes(rows, n, w.cols, form);
    default: return rows <= kMostPackedRows && w.half > 0;
  }
}

Status Products::run(const void* half, Bytes bytes, const Weight& w, void* out, int64_t rows, Form form) {
  const int64_t n = features(w, form), k = w.cols;
  if (invariant_) return one_order(half, w, out, rows, form);
  if (w.packing == Packing::fp8) {
    if (reads_bytes(w, rows)) return by_library(bytes, w, out, rows, form);
    launch_streamed_bytes(half, w.data.get(), w.scales.as<float>(), out, rows, n, k, form, stream_);
  } else if (is_blocks(w.packing)) {
    if (rows > kMostPackedRows) return by_parts(half, w, out, rows, form);
    const auto launch = rows <= kFewPackedRows ? launch_packed : launch_packed_many;
    launch(w.packing, half, w.data.get(), w.unit, out, rows, n, k, form, stream_);
  } else if (streamed_takes(rows, n, k, form)) {
    launch_streamed(half, w.data.get(), out, rows, n, k, form, stream_);
  } else if (few_rows_takes(rows, n, k, form)) {
    launch_few_rows(half, w.data.get(), out, rows, n, k, form, stream_);
  } else {
    return cublas_->product(half, w.data.get(), out, rows, n, k, form);
  }
  return check(cudaGetLastError(), "product");
}

Status Products::by_library(Bytes bytes, const Weight& w, void* out, int64_t rows, Form form) {
  if (!scaled_apart(rows, w.rows))
    return cublas_->product(bytes.elements, w.data.get(), out, rows, w.rows, w.cols, form, Elements::fp8_scaled,
                            {bytes.scales, w.scales.as<float>()});
  const bool half = form == Form::bf16, add = form == Form::added_f32;
  KVASIR_ASSIGN(const Sums sums, run_unscaled(bytes, w, add ? nullptr : out, rows, half ? form : Form::f32));
  if (half)
    launch_scale_half(out, sums.by, rows, w.rows, stream_);
  else
    launch_scale(static_cast<const float*>(sums.data), sums.by, add, static_cast<float*>(out), rows, w.rows, stream_);
  return check(cudaGetLastError(), "product");
}

Result<Products::Sums> Products::run_unscaled(Bytes bytes, const Weight& w, void* out, int64_t rows, Form form) {
  void* to = out ? out : sums_.get();
  KVASIR_TRY(cublas_->product(bytes.elements, w.data.get(), to, rows, w.rows, w.cols, form, Elements::fp8));
  return Sums{to, {bytes.scales, w.scales.as<float>()}};
}

Status Products::one_order(const void* half, const Weight& w, void* out, int64_t rows, Form form) {
  const int64_t n = features(w, form), k = w.cols;
  if (w.packing == Packing::bf16) {
    KVASIR_ASSIGN(const bool known, cublas_->has_one_order(n, k, form));
    if (known) return cublas_->product_in_one_order(half, w.data.get(), out, rows, n, k, form);
  }
  const int64_t row_bytes = form == Form::apart ? 8 * n : form == Form::f32 || form == Form::added_f32 ? 4 * n : 2 * n;
  const int64_t most = w.packing == Packing::fp8 ? 16 : 32;
  for (int64_t row = 0; row < rows; row += most) {
    const int64_t count = std::min(most, rows - row);
    const void* in = static_cast<const std::byte*>(half) + row * k * 2;
    void* to = static_cast<std::byte*>(out) + row * row_bytes;
    if (w.packing == Packing::fp8)
      launch_streamed_bytes(in, w.data.get(), w.scales.as<float>(), to, count, n, k, form, stream_);
    else if (is_blocks(w.packing))
      launch_packed(w.packing, in, w.data.get(), w.unit, to, count, n, k, form, stream_);
    else if (streamed_takes(1, n, k, form))
      launch_streamed(in, w.data.get(), to, count, n, k, form, stream_);
    else if (few_rows_takes(1, n, k, form))
      launch_few_rows(in, w.data.get(), to, count, n, k, form, stream_);
    else
      return unimplemented(cat("there is no way to multiply by ", k, " x ", n, " that sums in one order"))
          .with_field("batch_invariant");
  }
  return check(cudaGetLastError(), "product");
}

Status Products::by_parts(const void* half, const Weight& w, void* out, int64_t rows, Form form) {
  KVASIR_CHECK(!fuses_gates(form), "gates of many rows are no product's");
  const int64_t most = std::max<int64_t>(16, kUnpacked / w.cols / 16 * 16), size = form == Form::bf16 ? 2 : 4;
  KVASIR_CHECK(most * w.cols <= kUnpacked, "rows of ", w.cols, " elements");
  for (int64_t first = 0; first < w.rows; first += most) {
    const int64_t n = std::min(most, w.rows - first);
    launch_unpack(w.packing, w.data.get(), w.unit, w.half, unpacked_.get(), first, n, w.cols, stream_);
    KVASIR_TRY(check(cudaGetLastError(), "unpacking"));
    KVASIR_TRY(cublas_->product(half, unpacked_.get(), static_cast<std::byte*>(out) + first * size, rows, n, w.cols,
                                form, Elements::bf16, {}, w.rows));
  }
  return {};
}

}  // namespace kvasir::model::cuda
