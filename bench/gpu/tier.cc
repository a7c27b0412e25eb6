// What moves between a GPU's cache and its second tier cost the steps around them: steps of a stated length alone, the
// moves alone, and both, pages of Llama-3.1-8B's shape in bfloat16 (2 MiB).
//   gpu_tier_bench [pages each way a step]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "bench/gpu/graph_time.h"
#include "model/cuda/cache.h"

namespace kvasir::model::cuda {
namespace {

constexpr int kSteps = 40, kPages = 2048, kCopies = 5;
constexpr int64_t kWork = 4LL << 30;  // bytes that a step's kernels copy on the device

double ms_a_step(int steps, const std::function<void(int)>& step, cudaStream_t stream) {
  CUDA(cudaDeviceSynchronize());
  const auto began = std::chrono::steady_clock::now();
  for (int i = 0; i < steps; ++i) step(i);
  CUDA(cudaStreamSynchronize(stream));
  return 1e3 * std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count() / steps;
}

int run(int argc, char** argv) {
  const int each_way = argc > 1 ? std::atoi(argv[1]) : 64;
  cudaStream_t stream;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CacheShape shape{.form = {.dtype = DType::bf16}, .layers = 32, .kv_heads = 8, .head_dim = 128, .page_size = 16};
  auto cache = Cache::make(shape, kPages, kPages);
  if (!cache.ok()) return std::fprintf(stderr, "%s\n", cache.status().to_string().c_str()), 1;
  void *a = nullptr, *b = nullptr;
  CUDA(cudaMalloc(&a, kWork));
  CUDA(cudaMalloc(&b, kWork));
  auto work = [&](int) {
    for (int i = 0; i < kCopies; ++i) CUDA(cudaMemcpyAsync(a, b, kWork, cudaMemcpyDeviceToDevice, stream));
  };
  auto moves = [&](int step, bool out, bool in) {
    std::vector<kvcache::PageMove> list;
    for (int p = 0; p < each_way; ++p) {
      const int32_t page = (step * 2 * each_way + p) % (kPages - 2 * each_way);
      if (out) list.push_back({page, page, true});
      if (in) list.push_back({page + each_way, page + each_way, false});
    }
    const Status s = (*cache)->move(list, stream);
    KVASIR_CHECK(s.ok(), s.to_string());
  };
  auto both = [&](bool out, bool in) {
    return ms_a_step(
        kSteps, [&](int i) { moves(i, out, in), work(i); }, stream);
  };
  both(true, true);  // touches all of it
  const double alone = ms_a_step(kSteps, work, stream), mib = 2.0 * each_way;
  std::printf("a step alone %.2f ms; %d pages of 2 MiB a step\n", alone, each_way);
  for (auto [name, out, in] :
       {std::tuple("to the host", true, false), {"back", false, true}, {"both ways", true, true}}) {
    const double link = ms_a_step(
        kSteps, [&](int i) { moves(i, out, in); }, stream);
    CUDA(cudaDeviceSynchronize());
    const double together = both(out, in);
    std::printf("%-12s moves alone %6.2f ms (%.1f GB/s), step with them %6.2f ms: %+.2f\n", name, link,
                (out + in) * mib * 1.048576 / link, together, together - alone);
  }
  return 0;
}

}  // namespace
}  // namespace kvasir::model::cuda

int main(int argc, char** argv) { return kvasir::model::cuda::run(argc, argv); }
