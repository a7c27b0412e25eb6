// Device helpers shared by the kernels: element access, where a token lives, the visible range.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "attention/cuda/types.h"

namespace kvasir::attention::cuda {

// Programmatic launches (sm_90; elsewhere a kernel starts when the one ahead has ended): until it waits, a kernel may
// read only what was there before the one ahead began.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ inline float e4m3_float(uint8_t b) {
  __half_raw h = __nv_cvt_fp8_to_halfraw(b, __NV_E4M3);
  return __half2float(__half(h));
}

__device__ inline float load_float(const void* p, DType type, int64_t i) {
  switch (type) {
    case DType::f32: return static_cast<const float*>(p)[i];
    case DType::f16: return __half2float(static_cast<const __half*>(p)[i]);
    case DType::bf16: return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
    case DType::f8_e4m3: return e4m3_float(static_cast<const uint8_t*>(p)[i]);
    case DType::i8: return static_cast<const int8_t*>(p)[i];
    case DType::i4: {
      int b = static_cast<const uint8_t*>(p)[i >> 1] >> ((i & 1) * 4) & 15;
      return float((b ^ 8) - 8);
    }
    default: return 0.0f;
  }
}

__device__ inline void store_float(void* p, DType type, int64_t i, float x) {
  switch (type) {
    case DType::f32: static_cast<float*>(p)[i] = x; break;
    case DType::f16: static_cast<__half*>(p)[i] = __float2half_rn(x); break;
    case DType::bf16: static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(x); break;
    case DType::f8_e4m3: static_cast<uint8_t*>(p)[i] = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); break;
    default: break;
  }
}

// A query as E4M3, in its units.
__device__ inline float as_fp8(const Layer& l, float x) {
  return e4m3_float(__nv_cvt_float_to_fp8(x * l.q_inverse, __NV_SATFINITE, __NV_E4M3));
}

// Two 16-bit floats as a matrix unit's register has them.
__device__ __forceinline__ float2 pair_of(uint32_t raw, bool brain) {
  return brain ? float2{__uint_as_float(raw << 16), __uint_as_float(raw & 0xffff0000u)}
               : __half22float2(*reinterpret_cast<const __half2*>(&raw));
}
__device__ __forceinline__ uint32_t pair_as(float2 x, bool brain) {
  const __nv_bfloat162 b = __floats2bfloat162_rn(x.x, x.y);
  const __half2 h = __floats2half2_rn(x.x, x.y);
  return brain ? *reinterpret_cast<const uint32_t*>(&b) : *reinterpret_cast<const uint32_t*>(&h);
}

// The slot of logical token t: itself, or its place in the ring behind the sinks.
__device__ inline int32_t slot_of(const Shape& s, int32_t t) {
  if (s.cyclic == 0 || t < s.sinks) return t;
  return s.sinks + (t - s.sinks) % (s.cyclic - s.sinks);
}

__device__ inline int64_t physical(const Shape& s, const StepView& v, int64_t table, int32_t slot) {
  switch (static_cast<kvcache::IndexMode>(s.mode)) {
    case kvcache::IndexMode::offset: return table + slot;
    case kvcache::IndexMode::page_table:
      return int64_t(v.table[table + (slot >> s.page_shift)]) + (slot & ((1 << s.page_shift) - 1));
    default: return v.table[table + slot];
  }
}

// Where token t of sequence b is read: through its beam's ancestor, its ring, its table.
__device__ inline int64_t read_place(const Shape& s, const StepView& v, int32_t b, int32_t t) {
  if (v.beam_width > 0) {
    int32_t first = b - b % v.beam_width;
    b = first + v.beam[b * v.beam_stride + t];
  }
  return physical(s, v, v.sequences[b].table, slot_of(s, t));
}

// Keys a query at position t may see: [0, sink_end) and [begin, end).
struct Range {
  int32_t sink_end, begin, end;
};
__device__ inline Range visible(const Shape& s, const DeviceSequence& q, int32_t t) {
  Range r{0, 0, q.kv_len};
  if (q.flags & kCausal || s.window > 0 || s.slopes != nullptr) r.end = min(r.end, t + 1);
  if (s.window > 0) {
    r.begin = max(s.sinks, t - (s.window - s.sinks) + 1);
    if (s.streaming) r.begin = min(r.begin, q.start_pos);  // dense inside one call
    r.begin = min(max(r.begin, 0), max(r.end, 0));
    r.sink_end = min(s.sinks, r.begin);
  }
  return r;
}
__device__ inline bool sees(const Range& r, int32_t j) { return j < r.end && (j >= r.begin || j < r.sink_end); }

__device__ inline float softcapped(float x, float cap) { return cap > 0.0f ? cap * tanhf(x / cap) : x; }

}  // namespace kvasir::attention::cuda
