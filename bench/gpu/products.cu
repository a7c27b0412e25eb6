// Products by the library, by few_rows.cu and by streamed.cu, and by E4M3 and packed weights: microseconds each, in
// graphs of 30, weights cold in L2, and what reading the weights alone takes at 4.16 TB/s. One JSON object a line.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <functional>
#include <vector>

#include "bench/gpu/graph_time.h"
#include "core/check.h"
#include "model/cuda/cublas.h"
#include "model/cuda/few_rows.h"
#include "model/cuda/fp8.h"
#include "model/cuda/kernels.h"
#include "model/cuda/packed.h"
#include "model/cuda/streamed.h"

using namespace kvasir;
using namespace kvasir::model::cuda;

namespace {

__global__ void fill(uint32_t* p, int64_t n, uint32_t seed) {  // bfloat16 in +-[0.5, 1)
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
    uint32_t x = uint32_t(i) * 2654435761u + seed;
    x ^= x >> 15, x *= 2246822519u, x ^= x >> 13, x *= 3266489917u, x ^= x >> 16;
    p[i] = (x & 0x807f807fu) | 0x3f003f00u;
  }
}

double time_of(cudaStream_t stream, const std::function<void(int)>& launch) {
  return bench::graph_time(stream, 30, launch);
}

}  // namespace

