// Products that each head has of its own, and what goes from row to row around them: into rows that attention or a
// product reads, as bfloat16.
#include "core/check.h"
#include "model/cuda/heads.h"
#include "model/cuda/ops.h"

namespace kvasir::model::cuda {

// Stacked, and bfloat16 whatever the others are: they are small, and one kernel multiplies by all of them.
Result<HeadMatrices> CudaOps::load_heads(Weights& source, std::span<const HostTensor> parts) {
  auto w = std::make_shared<Loaded>();
  KVASIR_TRY(load_weight(parts, Quantize::bf16, *upload_, w.get()));
  for (const HostTensor& t : parts) source.release(t);
  weight_bytes_ += w->bytes;
  HeadMatrices out{std::ssize(parts), parts[0].rows, parts[0].cols, {}};
  out.matrices.push_back({int32_t(matrices_.size()), w->rows, w->cols});
  matrices_.push_back(std::move(w));
  return out;
}

Status CudaOps::linear_heads(Buffer in, Pieces from, const HeadMatrices& of, Buffer out, Pieces to) {
  KVASIR_CHECK(from.first + (of.heads - 1) * from.step + of.cols <= in.cols, of.cols, " columns a head of ", in.cols);
  KVASIR_CHECK(to.first + (of.heads - 1) * to.step + of.rows <= out.cols, of.rows, " columns a head into ", out.cols);
  KVASIR_ASSIGN(const void* half, read_half(in));
  launch_head_products({const_cast<void*>(half), in.cols, from}, matrices_[size_t(of.matrices[0].id)]->data.get(),
                       {write_half(out), out.cols, to}, rows(in), of.heads, of.rows, of.cols, stream_);
  return launched("linear_heads");
}

Status CudaOps::copy_pieces(Buffer in, Pieces from, Buffer out, Pieces to, int64_t cols, int64_t count) {
  KVASIR_CHECK(from.first + (count - 1) * from.step + cols <= in.cols, cols, " columns of ", in.cols);
  KVASIR_CHECK(to.first + (count - 1) * to.step + cols <= out.cols, cols, " columns into ", out.cols);
  const bool half = room(in).half;
  const void* source = data(in);
  if (half) {
    KVASIR_ASSIGN(source, read_half(in));
  }
  launch_copy_pieces({const_cast<void*>(source), in.cols, from}, half, {write_half(out), out.cols, to}, rows(in), cols,
                     count, stream_);
  return launched("copy_pieces");
}

}  // namespace kvasir::model::cuda
