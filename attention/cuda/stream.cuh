// The kernels that read the cache once. Every warp walks a part of the plan of its own: runs of keys, each for a tile
// of query rows of one kv head. It has its own ring of shared-memory stages and its own running softmax, so no warp
// ever waits for another. The warps of a block take neighbouring kv heads of the same part: where heads lie side by
// side, so do their reads.
#pragma once

#include <type_traits>

#include "attention/cuda/launch_early.cuh"
#include "attention/cuda/stream_few.cuh"
#include "attention/cuda/stream_many.cuh"

namespace kvasir::attention::cuda {

template <class K, int kD, int kList>
using SizeOf = std::conditional_t<kList == 0, FewSize<K, kD>, StreamSize<K, kD>>;

template <class K, int kD, int kList>
constexpr auto stream_kernel() {
  if constexpr (kList == 0)
    return few_rows_kernel<K, kD>;
  else
    return many_rows_kernel<K, kD, kList>;
}

// Kinds of which a kernel is made whose warps append.
template <class K, int kD>
constexpr bool kAppendsRuns = K::kBits == 16 && kD % 64 == 0;

// Shared memory a block of a kernel may have, once it was asked for: all there is, whoever asks for less later.
template <class Kernel>
int most_shared(Kernel* kernel) {
  int device = 0, most = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaFuncAttributes own = {};
  if (cudaFuncGetAttributes(&own, kernel) != cudaSuccess) return 0;
  most -= int(own.sharedSizeBytes);
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most) == cudaSuccess ? most : 0;
}

// Blocks a multiprocessor holds; 0: too much for this device, and the plain kernel does it.
template <class K, int kD, int kList>
int stream_prepare(int scale_bytes) {
  const int bytes = SizeOf<K, kD, kList>::bytes(scale_bytes);
  auto* kernel = stream_kernel<K, kD, kList>();
  int blocks = 0;
  if (bytes <= most_shared(kernel))
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kStreamWarps * 32, bytes);
  return blocks;
}

// Warps of a block that has a multiprocessor to itself and merges their results; 0: no room.
template <class K, int kD>
int stream_shared_warps(int scale_bytes) {
  using Size = FewSize<K, kD>;
  const int bytes = Size::bytes(scale_bytes) * (Size::kSharedWarps / kStreamWarps);
  return bytes <= most_shared(stream_kernel<K, kD, 0>()) ? Size::kSharedWarps : 0;
}

// Whether the kernel whose warps append has the room that the usual one has.
template <class K, int kD>
bool stream_appends() {
  if constexpr (kAppendsRuns<K, kD>) {
    auto* kernel = few_rows_kernel<K, kD, true>;
    const int bytes = FewSize<K, kD>::bytes(0);
    int blocks = 0;
    if (bytes <= most_shared(kernel))
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kStreamWarps * 32, bytes);
    return blocks > 0 && blocks >= stream_prepare<K, kD, 0>(0);
  }
  return false;
}

template <class K, int kD, int kList>
void stream_run(const Shape& s, const StepView& v, const Layer& l, const StreamList& list, int scale_bytes,
                cudaStream_t stream) {
  int warps = kStreamWarps, bytes = SizeOf<K, kD, kList>::bytes(scale_bytes);
  if constexpr (kList == 0)
    if (list.blocks_per_head > 0) warps = FewSize<K, kD>::kSharedWarps, bytes *= warps / kStreamWarps;
  auto* kernel = stream_kernel<K, kD, kList>();
  if constexpr (kList == 0 && kAppendsRuns<K, kD>)
    if (l.appended_here && list.blocks_per_head == 0) kernel = few_rows_kernel<K, kD, true>;
  launch_early(kernel, dim3((list.count * s.kv_heads + warps - 1) / warps), warps * 32, bytes, stream, s, v, l, list,
               scale_bytes);
}

// StreamingLLM: of 16 rows, whose keys are rotated as they are read.
template <class K, int kD>
int rotated_prepare(int scale_bytes) {
  const int bytes = StreamSize<K, kD>::bytes(scale_bytes);
  auto* kernel = many_rows_kernel<K, kD, 1, true>;
  int blocks = 0;
  if (bytes <= most_shared(kernel))
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kStreamWarps * 32, bytes);
  return blocks;
}
template <class K, int kD>
void rotated_run(const Shape& s, const StepView& v, const Layer& l, const StreamList& list, int scale_bytes,
                 cudaStream_t stream) {
  launch_early(many_rows_kernel<K, kD, 1, true>, dim3((list.count * s.kv_heads + kStreamWarps - 1) / kStreamWarps),
               kStreamWarps * 32, StreamSize<K, kD>::bytes(scale_bytes), stream, s, v, l, list, scale_bytes);
}

// One of these per kind of cache, each compiled in its own file.
struct StreamEntry {
  int (*prepare)(int scale_bytes) = nullptr;
  void (*run)(const Shape&, const StepView&, const Layer&, const StreamList&, int, cudaStream_t) = nullptr;
  int (*shared_warps)(int scale_bytes) = nullptr;  // of the first list, as the next
  bool (*appends)() = nullptr;
};
template <class K, int kD>
StreamEntry few_rows_entry() {
  return {stream_prepare<K, kD, 0>, stream_run<K, kD, 0>, stream_shared_warps<K, kD>, stream_appends<K, kD>};
}
template <class K, int kD>
StreamEntry stream_entry(int list) {
  switch (list) {
    case 0: return few_rows_entry<K, kD>();
    case 1: return {stream_prepare<K, kD, 1>, stream_run<K, kD, 1>};
    case 2:
      if constexpr (kD < 256) return {stream_prepare<K, kD, 2>, stream_run<K, kD, 2>};
      return {};
    default: return {};
  }
}
template <class K>
StreamEntry stream_entries(int head_dim, int list) {
  switch (head_dim) {
    case 128: return stream_entry<K, 128>(list);
#ifndef KVASIR_CUDA_FEW  // else only to see that it compiles
    case 64: return stream_entry<K, 64>(list);
    case 96:
      if constexpr (K::kBits > 4) return stream_entry<K, 96>(list);
      return {};
    case 256: return stream_entry<K, 256>(list);
#endif
    default: return {};
  }
}

template <class K>
StreamEntry rotated_entry(int head_dim) {
  if (head_dim == 128) return {rotated_prepare<K, 128>, rotated_run<K, 128>};
#ifndef KVASIR_CUDA_FEW
  if (head_dim == 64) return {rotated_prepare<K, 64>, rotated_run<K, 64>};
#endif
  return {};
}

StreamEntry stream_bf16(int head_dim, int list);
StreamEntry stream_f16(int head_dim, int list);
StreamEntry stream_f8(int head_dim, int list);
StreamEntry stream_i8(int head_dim, int list);
StreamEntry stream_i8_group(int head_dim, int list);
StreamEntry stream_i4(int head_dim, int list);
// Heads of 128 with float16 scales: int8 in groups of 64, int4 in groups of 32.
StreamEntry stream_i8_group64();
StreamEntry stream_i4_group32();
// StreamingLLM's; none for a kind or a head it has no kernel for.
StreamEntry stream_rotated(const Shape&, const CacheLayer&);

}  // namespace kvasir::attention::cuda
