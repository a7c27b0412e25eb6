// Prefill and extend on Hopper in 16 bits: new keys are read as they were given (or as append left them), the cached
// prefix from the gather buffer, one online softmax over both.
#include "attention/cuda/prefill16.cuh"
#include "attention/cuda/prefill_launch.cuh"

namespace kvasir::attention::cuda {
namespace {

template <class M>
cudaError_t launch(const Shape& s, const StepView& v, const Layer& l, const PrefillTile* tiles, int64_t count,
                   const TileQueue& queue, int64_t query_rows, int64_t new_rows, int64_t old_rows, int multiprocessors,
                   cudaStream_t stream) {
  typename M::Maps maps = {};
  auto keys = [&](CUtensorMap* map, const void* base, int64_t rows) {
    return encode_rows(map, base, s, s.kv_heads, rows, kTileKeys);
  };
  if (!encode_rows(&maps.q, l.q, s, s.heads, query_rows, kTileQueries) || !keys(&maps.k_new, l.k_new, new_rows) ||
      !keys(&maps.v_new, l.v_new, new_rows) || !keys(&maps.k_old, l.k_old, old_rows) ||
      !keys(&maps.v_old, l.v_old, old_rows))
    return cudaErrorInvalidValue;
  return launch_tiles<M>(maps, s, v, l, tiles, count, queue, query_rows, multiprocessors, stream);
}

}  // namespace

bool prefill_supports(const Shape& s, int compute_capability) {
  return compute_capability == 90 && s.head_dim >= 64 && s.head_dim <= 128 && s.head_dim % 8 == 0 &&
         (s.work == DType::bf16 || s.work == DType::f16) && !s.streaming && encode_function() != nullptr;
}

cudaError_t launch_prefill(const Shape& s, const StepView& v, const Layer& l, const PrefillTile* tiles, int64_t count,
                           const TileQueue& queue, int64_t query_rows, int64_t new_rows, int64_t old_rows,
                           int multiprocessors, cudaStream_t stream) {
  auto* run = s.work == DType::bf16 ? s.head_dim > 64 ? launch<Wide<Brain, 128>> : launch<Wide<Brain, 64>>
              : s.head_dim > 64 ? launch<Wide<Half, 128>>
                                    : launch<Wide<Half, 64>>;
  return run(s, v, l, tiles, count, queue, query_rows, new_rows, old_rows, multiprocessors, stream);
}

}  // namespace kvasir::attention::cuda
