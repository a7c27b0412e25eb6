// Linear attention, and gates of what full attention gives beside it.
#include "core/cat.h"
#include "core/check.h"
#include "model/cuda/ops.h"

namespace kvasir::model::cuda {

Result<int32_t> CudaOps::add_delta_rule(const DeltaRule& rule) {
  if (!linear_layers_) linear_layers_.emplace(options_.max_tokens, stream_);
  return linear_layers_->add(rule, vector(rule.conv), vector(rule.decay), vector(rule.decay_bias), vector(rule.norm));
}

Status CudaOps::delta_rule(int32_t rule, Buffer in, Buffer betas, Buffer out) {
  const float *from = read(in), *by = read(betas);
  return linear_layers_->run(rule, from, by, write_half(out));
}

Status CudaOps::sigmoid_gates(Buffer in_out, Buffer gate) {
  KVASIR_CHECK(in_out.cols == gate.cols && gate.cols % 2 == 0, in_out.cols, " columns and ", gate.cols, " gates");
  const float* by = read(gate);
  KVASIR_TRY(read_half(in_out).status());
  launch_sigmoid_gates(by, write_half(in_out), rows(in_out) * in_out.cols, stream_);
  return launched("sigmoid_gates");
}

}  // namespace kvasir::model::cuda
