// How prefill's kernels are launched: as many blocks as there are multiprocessors, which take tiles until none is left.
#pragma once

#include "attention/cuda/launch_early.cuh"
#include "attention/cuda/prefill.cuh"
#include "attention/cuda/shared_memory.h"

namespace kvasir::attention::cuda {

template <class M, bool kExtra>
__global__ void __launch_bounds__(384, 1)
    prefill_kernel(const __grid_constant__ typename M::Maps maps, const __grid_constant__ Shape s,
                   const __grid_constant__ StepView v, const __grid_constant__ Layer l, const PrefillTile* tiles,
                   const __grid_constant__ TileQueue queue) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // elsewhere nobody launches it
  prefill_block<M, kExtra>(maps, s, v, l, tiles, queue);
#endif
}

template <class M, bool kExtra>
cudaError_t launch_tiles(const typename M::Maps& maps, const Shape& s, const StepView& v, const Layer& l,
                         const PrefillTile* tiles, int64_t count, const TileQueue& queue, int multiprocessors,
                         cudaStream_t stream) {
  auto* kernel = prefill_kernel<M, kExtra>;
  constexpr int bytes = int(sizeof(PrefillShared<M>)) + 1024;
  static std::atomic<uint64_t> given;
  if (const cudaError_t e = allow_shared(kernel, bytes, given); e != cudaSuccess) return e;
  const int64_t all = count * s.heads;
  return launch_early(kernel, dim3(unsigned(all < multiprocessors ? all : multiprocessors)), 384, bytes, stream, maps,
                      s, v, l, tiles, queue);
}

// [rows, heads, D] of 16 bits as boxes of some rows and 64 columns of one head; columns past D read as zeros and are
// not written.
inline bool encode_rows(CUtensorMap* map, const void* base, const Shape& s, int heads, int64_t rows, int rows_in_box) {
  const cuuint64_t sizes[3] = {cuuint64_t(s.head_dim), cuuint64_t(heads), cuuint64_t(rows)};
  const cuuint64_t strides[2] = {cuuint64_t(s.head_dim) * 2, cuuint64_t(s.head_dim) * heads * 2};
  const cuuint32_t box[3] = {64, 1, cuuint32_t(rows_in_box)}, ones[3] = {1, 1, 1};
  return encode_function()(map,
                           s.work == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                           3, const_cast<void*>(base), sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                           CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// With a kernel of its own where scores go through more than the scale.
template <class M>
cudaError_t launch_tiles(typename M::Maps& maps, const Shape& s, const StepView& v, const Layer& l,
                         const PrefillTile* tiles, int64_t count, const TileQueue& queue, int64_t query_rows,
                         int multiprocessors, cudaStream_t stream) {
  if (s.out == s.work && !encode_rows(&maps.out, l.out, s, s.heads, query_rows, 16)) return cudaErrorInvalidValue;
  return transforms_scores(s, l) ? launch_tiles<M, true>(maps, s, v, l, tiles, count, queue, multiprocessors, stream)
                                 : launch_tiles<M, false>(maps, s, v, l, tiles, count, queue, multiprocessors, stream);
}

}  // namespace kvasir::attention::cuda
