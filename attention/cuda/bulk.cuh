// The tensor memory accelerator, the barriers it completes on, and how its maps are made.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "attention/cuda/mma.cuh"

namespace kvasir::attention::cuda {

__device__ inline void barrier_init(uint64_t* b, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(b)), "r"(count));
}
__device__ inline void barrier_expect(uint64_t* b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(b)), "r"(bytes));
}
__device__ inline void barrier_arrive(uint64_t* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(b)) : "memory");
}
__device__ inline void barrier_wait(uint64_t* b, int phase) {
  asm volatile(
      "{\n.reg .pred p;\nagain: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra "
      "again;\ndone:\n}\n" ::"r"(shared_address(b)),
      "r"(phase)
      : "memory");
}
__device__ inline void load_tile(void* to, const CUtensorMap* map, int column, int head, int row, uint64_t* full) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];\n" ::
          "r"(shared_address(to)),
      "l"(map), "r"(shared_address(full)), "r"(column), "r"(head), "r"(row)
      : "memory");
}
__device__ inline void store_tile(const CUtensorMap* map, const void* from, int column, int head, int row) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];\n" ::"l"(map),
               "r"(shared_address(from)), "r"(column), "r"(head), "r"(row)
               : "memory");
}
// Bytes side by side, by the same engine: in, and out again.
__device__ inline void load_bulk(void* to, const void* from, int bytes, uint64_t* full) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(full))
               : "memory");
}
__device__ inline void store_bulk(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(to), "r"(shared_address(from)),
               "r"(bytes)
               : "memory");
}
__device__ inline void bulk_stores_commit() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }
template <int kPending>
__device__ inline void bulk_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kPending) : "memory");
}
__device__ inline void bulk_stores_done() { asm volatile("cp.async.bulk.wait_group 0;\n" ::: "memory"); }
__device__ inline void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Looked up, not linked: a machine without a driver still starts.
inline Encode encode_function() {
  static const Encode found = [] {
    void* p = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<Encode>(p);
  }();
  return found;
}

}  // namespace kvasir::attention::cuda
