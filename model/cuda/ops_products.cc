// Products, and what reads their results at once: gates, and sums with the norm behind them.
#include "core/check.h"
#include "model/cuda/elementwise.h"
#include "model/cuda/kernels.h"
#include "model/cuda/ops.h"

namespace kvasir::model::cuda {

// The library times its ways of multiplying by each number of rows that is new, and steps that take prompts up have all
// of them: rounded up there are few. What comes of the rows past a buffer's own is read by nobody.
int64_t CudaOps::product_rows(Buffer b) {
  const int64_t own = rows(b);
  if (options_.batch_invariant || own <= kLeastPadded || own > Cublas::kTimedRows) return own;
  return std::min(padded(own), room(b).logit_rows ? options_.max_logit_rows : options_.max_tokens);
}

Status CudaOps::product(Buffer in, Matrix weight, Form form, Buffer out, bool biased) {
  const Loaded& w = *matrices_[size_t(weight.id)];
  const bool gated = form == Form::silu || form == Form::gelu;
  KVASIR_CHECK(in.cols == w.cols && out.cols * (gated ? 2 : 1) == w.rows, "a product of ", in.cols, " by ", w.rows,
               " x ", w.cols, " into ", out.cols);
  KVASIR_CHECK(form != Form::added_f32 || !room(out).half, "what is added to is float32");
  const int64_t rows = product_rows(in);
  const bool by_bytes = products_->reads_bytes(w, rows), wide = form != Form::bf16 && !gated;
  const void* half = nullptr;
  Bytes bytes;
  if (by_bytes) {
    KVASIR_ASSIGN(bytes, read_bytes(in));
  } else {
    KVASIR_ASSIGN(half, read_half(in));
  }
  if (rows > kFewRows) (by_bytes ? room(in).wants_bytes : room(in).wants_half) = true;
  void* to = wide ? write(out) : write_half(out);
  const bool adapted = adapters_.changes(weight), added = form == Form::added_f32;
  if (adapted && added) KVASIR_TRY(adapters_.before_adding(weight, to, w.rows, stream_));
  KVASIR_TRY(products_->run(half, bytes, w, to, rows, form));
  if (adapted) {
    KVASIR_CHECK(!gated, "gates are fused before adapters have changed them");
    KVASIR_ASSIGN(half, read_half(in));
    KVASIR_TRY(adapters_.add(weight, half, w.cols, to, !wide, w.rows, added, stream_));
  }
  if (biased && w.bias) launch_add_bias(to, !wide, w.bias->data.as<float>(), this->rows(in), w.rows, stream_);
  return launched("product");
}

Status CudaOps::linear_glu(Buffer in, Matrix weight, Activation activation, Buffer between, Buffer out) {
  const Form form = activation == Activation::silu ? Form::silu : Form::gelu;
  const Loaded& w = *matrices_[size_t(weight.id)];
  const bool fused = !w.bias && (activation == Activation::silu || activation == Activation::gelu_tanh);
  const bool fuses = fused && products_->fuses(w, product_rows(in), form);
  if (fuses && !adapters_.changes(weight)) return product(in, weight, form, out);
  if (fused && leaves_sums(in, weight) && gates_to_bytes(activation, out)) {
    KVASIR_ASSIGN(const Products::Sums sums, unscaled(in, weight, between));
    launch_glu_bytes(activation != Activation::silu, sums.data, sums.by, room(out).as_bytes(), rows(in), out.cols,
                     stream_);
    room(out).half = room(out).bytes = room(out).half_lacks = true;
    return launched("glu");
  }
  // What adapters change is fused after that: as the same float32 sums, of which it makes the same bits.
  KVASIR_TRY(product(in, weight, fuses ? Form::apart : Form::bf16, between));
  return glu(activation, between, out);
}

// Whether gates that are fused become E4M3 and nothing else.
bool CudaOps::gates_to_bytes(Activation activation, Buffer out) {
  const bool known = activation == Activation::silu || activation == Activation::gelu_tanh;
  return known && makes_bytes(out) && !room(out).wants_half && out.cols % 8 == 0;
}

// Whether a product's scales can be left to what reads it.
bool CudaOps::leaves_sums(Buffer in, Matrix weight) {
  const Loaded& w = *matrices_[size_t(weight.id)];
  return products_->scales_apart(w, product_rows(in)) && !w.bias && !adapters_.changes(weight);
}

// As bfloat16 in `out`, or, where that is none, as float32.
Result<Products::Sums> CudaOps::unscaled(Buffer in, Matrix weight, Buffer out) {
  KVASIR_ASSIGN(const Bytes bytes, read_bytes(in));
  room(in).wants_bytes = true;
  const bool half = out.id >= 0;
  return products_->run_unscaled(bytes, *matrices_[size_t(weight.id)], half ? write_half(out) : nullptr,
                                 product_rows(in), half ? Form::bf16 : Form::f32);
}

// Scales, sum, norm and E4M3 in one kernel.
Status CudaOps::add_sums_norm(Buffer in, Matrix weight, Buffer out, Vector norm, float eps, Buffer normed) {
  KVASIR_CHECK(!room(out).half, "what is added to is float32");
  KVASIR_ASSIGN(const Products::Sums sums, unscaled(in, weight, {}));
  written(out, false);
  void* half = write_half(normed);
  launch_add_norm_bytes(static_cast<const float*>(sums.data), sums.by, data(out), vector(norm), eps, half,
                        room(normed).as_bytes(), rows(in), out.cols, stream_);
  room(normed).bytes = true;
  return launched("add and norm");
}

Status CudaOps::glu(Activation activation, Buffer in, Buffer out) {
  const bool half = room(in).half;
  const void* from = half ? room(in).half_data.get() : data(in);
  const bool known = activation == Activation::silu || activation == Activation::gelu_tanh;
  if (half && gates_to_bytes(activation, out)) {
    launch_glu_bytes(activation != Activation::silu, from, {}, room(out).as_bytes(), rows(in), out.cols, stream_);
    room(out).half = room(out).bytes = room(out).half_lacks = true;
    return launched("glu");
  }
  void* to = write_half(out);
  if (known)
    launch_glu(activation != Activation::silu, from, half, to, rows(in), out.cols, stream_);
  else
    launch_activate(activation, true, from, half, to, rows(in), out.cols, stream_);
  return launched("glu");
}

}  // namespace kvasir::model::cuda
