#include "model/cpu/footprint.h"

#include <algorithm>

#include "model/arch/registry.h"
#include "model/cpu/ops.h"
#include "model/cpu/packed.h"
#include "model/cpu/rank.h"

namespace kvasir::model::cpu {
namespace {

// Rows beside the buffers: those of the widest input as integers and padded, and those of chosen experts, whose gates
// and results are kept for each.
int64_t row_bytes(const ModelConfig& c) {
  constexpr int64_t kFloat = sizeof(float), kIntegers = 3;
  const int64_t widest = std::max({int64_t(c.hidden), int64_t(c.ffn), int64_t(c.heads) * c.head_dim});
  const ExpertsConfig& e = c.experts;
  const int64_t of_expert = kFloat * e.ffn + kFloat * c.hidden + kIntegers * std::max<int64_t>(c.hidden, e.ffn);
  return widest * (kFloat + kIntegers) + e.routing.used * of_expert;
}

}  // namespace

Result<Footprint> footprint(const std::vector<ModelConfig>& parts, Weights& weights, const RunnerOptions& options) {
  Footprint out;
  if (parts[0].encoder_layers == 0) weights.leave_seeded();  // encoder-decoders read some of their matrices themselves
  if (leaves_bytes(parts)) weights.leave_bytes();
  for (const ModelConfig& c : parts) {
    CpuOptions o;
    o.measure = [&](std::span<const HostTensor> tensors) {
      int64_t all = 0;
      for (const std::span<const HostTensor> run : runs_of(tensors, options.precise)) {
        int64_t bytes = 0;
        (void)measure(run, options.precise, &bytes);
        all += bytes;
      }
      return all;
    };
    o.precise = options.precise;
    o.max_tokens = options.max_tokens;
    o.max_logit_rows = Rank::kLogitRows;
    o.page_size = options.page_size;
    o.index_mode = options.index_mode;
    o.runner = options;
    o.part = c.part;
    ThreadPool pool(1);
    CpuOps ops(o, pool, best_kernels());
    KVASIR_TRY(load_network(c, weights, ops, {}).status());
    out.weights += ops.weight_bytes() + ops.vector_bytes();
    out.steps += ops.buffer_bytes() + options.max_tokens * row_bytes(c);
  }
  return out;
}

bool leaves_bytes(const std::vector<ModelConfig>& parts) {
  return std::all_of(parts.begin(), parts.end(), [](const ModelConfig& c) {
    const RankPart& p = c.part;
    return p.heads.first * c.head_dim % 128 == 0 && p.ffn.first % 128 == 0 && p.shared_ffn.first % 128 == 0;
  });
}

}  // namespace kvasir::model::cpu
