// What the tests of the cuda back end share: a fixture that skips without a device, and a case carried there and back.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>

#include "attention/cases/compare.h"
#include "attention/cases/random_case.h"
#include "attention/cuda/cuda.h"
#include "attention/cuda/memory.h"

namespace kvasir::attention::testing {

inline int64_t setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoll(text) : otherwise;
}

// What the back end takes of the random cases.
inline CaseOptions on_device() {
  CaseOptions o;
  o.any_pages = o.small_groups = o.int8_out = false;
  return o;
}

class Cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    Status s = cuda_backend().available();
    if (!s.ok()) GTEST_SKIP() << "skipped: no device (" << s.message() << ")";
  }
};

// Device copies of what host pointers name, given back at the end; `fetch` brings changed ones home.
class Moved {
 public:
  template <class P>
  void move(P*& pointer, const void* home, size_t bytes) {
    if (!pointer) return;
    copies_.push_back({std::make_unique<cuda::DeviceMemory>(), const_cast<void*>(home), bytes});
    Status s = copies_.back().memory->upload(home, bytes);
    if (status.ok()) status = s;
    pointer = static_cast<P*>(copies_.back().memory->get());
  }
  void fetch(void* home) {
    for (Copy& c : copies_)
      if (c.home == home) status = cuda::check(cudaMemcpy(home, c.memory->get(), c.bytes, cudaMemcpyDefault), "fetch");
  }
  Status status;

 private:
  struct Copy {
    std::unique_ptr<cuda::DeviceMemory> memory;
    void* home;
    size_t bytes;
  };
  std::vector<Copy> copies_;
};

using Create = Result<std::unique_ptr<Attention>> (*)(const Attributes&, const Limits&, const DeviceContext&);
inline Result<std::unique_ptr<Attention>> create_on_device(const Attributes& a, const Limits& l,
                                                           const DeviceContext& c) {
  return cuda_backend().create(a, l, c);
}

// `launches`: how many kernels a step's run() is, where somebody asks. `again`: a step that runs after the case's own,
// since what sequences share is told from the second on.
inline Status run_on_device(Case& c, CaseOutput* out, Create create = create_on_device, size_t* launches = nullptr,
                            const Step* again = nullptr) {
  cudaStream_t stream = nullptr;
  if (launches) KVASIR_TRY(cuda::check(cudaStreamCreate(&stream), "stream"));
  KVASIR_ASSIGN(auto attention, create(c.attributes, c.limits(), {.stream = stream}));
  KVASIR_TRY(attention->plan(c.step()));
  Moved moved;
  auto move = [&](auto& pointer, const Bytes& b) { moved.move(pointer, b.data(), b.size()); };
  auto cache = [&](kvcache::CacheView& v) {
    move(v.data, c.cache);
    if (!c.scale.empty()) move(v.scale, c.scale);
  };
  if (c.op == Op::key_value_cache) {
    KvcTensors t = case_kvc_tensors(c, out);
    if (!c.key.empty()) move(t.key, c.key), move(t.value, c.value);
    move(t.key_out, out->key), move(t.value_out, out->value);
    cache(t.cache);
    KVASIR_TRY(moved.status);
    KVASIR_TRY(attention->store_and_gather(t));
  } else {
    Tensors t = case_tensors(c, out);
    if (!c.query.empty()) move(t.query, c.query);
    if (!c.key.empty()) move(t.key, c.key), move(t.value, c.value);
    if (!c.qkv_bias.empty()) move(t.qkv_bias, c.qkv_bias);
    if (!c.attn_mask.empty()) move(t.attn_mask, c.attn_mask);
    moved.move(t.sink_logits, c.sink_logits.data(), c.sink_logits.size() * 4);
    move(t.output, out->output);
    moved.move(t.lse, out->lse.data(), out->lse.size() * 4);
    cache(t.cache);
    KVASIR_TRY(moved.status);
    KVASIR_TRY(attention->run(t));
    if (again) {
      KVASIR_TRY(attention->plan(*again));
      KVASIR_TRY(attention->run(t));
    }
    if (launches) {
      cudaGraph_t graph;
      KVASIR_TRY(cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture"));
      KVASIR_TRY(attention->run(t));
      KVASIR_TRY(cuda::check(cudaStreamEndCapture(stream, &graph), "capture"));
      KVASIR_TRY(cuda::check(cudaGraphGetNodes(graph, nullptr, launches), "graph"));
      cudaGraphDestroy(graph);
    }
  }
  KVASIR_TRY(cuda::check(cudaDeviceSynchronize(), "synchronize"));
  for (Bytes* b : {&c.cache, &c.scale, &out->output, &out->key, &out->value}) moved.fetch(b->data());
  moved.fetch(out->lse.data());
  attention.reset();
  if (stream) cudaStreamDestroy(stream);
  return moved.status;
}

}  // namespace kvasir::attention::testing
