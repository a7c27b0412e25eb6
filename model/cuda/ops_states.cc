// Hidden states that heads read: kept by the model, given to the head, whose weights may be the model's.
#include "core/check.h"
#include "model/cuda/elementwise.h"
#include "model/cuda/kernels.h"
#include "model/cuda/ops.h"

namespace kvasir::model::cuda {

Result<Matrix> CudaOps::borrow(const CudaOps& from, Matrix weight) {
  if (weight.id < 0) return weight;
  matrices_.push_back(from.matrices_[size_t(weight.id)]);
  KVASIR_TRY(products_->make_room(*matrices_.back()));
  return Matrix{int32_t(matrices_.size() - 1), weight.rows, weight.cols};
}

// A step of decodes is one graph, whether anybody reads what it keeps or not.
Status CudaOps::keep(Buffer in, int64_t first, float factor) {
  if (!states_ || (!keeps_ && !decodes_)) return {};
  KVASIR_CHECK(first + in.cols <= state_cols_, "columns to ", first + in.cols, " of ", state_cols_);
  const bool half = room(in).half;
  const void* from = data(in);
  if (half) {
    KVASIR_ASSIGN(from, read_half(in));
  }
  launch_keep_states(from, half, factor, ids(3), states_->get(), first, state_cols_, rows(in), in.cols, stream_);
  return launched("keep");
}

Status CudaOps::take_given(Buffer out) {
  KVASIR_CHECK(states_ && given_cols_ == out.cols, given_cols_, " columns into ", out.cols);
  launch_take_states(states_->get(), ids(4), state_cols_, write(out), rows(out), out.cols, stream_);
  return launched("take_given");
}

// Of rows that stay as they are but for these columns, what they are made of stays, too.
Status CudaOps::place(Buffer in, int64_t first, Buffer out) {
  KVASIR_CHECK(first + in.cols <= out.cols, in.cols, " columns at ", first, " of ", out.cols);
  const bool from_half = room(in).half, half = room(out).half && in.cols < out.cols;
  const void* from = data(in);
  if (from_half) {
    KVASIR_ASSIGN(from, read_half(in));
  }
  if (half) KVASIR_TRY(read_half(out).status());
  void* to = half ? write_half(out) : write(out);
  launch_place(from, from_half, to, half, first, out.cols, rows(in), in.cols, stream_);
  return launched("place");
}

}  // namespace kvasir::model::cuda
