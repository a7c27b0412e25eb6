#include "model/cuda/footprint.h"

#include <algorithm>

#include "model/arch/registry.h"
#include "model/cpu/ops.h"
#include "model/cuda/packing_choice.h"

namespace kvasir::model::cuda {
namespace {

// As measured on an H100 with CUDA 13.
constexpr int64_t kLibraries = int64_t(620) << 20;
// Of logits at a time.
constexpr int64_t kLogitRows = 512;
// Attention's parts to be merged are of as many warps as run at once: those of an H100. Latent attention's are of one
// block a multiprocessor.
constexpr int64_t kMultiprocessors = 132, kWarps = 3 * kMultiprocessors * 8, kTileRows = 32, kLatentRows = 64;

// Room for the parts of queries, each of all heads.
int64_t latent_bytes(const ModelConfig& c, const RunnerOptions& o, int64_t head_dim) {
  const int64_t blocks = (c.heads + kLatentRows - 1) / kLatentRows;  // of heads
  const int64_t tile = std::max<int64_t>(1, kLatentRows * blocks / c.heads);
  const int64_t parts = 2 * kMultiprocessors / blocks * tile + 2 * std::min<int64_t>(o.max_tokens, o.max_batch * tile);
  return parts * c.heads * (head_dim + 1) * 4;
}

int64_t attention_bytes(const ModelConfig& c, const RunnerOptions& o, int64_t head_dim, int64_t kv_heads) {
  const int64_t rows = o.max_tokens, keys = o.max_kvlen, kv = kv_heads * head_dim;
  // Two plans: tables of pages, and of beams.
  const int64_t plans = 2 * o.max_batch * 4 * (keys + keys / o.page_size);
  if (c.latent.rank > 0) return plans + latent_bytes(c, o, head_dim);
  const int64_t inputs = 2 * rows * (c.heads * head_dim + 2 * kv);
  const int64_t gathered = head_dim <= 128 ? 2 * 2 * (keys + rows) * kv : 0;  // what prefill reads of the cache
  const int64_t group = c.heads / kv_heads;
  const int64_t parts = 2 * kWarps / kv_heads * std::max<int64_t>(1, kTileRows / group) + 4 * rows;
  return inputs + gathered + parts * c.heads * (head_dim + 1) * 4 + plans;
}

// Rows on their way through the experts, each as often as it has some.
int64_t expert_bytes(const ModelConfig& c, int64_t rows) {
  const ExpertsConfig& e = c.experts;
  if (e.routing.experts == 0) return 0;
  return e.routing.used * std::max<int64_t>(rows, 64) * (4 * 4 + 2 * e.ffn + 4 * c.hidden);
}

}  // namespace

Result<GpuFootprint> footprint(const ModelConfig& part, Weights& weights, const RunnerOptions& options) {
  GpuFootprint out{.libraries = kLibraries};
  if (part.encoder_layers == 0) weights.leave_seeded();
  weights.leave_bytes();
  const Quantize quantize = options.quantize == "fp8"    ? Quantize::fp8
                            : options.quantize == "bf16" ? Quantize::bf16
                                                         : Quantize::as_stored;
  bool bytes = false;
  cpu::CpuOptions o;
  o.measure = [&](std::span<const HostTensor> parts) {
    const PackingChoice chosen = choose_packing(parts, quantize, true);
    bytes |= chosen.packing == Packing::fp8;
    // Experts' become tiles of bfloat16, or stay MXFP4.
    const bool tiles = of_expert(parts[0]) && chosen.packing != Packing::mxfp4;
    return tiles ? chosen.rows * chosen.cols * 2 : chosen.bytes;
  };
  o.max_tokens = options.max_tokens, o.max_logit_rows = std::min(kLogitRows, options.max_tokens);
  o.page_size = options.page_size, o.index_mode = options.index_mode;
  o.runner = options, o.part = part.part;
  ThreadPool pool(1);
  cpu::CpuOps ops(o, pool, cpu::best_kernels());
  KVASIR_TRY(load_network(part, weights, ops, {}).status());
  // A value and its rounding to 16 bits; of buffers in E4M3, too.
  out.weights = ops.weight_bytes() + ops.vector_bytes() / 4 * 6;
  out.steps = ops.buffer_bytes() / 4 * (bytes ? 7 : 6) + expert_bytes(part, options.max_tokens);
  out.steps += 4 * std::min(kLogitRows, options.max_tokens) * int64_t(part.vocab);  // what draws work on
  bool windows = false, full = false;
  for (int32_t i = 0; i < part.layers; ++i) (part.windowed(i) ? windows : full) = true;
  out.steps += (int64_t(windows) + int64_t(full)) *
               attention_bytes(part, options, part.head_dim_of(0), std::max(1, part.kv_heads_of(0)));
  return out;
}

}  // namespace kvasir::model::cuda