int main(int argc, char**) {
  cudaStream_t stream;
  CUDA(cudaStreamCreate(&stream));
  auto library = Cublas::open(stream);
  KVASIR_CHECK(library.ok(), library.status().to_string());
  struct Shape {
    const char* name;
    int64_t n, k;
    Form form;
  };
  constexpr int64_t kMostRows = 2048;
  const bool short_list = argc > 1;
  for (const Shape& s : {Shape{"qkv 8B", 6144, 4096, Form::bf16},
                         {"output 8B", 4096, 4096, Form::added_f32},
                         {"gate and up 8B", 14336, 4096, Form::silu},
                         {"down 8B", 4096, 14336, Form::added_f32},
                         {"head 8B", 128256, 4096, Form::f32},
                         {"qkv 1B", 3072, 2048, Form::bf16},
                         {"output 1B", 2048, 2048, Form::added_f32},
                         {"gate and up 1B", 8192, 2048, Form::silu},
                         {"down 1B", 2048, 8192, Form::added_f32},
                         {"head 135M", 49152, 576, Form::f32}}) {
    const bool gated = s.form == Form::silu;
    const int64_t weights = s.n * s.k * (gated ? 2 : 1), bytes = weights * 2;
    const int copies = int(std::clamp<int64_t>((300ll << 20) / bytes + 1, 2, 30));
    std::vector<uint8_t*> weight(static_cast<size_t>(copies));
    for (int i = 0; i < copies; ++i) {
      CUDA(cudaMalloc(&weight[size_t(i)], size_t(bytes)));
      fill<<<2048, 256, 0, stream>>>(reinterpret_cast<uint32_t*>(weight[size_t(i)]), bytes / 4, uint32_t(i));
    }
    uint8_t *in, *between, *out;
    CUDA(cudaMalloc(&in, size_t(kMostRows * s.k * 2)));
    CUDA(cudaMalloc(&between, size_t(kMostRows * s.n * 4)));
    CUDA(cudaMalloc(&out, size_t(kMostRows * s.n * 4)));
    fill<<<64, 256, 0, stream>>>(reinterpret_cast<uint32_t*>(in), kMostRows * s.k / 2, 99);
    CUDA(cudaMemsetAsync(out, 0, size_t(kMostRows * s.n * 4), stream));
    // E4M3 and packed weights are any bytes here: no time depends on them.
    uint8_t* bytes_in;
    float *in_scales, *weight_scales;
    CUDA(cudaMalloc(&bytes_in, size_t(kMostRows * s.k)));
    CUDA(cudaMalloc(&in_scales, size_t(kMostRows) * 4));
    CUDA(cudaMalloc(&weight_scales, size_t(weights / s.k) * 4));
    fill<<<64, 256, 0, stream>>>(reinterpret_cast<uint32_t*>(in_scales), kMostRows, 7);
    fill<<<64, 256, 0, stream>>>(reinterpret_cast<uint32_t*>(weight_scales), weights / s.k, 8);
    CUDA(cudaStreamSynchronize(stream));
    for (int64_t rows : {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048}) {
      if (short_list && rows != 1 && rows != 8 && rows != 16 && rows != 64) continue;
      auto by_library = [&](int i) {
        const uint8_t* w = weight[size_t(i % copies)];
        const Status st = (*library)->product(in, w, gated ? between : out, rows, s.n * (gated ? 2 : 1), s.k,
                                              gated ? Form::bf16 : s.form);
        KVASIR_CHECK(st.ok(), st.to_string());
        if (gated) launch_glu(false, between, true, out, rows, s.n, stream);
      };
      // With what makes the input E4M3: with scales, and these apart.
      auto of_bytes = [&](bool apart, int i) {
        launch_to_bytes(in, {bytes_in, in_scales}, rows, s.k, stream);
        const int64_t n = s.n * (gated ? 2 : 1);
        const Form form = gated ? Form::bf16 : s.form, raw = form == Form::bf16 ? form : Form::f32;
        uint8_t *to = gated ? between : out, *sums = apart && form == Form::added_f32 ? between : to;
        const Status st =
            (*library)->product(bytes_in, weight[size_t(i % copies)], sums, rows, n, s.k, apart ? raw : form,
                                apart ? Elements::fp8 : Elements::fp8_scaled, {in_scales, weight_scales});
        KVASIR_CHECK(st.ok(), st.to_string());
        if (apart && form == Form::bf16) launch_scale_half(to, {in_scales, weight_scales}, rows, n, stream);
        if (apart && form != Form::bf16)
          launch_scale(reinterpret_cast<float*>(sums), {in_scales, weight_scales}, form == Form::added_f32,
                       reinterpret_cast<float*>(to), rows, n, stream);
        if (gated) launch_glu(false, between, true, out, rows, s.n, stream);
      };
      by_library(0);  // chooses
      const double theirs = time_of(stream, by_library);
      double theirs8[2];
      for (bool apart : {false, true}) {
        of_bytes(apart, 0);
        theirs8[apart] = time_of(stream, [&](int i) { of_bytes(apart, i); });
      }
      const auto time_if = [&](bool fits, auto launch) {  // 0: does not fit
        return !fits ? 0.0 : time_of(stream, [&](int i) { launch(weight[size_t(i % copies)]); });
      };
      const double few = time_if(rows <= 32 && s.n % 16 == 0 && s.k % 32 == 0 && !short_list,
                                 [&](void* w) { launch_few_rows(in, w, out, rows, s.n, s.k, s.form, stream); });
      const double streamed = time_if(rows <= 32 && s.n % 16 == 0 && s.k % 64 == 0 && s.k >= 512,
                                      [&](void* w) { launch_streamed(in, w, out, rows, s.n, s.k, s.form, stream); });
      const double bytes_streamed = time_if(streamed_bytes_takes(rows, s.n, s.k, s.form), [&](void* w) {
        launch_streamed_bytes(in, w, weight_scales, out, rows, s.n, s.k, s.form, stream);
      });
      printf(
          "{\"product\": \"%s\", \"rows\": %ld, \"library_us\": %.2f, \"few_rows_us\": %.2f, \"streamed_us\": %.2f, "
          "\"bf16_floor_us\": %.2f, \"fp8_library_us\": %.2f, \"fp8_scaled_apart_us\": %.2f, \"fp8_streamed_us\": "
          "%.2f, \"fp8_floor_us\": %.2f",
          s.name, rows, theirs, few, streamed, double(bytes) / 4.16e6, theirs8[0], theirs8[1], bytes_streamed,
          double(weights) / 4.16e6);
      for (auto [packing, name] :
           {std::pair(Packing::q4, "q4"), std::pair(Packing::q4_128, "q4_128"), std::pair(Packing::q6, "q6"),
            std::pair(Packing::q8, "q8"), std::pair(Packing::e4m3, "e4m3")}) {
        const double of = double(weights / s.k / kBlockRows * block_count(s.k) * block_bytes(packing));
        const double us = time_if(rows <= 64 && packs(), [&, packing = packing](void* w) {
          launch_packed(packing, in, w, 1, out, rows, s.n, s.k, s.form, stream);
        });
        const double many = time_if(rows <= 512 && packs(), [&, packing = packing](void* w) {
          launch_packed_many(packing, in, w, 1, out, rows, s.n, s.k, s.form, stream);
        });
        printf(", \"%s_us\": %.2f, \"%s_many_us\": %.2f, \"%s_floor_us\": %.2f", name, us, name, many, name,
               of / 4.16e6);
      }
      printf("}\n");
      fflush(stdout);
    }
    cudaFree(bytes_in), cudaFree(in_scales), cudaFree(weight_scales);
    for (uint8_t* p : weight) cudaFree(p);
    cudaFree(in), cudaFree(between), cudaFree(out);
  }
  return 0;
}
