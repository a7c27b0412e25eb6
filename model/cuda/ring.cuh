// What kernels share that a producer warpgroup feeds through a ring of stages in shared memory, on Hopper.
#pragma once

#include "attention/cuda/bulk.cuh"

namespace kvasir::model::cuda {

constexpr int kGroup = 128;         // threads of a warpgroup
constexpr int kShared = 227 << 10;  // bytes of shared memory that a block may have

// Arrives when what this thread has copied so far is there.
[[maybe_unused]] __device__ inline void arrive_when_copied(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(attention::cuda::shared_address(barrier))
               : "memory");
}
// What cp.async wrote, for the tensor cores.
[[maybe_unused]] __device__ inline void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// The producer gives registers back, for the consumers to take.
template <int kRegisters>
__device__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// A stage of the ring, and which time round it is.
struct RingPlace {
  int stage = 0, phase = 0;
};
template <int kStages>
__device__ void advance(RingPlace& at) {
  if (++at.stage == kStages) at.stage = 0, at.phase ^= 1;
}

}  // namespace kvasir::model::cuda
