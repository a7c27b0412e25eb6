// A layer of linear attention of Qwen3-Next-80B-A3B's shape by its three kernels: microseconds each, in graphs, states
// cold in L2. Of decodes, beside what of the states is read and written: how fast that is; of prompts, tokens a second.
//   gpu_linear_attention_bench        one JSON object a line
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "attention/cuda/memory.h"
#include "bench/gpu/graph_time.h"
#include "core/check.h"
#include "model/cuda/linear_layers.h"

using namespace kvasir;
using namespace kvasir::model;
using attention::cuda::DeviceMemory;

namespace {

constexpr LinearConfig kShape{.taps = 4, .key_heads = 16, .value_heads = 32, .key_dim = 128, .value_dim = 128};
constexpr int64_t kCold = int64_t(192) << 20;  // bytes between two visits to a state
constexpr int kMostLayers = 96;

// Random numbers in [-1, 1).
const float* numbers(DeviceMemory& m, int64_t count) {
  std::vector<float> v(static_cast<size_t>(count));
  uint32_t x = 1;
  for (float& f : v) x = x * 1664525u + 1013904223u, f = float(int32_t(x)) * 0x1p-31f;
  KVASIR_CHECK(m.upload(v.data(), v.size() * sizeof(float)).ok(), "out of memory");
  return m.as<float>();
}

void measure(const std::vector<int64_t>& lengths, cudaStream_t stream) {
  const auto sequences = std::ssize(lengths);
  Batch b;
  b.seqstarts = {0};
  for (int64_t n : lengths) {
    b.states.push_back(int32_t(b.states.size()));
    b.seqstarts.push_back(b.seqstarts.back() + n);
  }
  const int64_t rows = b.seqstarts.back(), state = kShape.state_floats() * int64_t(sizeof(float)) * sequences;
  const int layers = int(std::clamp<int64_t>(kCold / state + 1, 2, kMostLayers));
  DeviceMemory memory[7];
  const float *conv = numbers(memory[0], kShape.taps * kShape.channels()),
              *decay = numbers(memory[1], kShape.value_heads), *bias = numbers(memory[2], kShape.value_heads),
              *norm = numbers(memory[3], kShape.value_dim);
  const float *in = numbers(memory[4], rows * (kShape.channels() + kShape.values())),
              *betas = numbers(memory[5], rows * 2 * kShape.value_heads);
  KVASIR_CHECK(memory[6].allocate(size_t(rows * kShape.values()) * 2).ok(), "out of memory");
  cuda::LinearLayers all(rows, stream);
  for (int i = 0; i < layers; ++i) {
    DeltaRule rule;
    rule.config = kShape, rule.log_decay = true, rule.eps = 1e-6f;
    KVASIR_CHECK(all.add(rule, conv, decay, bias, norm).ok(), "out of memory");
  }
  KVASIR_CHECK(all.set_slots(sequences).ok(), "out of memory");
  b.start_pos.assign(lengths.size(), 0);  // states of zeros
  KVASIR_CHECK(all.begin(b, rows, 0).ok(), "begin");
  for (int i = 0; i < layers; ++i) KVASIR_CHECK(all.run(i, in, betas, memory[6].get()).ok(), "run");
  CUDA(cudaStreamSynchronize(stream));
  b.start_pos.assign(lengths.size(), 1);
  KVASIR_CHECK(all.begin(b, rows, 0).ok(), "begin");
  CUDA(cudaStreamSynchronize(stream));
  auto time = [&](auto launch) {
    return bench::graph_time(
        stream, 2 * layers, [&](int i) { launch(all.step(i % layers, in, betas, memory[6].get())); }, 5);
  };
  const double convolution = time([&](const cuda::DeltaStep& s) { cuda::launch_convolution(s, stream); });
  const double rule = time([&](const cuda::DeltaStep& s) { cuda::launch_delta_rule(s, stream); });
  const double gated = time([&](const cuda::DeltaStep& s) { cuda::launch_gated_norm(s, stream); });
  const double whole = time([&](const cuda::DeltaStep& s) {
    cuda::launch_convolution(s, stream), cuda::launch_delta_rule(s, stream), cuda::launch_gated_norm(s, stream);
  });
  printf(
      "{\"sequences\": %td, \"rows\": %lld, \"us\": {\"convolution\": %.2f, \"rule\": %.2f, \"norm\": %.2f, "
      "\"all\": %.2f}, \"state_bytes\": %lld, \"rule_terabytes_a_second\": %.3f, \"tokens_a_second\": %.0f}\n",
      sequences, static_cast<long long>(rows), convolution, rule, gated, whole, static_cast<long long>(2 * state),
      double(2 * state) / rule * 1e-6, double(rows) / whole * 1e6);
  fflush(stdout);
}

}  // namespace

int main() {
  cudaStream_t stream;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (size_t batch : {1, 2, 4, 8, 16, 32, 64, 128, 256}) measure(std::vector<int64_t>(batch, 1), stream);
  for (int64_t rows : {64, 512, 2048, 8192}) measure({rows}, stream);
  measure(std::vector<int64_t>(16, 512), stream);
  measure(std::vector<int64_t>(64, 128), stream);
}
