// What comes after a step's logits: microseconds until the host knows all rows' tokens, drawn on the device, and on the
// host from logits that are copied to it. Medians, each from the first launch to what is waited for last.
//   gpu_draws_bench [rows ...]      one JSON object a line; vocabulary of Llama-3
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "attention/cuda/memory.h"
#include "bench/gpu/graph_time.h"
#include "core/check.h"
#include "core/host.h"
#include "core/thread_pool.h"
#include "model/cuda/change.h"
#include "model/cuda/draw.h"
#include "model/cuda/kernels.h"
#include "model/cuda/redraw.h"
#include "model/draws.h"

using namespace kvasir;
using namespace kvasir::model;
using attention::cuda::DeviceMemory;
using attention::cuda::PinnedMemory;

namespace {

constexpr int32_t kVocab = 128256, kWords = (kVocab + 31) / 32;
constexpr int kTimes = 15;

#define OK(x) KVASIR_CHECK((x).ok(), "a launch failed")

double median_us(const std::function<void()>& f) {
  std::vector<double> took;
  for (int i = 0; i < kTimes + 2; ++i) {
    const auto began = std::chrono::steady_clock::now();
    f();
    took.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - began).count());
  }
  std::sort(took.begin() + 2, took.end());  // two to warm up
  return took[2 + kTimes / 2];
}

class NoToken final : public Constraint {  // but what its mask says
 public:
  explicit NoToken(const uint32_t* mask) : mask_(mask) {}
  bool take(int32_t, bool masked) override { return masked; }
  const uint32_t* mask() override { return mask_; }

 private:
  const uint32_t* mask_;
};

struct Case {
  std::string name;
  SamplingParams params;
  bool masked = false, constrained = false, scored = false;
};

std::vector<Case> cases() {
  std::vector<Case> out(9);
  for (Case& c : out) c.params.temperature = 0.8f;
  out[0].name = "greedy", out[0].params.temperature = 0;
  out[1].name = "temperature";
  out[2].name = "top_k 40, top_p .9", out[2].params.top_k = 40, out[2].params.top_p = 0.9f;
  out[3].name = "top_p .9", out[3].params.top_p = 0.9f;
  out[4].name = "typical_p .9", out[4].params.typical_p = 0.9f;
  out[5].name = "top_n_sigma 1", out[5].params.top_n_sigma = 1;
  out[6].name = "a mask each", out[6].masked = true;
  out[7].name = "drawn again under a mask each", out[7].constrained = true;
  out[8].name = "a prompt's, 5 likeliest", out[8].scored = true, out[8].params.logprobs = 5;
  return out;
}

void measure(const Case& c, int64_t count, ThreadPool& pool, cudaStream_t stream) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 2);
  std::vector<float> values(size_t(count * kVocab));
  for (float& x : values) x = normal(random);
  std::vector<std::vector<uint32_t>> masks(size_t(count), std::vector<uint32_t>(kWords, 0));
  for (auto& mask : masks)
    for (uint32_t& word : mask) word = uint32_t(random());
  std::vector<NoToken> constraints;
  constraints.reserve(masks.size());
  for (const auto& mask : masks) constraints.emplace_back(mask.data());
  std::vector<SampleRow> rows(static_cast<size_t>(count));
  std::vector<MaskedRow> refused;
  cuda::Changes changes;
  std::vector<cuda::Wish> wishes;
  for (int64_t i = 0; i < count; ++i) {
    SampleRow& row = rows[size_t(i)];
    row.params = &c.params, row.position = i;
    if (c.masked) row.mask = masks[size_t(i)].data();
    if (c.constrained) row.constraint = &constraints[size_t(i)];
    row.score_only = c.scored, row.target = int32_t(i);
    changes.add(i, count, row, kVocab);
    wishes.push_back(cuda::wish_of(row, kVocab));
    if (c.constrained) refused.push_back({i, &row, masks[size_t(i)].data()});
  }
  DeviceMemory logits, wished, tokens;
  PinnedMemory drawn, top, copied;
  OK(logits.upload(values.data(), values.size() * 4));
  OK(wished.upload(wishes.data(), wishes.size() * sizeof(cuda::Wish)));
  OK(tokens.allocate(size_t(count) * 4));
  OK(drawn.allocate(size_t(count) * sizeof(DeviceDraw)));
  OK(top.allocate(size_t(count) * kMostDeviceTop * sizeof(TokenLogprob)));
  OK(copied.allocate(values.size() * 4));
  cuda::DeviceChanges there;
  cuda::DeviceRedraw redraw;
  OK(there.make_room(changes, count, kVocab, stream));
  auto* from = logits.as<float>();
  auto* out = drawn.as<DeviceDraw>();
  auto* ids = tokens.as<int32_t>();
  std::vector<DeviceDraw> again(refused.size());
  const double device = median_us([&] {
    const bool changed = !changes.rows.empty();
    if (changed) OK(there.upload(changes, stream));
    cuda::launch_greatest(from, out, ids, count, kVocab, stream);
    if (changed) OK(there.before_draw(changes, from, out, nullptr, top.as<TokenLogprob>(), 0, count, kVocab, stream));
    if (changes.any_less()) cuda::launch_greatest(from, out, ids, count, kVocab, stream);
    if (c.params.temperature > 0 && !c.scored)
      cuda::launch_draw(from, wished.as<cuda::Wish>(), out, ids, count, kVocab, stream);
    if (changed) OK(there.after_draw(changes, from, nullptr, out, ids, 0, count, kVocab, stream));
    CUDA(cudaStreamSynchronize(stream));
    if (!refused.empty()) OK(redraw.run({from, 0, count, kVocab, nullptr}, there, refused, again, stream));
  });
  Batch batch;
  batch.tokens = {0};
  batch.logit_rows.assign(size_t(count), 0);
  Draws draws(kVocab, pool.threads());
  OK(logits.upload(values.data(), values.size() * 4));  // into other memory
  from = logits.as<float>();
  const double host = median_us([&] {
    CUDA(cudaMemcpyAsync(copied.get(), from, values.size() * 4, cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamSynchronize(stream));
    OK(draws.begin(batch, rows));
    OK(draws.draw(pool, copied.as<float>(), kVocab, count));
    draws.end();
    (void)draws.take();
  });
  std::printf("{\"rows\": %lld, \"what\": \"%s\", \"device_us\": %.0f, \"host_us\": %.0f}\n",
              static_cast<long long>(count), c.name.c_str(), device, host);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<int64_t> rows = {1, 64, 256};
  if (argc > 1) rows.clear();
  for (int i = 1; i < argc; ++i) rows.push_back(std::max(1, std::atoi(argv[i])));
  cudaStream_t stream = nullptr;
  CUDA(cudaStreamCreate(&stream));
  ThreadPool pool(std::min(8, host_limits().cpus));
  for (const int64_t count : rows)
    for (const Case& c : cases()) measure(c, count, pool, stream);
  CUDA(cudaStreamDestroy(stream));
}
