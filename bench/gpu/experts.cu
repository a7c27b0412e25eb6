// A layer's mixture of experts, stage by stage: microseconds each, in graphs, weights cold in L2, beside the floor: the
// time in which the chosen experts' weights are read at 4.16 TB/s, or the sums are done at 686 TFLOP/s.
//   gpu_experts_bench [rows ...]      one JSON object a line, for each way of cutting the rows into items
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <set>
#include <vector>

#include "attention/cuda/memory.h"
#include "bench/gpu/graph_time.h"
#include "core/check.h"
#include "model/cuda/expert_tiles.h"

using namespace kvasir;
using namespace kvasir::model::cuda;

namespace {

constexpr int kLayers = 3, kCount = 24;
constexpr double kRead = 4.16e12, kSums = 686e12;

__global__ void fill(uint32_t* p, int64_t n, uint32_t seed,
                     bool half) {  // bfloat16 in +-[0.5, 1), or float32 in [0, 1)
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
    uint32_t x = uint32_t(i) * 2654435761u + seed;
    x ^= x >> 15, x *= 2246822519u, x ^= x >> 13, x *= 3266489917u, x ^= x >> 16;
    if (half)
      p[i] = (x & 0x807f807fu) | 0x3f003f00u;
    else
      reinterpret_cast<float*>(p)[i] = float(x >> 8) * 0x1p-24f;
  }
}

double time_of(cudaStream_t stream, const std::function<void(int)>& launch) {
  launch(0);  // what is set on first use
  return bench::graph_time(
      stream, kCount, [&](int i) { launch(i % kLayers); }, 5);
}

struct Shape {
  const char* name;
  int32_t experts, used;
  int64_t hidden, ffn;
  bool mxfp4 = false;
};

using attention::cuda::DeviceMemory;
void* room(DeviceMemory& m, int64_t bytes, bool half = true) {
  KVASIR_CHECK(m.allocate(size_t(bytes)).ok(), "out of memory");
  fill<<<1024, 256>>>(m.as<uint32_t>(), bytes / 4, 7, half);
  return m.get();
}

void measure(const Shape& s, const std::vector<int64_t>& row_counts, cudaStream_t stream) {
  const int64_t most = *std::max_element(row_counts.begin(), row_counts.end()), slots = slots_of(most, s.used);
  DeviceMemory weights[2 * kLayers], in, logits, gated, sums, out, ints[4], by_expert, items;
  ExpertMatrix up[kLayers], down[kLayers];
  for (int l = 0; l < kLayers; ++l) {
    up[l] = {.rows = 2 * s.ffn, .cols = s.hidden, .gated = true, .mxfp4 = s.mxfp4, .gate = {}};
    down[l] = {.rows = s.hidden, .cols = s.ffn, .mxfp4 = s.mxfp4, .gate = {}};
    up[l].tiles = room(weights[2 * l], up[l].bytes() * s.experts);
    down[l].tiles = room(weights[2 * l + 1], down[l].bytes() * s.experts);
  }
  room(in, most * s.hidden * 2), room(logits, most * s.experts * 4, false);
  room(gated, slots * s.ffn * 2), room(sums, slots * s.hidden * 4), room(out, most * s.hidden * 4);
  for (DeviceMemory& m : ints) room(m, slots * 4);
  room(by_expert, (4 * s.experts + 1) * 4);
  CUDA(cudaMemset(by_expert.get(), 0, size_t(s.experts) * 4));
  room(items, (s.experts + slots) * int64_t(sizeof(ExpertItem)));
  auto* e = by_expert.as<int32_t>();
  const Routed routed{.chosen = ints[0].as<int32_t>(),
                      .weights = ints[1].as<float>(),
                      .slot_of = ints[2].as<int32_t>(),
                      .slot_rows = ints[3].as<int32_t>(),
                      .items = items.as<ExpertItem>(),
                      .count = e + 4 * s.experts,
                      .own = int32_t(s.experts),
                      .counts = e,
                      .next = e + s.experts,
                      .first_slots = e + 2 * s.experts,
                      .first_items = e + 3 * s.experts};
  const model::Routing routing{.experts = s.experts, .used = s.used, .normalized = true};
  for (int64_t rows : row_counts) {
    std::vector<int32_t> chosen(static_cast<size_t>(rows * s.used));
    for (int each : {8, 64, 128}) {
      if (each == 8 ? rows > 64 : each > 64 && rows < 256) continue;
      const int64_t items_at_most = std::min(rows * s.used, s.experts + rows * s.used / each);
      auto route = [&](int) { launch_route(routing, logits.as<float>(), nullptr, routed, rows, each, stream); };
      auto product = [&](const ExpertMatrix& m, const void* from, bool by_slot, void* to) {
        CUDA(each == 8 ? launch_experts_few(m, routed, from, by_slot, to, items_at_most, stream)
                       : launch_experts_many(m, routed, from, by_slot, to, items_at_most, each, stream));
      };
      auto ups = [&](int l) { product(up[l], in.get(), false, gated.get()); };
      auto downs = [&](int l) { product(down[l], gated.get(), true, sums.get()); };
      auto add = [&](int) {
        launch_combine(sums.as<float>(), routed, s.used, false, out.get(), rows, s.hidden, stream);
      };
      const double t_route = time_of(stream, route), t_up = time_of(stream, ups), t_down = time_of(stream, downs),
                   t_add = time_of(stream, add),
                   all = time_of(stream, [&](int l) { route(l), ups(l), downs(l), add(l); });
      CUDA(cudaMemcpy(chosen.data(), routed.chosen, chosen.size() * 4, cudaMemcpyDefault));
      const double read = double(std::set<int32_t>(chosen.begin(), chosen.end()).size()) *
                          double(3 * s.hidden * s.ffn) * (s.mxfp4 ? 17.0 / 32 : 2) / kRead,
                   done = double(rows * s.used) * 6 * double(s.hidden * s.ffn) / kSums;
      printf(
          "{\"shape\": \"%s\", \"rows\": %lld, \"item_rows\": %d, \"route_us\": %.1f, \"up_us\": %.1f, \"down_us\": "
          "%.1f, \"combine_us\": %.1f, \"all_us\": %.1f, \"floor_us\": %.1f}\n",
          s.name, static_cast<long long>(rows), each, t_route, t_up, t_down, t_add, all, 1e6 * std::max(read, done));
      fflush(stdout);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<int64_t> rows = {1, 2, 4, 8, 16, 64, 256, 1024, 4096};
  if (argc > 1) rows.clear();
  for (int i = 1; i < argc; ++i) rows.push_back(std::max(1, std::atoi(argv[i])));
  cudaStream_t stream;
  CUDA(cudaStreamCreate(&stream));
  measure({"qwen3-30b-a3b", 128, 8, 2048, 768}, rows, stream);
  measure({"gpt-oss-20b", 32, 4, 2880, 2880}, rows, stream);
  measure({"gpt-oss-20b mxfp4", 32, 4, 2880, 2880, true}, rows, stream);
  measure({"mixtral-8x7b", 8, 2, 4096, 14336}, rows, stream);
}
