#include "bench/limits.h"

#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/cpu.h"

namespace kvasir::bench {
namespace {

#if defined(__x86_64__)
// Four streams: one alone does not fill the line buffers of the prefetcher.
__attribute__((target("avx512f"))) uint64_t read_avx512(const char* p, size_t bytes) {
  __m512i s[4] = {};
  const size_t quarter = bytes / 4 / 256 * 256;
  for (size_t i = 0; i < quarter; i += 128)
    for (int k = 0; k < 4; ++k) {
      s[k] = _mm512_xor_si512(s[k], _mm512_loadu_si512(p + size_t(k) * quarter + i));
      s[k] = _mm512_xor_si512(s[k], _mm512_loadu_si512(p + size_t(k) * quarter + i + 64));
    }
  s[0] = _mm512_xor_si512(_mm512_xor_si512(s[0], s[1]), _mm512_xor_si512(s[2], s[3]));
  return uint64_t(_mm512_reduce_add_epi64(s[0]));
}
__attribute__((target("avx2"))) uint64_t read_avx2(const char* p, size_t bytes) {
  __m256i s[4] = {};
  const size_t quarter = bytes / 4 / 256 * 256;
  for (size_t i = 0; i < quarter; i += 64)
    for (int k = 0; k < 4; ++k) {
      const auto* at = reinterpret_cast<const __m256i*>(p + size_t(k) * quarter + i);
      s[k] = _mm256_xor_si256(s[k], _mm256_xor_si256(_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)));
    }
  s[0] = _mm256_xor_si256(_mm256_xor_si256(s[0], s[1]), _mm256_xor_si256(s[2], s[3]));
  return uint64_t(_mm256_extract_epi64(s[0], 0));
}
__attribute__((target("avx512f"))) double fma_avx512(int64_t rounds, float* sink) {
  __m512 a[16], x = _mm512_set1_ps(0.999f), y = _mm512_set1_ps(0.001f);
  for (auto& v : a) v = _mm512_set1_ps(1.0f);
  for (int64_t i = 0; i < rounds; ++i)
    for (auto& v : a) v = _mm512_fmadd_ps(v, x, y);
  for (auto& v : a) *sink += _mm512_cvtss_f32(v);
  return double(rounds) * 16 * 16 * 2;
}
__attribute__((target("avx2,fma"))) double fma_avx2(int64_t rounds, float* sink) {
  __m256 a[12], x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(0.001f);
  for (auto& v : a) v = _mm256_set1_ps(1.0f);
  for (int64_t i = 0; i < rounds; ++i)
    for (auto& v : a) v = _mm256_fmadd_ps(v, x, y);
  for (auto& v : a) *sink += _mm256_cvtss_f32(v);
  return double(rounds) * 12 * 8 * 2;
}
bool wide() { return cpu().avx512; }
#endif

}  // namespace

uint64_t read_all(const void* data, size_t bytes) {
#if defined(__x86_64__)
  const char* p = static_cast<const char*>(data);
  return wide() ? read_avx512(p, bytes) : read_avx2(p, bytes);
#else
  const uint64_t* p = static_cast<const uint64_t*>(data);
  uint64_t s[4] = {};
  for (size_t i = 0; i + 4 <= bytes / 8; i += 4)
    for (int k = 0; k < 4; ++k) s[k] ^= p[i + size_t(k)];
  return s[0] ^ s[1] ^ s[2] ^ s[3];
#endif
}

double fma_rounds(int64_t rounds, float* sink) {
#if defined(__x86_64__)
  return wide() ? fma_avx512(rounds, sink) : fma_avx2(rounds, sink);
#else
  float a[64];
  for (float& v : a) v = 1.0f;
  for (int64_t i = 0; i < rounds; ++i)
    for (float& v : a) v = __builtin_fmaf(v, 0.999f, 0.001f);
  for (float v : a) *sink += v;
  return double(rounds) * 64 * 2;
#endif
}

const char* simd_name() {
#if defined(__x86_64__)
  return wide() ? "avx512" : "avx2";
#else
  return "neon";
#endif
}

double thread_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

}  // namespace kvasir::bench
