// Device and pinned memory that is given back, and CUDA errors as Status.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <utility>

#include "core/cat.h"
#include "core/status.h"

namespace kvasir::attention::cuda {

inline Status check(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return {};
  if (e == cudaErrorMemoryAllocation)
    return resource_exhausted(cat(what, ": ", cudaGetErrorString(e), "; lower the batch, token or context limits"));
  return internal_error(cat(what, ": ", cudaGetErrorName(e), ": ", cudaGetErrorString(e)));
}

template <cudaError_t (*kAllocate)(void**, size_t), cudaError_t (*kFree)(void*)>
class Memory {
 public:
  Memory() = default;
  Memory(Memory&& other) noexcept : p_(std::exchange(other.p_, nullptr)) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(p_, other.p_);
    return *this;
  }
  ~Memory() { kFree(p_); }
  Status allocate(size_t bytes) {
    kFree(std::exchange(p_, nullptr));
    return bytes == 0 ? Status() : check(kAllocate(&p_, bytes), cat("allocating ", bytes, " bytes").c_str());
  }
  Status upload(const void* from, size_t bytes) {
    KVASIR_TRY(allocate(bytes));
    return check(cudaMemcpy(p_, from, bytes, cudaMemcpyDefault), "upload");
  }
  void* get() const { return p_; }
  std::byte* bytes() const { return static_cast<std::byte*>(p_); }
  template <class T>
  T* as() const {
    return static_cast<T*>(p_);
  }

 private:
  void* p_ = nullptr;
};

inline cudaError_t device_allocate(void** p, size_t n) { return cudaMalloc(p, n); }
inline cudaError_t device_free(void* p) { return p ? cudaFree(p) : cudaSuccess; }
inline cudaError_t pinned_allocate(void** p, size_t n) { return cudaHostAlloc(p, n, cudaHostAllocDefault); }
inline cudaError_t pinned_free(void* p) { return p ? cudaFreeHost(p) : cudaSuccess; }
using DeviceMemory = Memory<device_allocate, device_free>;
using PinnedMemory = Memory<pinned_allocate, pinned_free>;

}  // namespace kvasir::attention::cuda
