// What crosses GPUs: the link itself, and sums of partial results by size, as a step's graph has them, beside the time
// in which the bytes cross; with a library named, NCCL's all-reduce of the same. One JSON object a line:
//   gpu_ranks_bench [GPUS [libnccl.so.2]]
#include <dlfcn.h>

#include <cstdio>
#include <thread>

#include "bench/gpu/graph_time.h"
#include "model/cuda/kernels.h"
#include "model/cuda/link.h"

namespace kvasir::bench {
namespace {

using attention::cuda::DeviceMemory;
using model::cuda::Link;

constexpr int64_t kMost = int64_t(64) << 20;  // bytes of the largest sum

// GB/s of one GPU that reads another's memory by the copy engine.
double link_rate(int from, int to) {
  constexpr size_t kBytes = size_t(256) << 20;
  DeviceMemory a, b;
  CUDA(cudaSetDevice(from));
  KVASIR_CHECK(a.allocate(kBytes).ok(), "memory");
  CUDA(cudaSetDevice(to));
  KVASIR_CHECK(b.allocate(kBytes).ok(), "memory");
  cudaStream_t stream;
  CUDA(cudaStreamCreate(&stream));
  cudaEvent_t began, ended;
  CUDA(cudaEventCreate(&began));
  CUDA(cudaEventCreate(&ended));
  float best = 1e9f;
  for (int i = 0; i < 6; ++i) {
    float ms;
    CUDA(cudaEventRecord(began, stream));
    CUDA(cudaMemcpyPeerAsync(b.get(), to, a.get(), from, kBytes, stream));
    CUDA(cudaEventRecord(ended, stream));
    CUDA(cudaEventSynchronize(ended));
    CUDA(cudaEventElapsedTime(&ms, began, ended));
    best = std::min(best, ms);
  }
  CUDA(cudaStreamDestroy(stream));
  return kBytes / best / 1e6;
}

// Of the slowest of all GPUs, each with a thread that makes graphs of `count` launches.
double slowest(int gpus, int count, const std::function<void(int rank, int i, cudaStream_t)>& launch) {
  std::vector<double> us(static_cast<size_t>(gpus));
  std::vector<std::thread> threads;
  for (int r = 0; r < gpus; ++r)
    threads.emplace_back([&, r] {
      CUDA(cudaSetDevice(r));
      cudaStream_t stream;
      CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      launch(r, 0, stream);  // what is made when it is first used is not captured
      CUDA(cudaStreamSynchronize(stream));
      us[size_t(r)] = graph_time(stream, count, [&](int i) { launch(r, i, stream); });
      CUDA(cudaStreamDestroy(stream));
    });
  for (std::thread& t : threads) t.join();
  return *std::max_element(us.begin(), us.end());
}

// The few functions of NCCL that are needed, under the names its header gives them.
struct Nccl {
  explicit Nccl(const char* path) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    KVASIR_CHECK(library, dlerror());
    init = reinterpret_cast<decltype(init)>(dlsym(library, "ncclCommInitAll"));
    all_reduce = reinterpret_cast<decltype(all_reduce)>(dlsym(library, "ncclAllReduce"));
    KVASIR_CHECK(init && all_reduce, path, " lacks functions");
  }
  int (*init)(void** comms, int count, const int* devices) = nullptr;
  int (*all_reduce)(const void* in, void* out, size_t count, int type, int op, void* comm, cudaStream_t) = nullptr;
  static constexpr int kBf16 = 9, kSum = 0;
};

// What ends a sublayer and begins the next, of rows of 4,096: in one kernel, and as a sum and a norm.
void sums_and_norms(int gpus, const Link& link, const std::vector<DeviceMemory>& out) {
  constexpr int64_t kCols = 4096;
  std::vector<DeviceMemory> weights(static_cast<size_t>(gpus)), normed(weights.size());
  for (int r = 0; r < gpus; ++r) {
    CUDA(cudaSetDevice(r));
    KVASIR_CHECK(weights[size_t(r)].allocate(kCols * 4).ok() && normed[size_t(r)].allocate(size_t(kMost)).ok(),
                 "memory");
  }
  for (int64_t rows : {1, 16, 64, 128, 256, 512, 2048, 8192}) {
    auto time = [&](bool together) {
      return slowest(gpus, rows > 512 ? 20 : 200, [&](int r, int i, cudaStream_t stream) {
        auto* to = out[size_t(r)].as<float>();
        const auto* weight = weights[size_t(r)].as<float>();
        if (together)
          return model::cuda::launch_sum_norm(link.view(r), i % 2, to, weight, 1e-5f, normed[size_t(r)].get(), rows,
                                              kCols, stream);
        model::cuda::launch_sum(link.view(r), i % 2, true, to, rows * kCols, stream);
        model::cuda::launch_norm(to, weight, 1e-5f, normed[size_t(r)].get(), rows, kCols, stream);
      });
    };
    printf("{\"name\": \"sum and norm\", \"gpus\": %d, \"rows\": %ld, \"us\": %.3f, \"apart_us\": %.3f}\n", gpus,
           long(rows), time(true), time(false));
    fflush(stdout);
  }
}

int run(int gpus, const char* nccl_path) {
  int there = 0;
  if (cudaGetDeviceCount(&there) != cudaSuccess || there < gpus) {
    fprintf(stderr, "skipped: %d GPUs are wanted, %d are here\n", gpus, there);
    return 0;
  }
  std::vector<int> devices;
  for (int i = 0; i < gpus; ++i) devices.push_back(i);
  auto opened = Link::open(devices);
  KVASIR_CHECK(opened.ok(), opened.status().to_string());
  Link& link = **opened;
  const double rate = link_rate(0, 1);
  cudaDeviceProp p{};
  CUDA(cudaGetDeviceProperties(&p, 0));
  printf("{\"name\": \"link\", \"device\": \"%s\", \"gpus\": %d, \"gb_s\": %.1f}\n", p.name, gpus, rate);

  std::vector<DeviceMemory> partials(size_t(2 * gpus)), out(static_cast<size_t>(gpus));
  for (int r = 0; r < gpus; ++r) {
    CUDA(cudaSetDevice(r));
    for (int turn = 0; turn < 2; ++turn) {
      DeviceMemory& m = partials[size_t(2 * r + turn)];
      KVASIR_CHECK(m.allocate(size_t(kMost)).ok(), "memory");
      CUDA(cudaMemset(m.get(), 0, size_t(kMost)));
    }
    KVASIR_CHECK(out[size_t(r)].allocate(size_t(2 * kMost)).ok(), "memory");
    link.publish_partials(r, partials[size_t(2 * r)].get(), partials[size_t(2 * r + 1)].get());
  }
  KVASIR_CHECK(link.join().ok(), "join");
  for (int64_t bytes = 2 << 10; bytes <= kMost; bytes *= 2) {
    const int count = bytes > (1 << 20) ? 20 : 200;
    const double floor = double(bytes) * (gpus - 1) / rate / 1e3;
    auto sums = [&](int blocks) {
      return slowest(gpus, count, [&](int r, int i, cudaStream_t stream) {
        model::cuda::launch_sum(link.view(r), i % 2, true, out[size_t(r)].as<float>(), bytes / 2, stream, blocks);
      });
    };
    printf("{\"name\": \"sum\", \"gpus\": %d, \"bytes\": %ld, \"us\": %.3f, \"link_us\": %.3f", gpus, long(bytes),
           sums(0), floor);
    for (int blocks : {4, 8, 16, 32, 64, 128, 208}) printf(", \"us_%d\": %.3f", blocks, sums(blocks));
    printf("}\n");
    fflush(stdout);
  }
  sums_and_norms(gpus, link, out);
  if (!nccl_path) return 0;
  const Nccl nccl(nccl_path);
  std::vector<void*> comms(static_cast<size_t>(gpus));
  KVASIR_CHECK(nccl.init(comms.data(), gpus, devices.data()) == 0, "ncclCommInitAll");
  for (int64_t bytes = 2 << 10; bytes <= kMost; bytes *= 2) {
    const double us = slowest(gpus, bytes > (1 << 20) ? 20 : 200, [&](int r, int, cudaStream_t stream) {
      KVASIR_CHECK(nccl.all_reduce(partials[size_t(2 * r)].get(), out[size_t(r)].get(), size_t(bytes / 2), Nccl::kBf16,
                                   Nccl::kSum, comms[size_t(r)], stream) == 0,
                   "ncclAllReduce");
    });
    printf("{\"name\": \"nccl\", \"gpus\": %d, \"bytes\": %ld, \"us\": %.3f}\n", gpus, long(bytes), us);
    fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace kvasir::bench

int main(int argc, char** argv) {
  return kvasir::bench::run(argc > 1 ? atoi(argv[1]) : 2, argc > 2 ? argv[2] : nullptr);
}
