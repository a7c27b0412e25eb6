// cuda against reference on random cases, by section 9; without a device: skipped.
// KVASIR_ATTENTION_CASES says how many, KVASIR_ATTENTION_SEED starts elsewhere.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>

#include "attention/cases/compare.h"
#include "attention/cases/random_case.h"
#include "attention/cuda/cuda.h"
#include "attention/cuda/memory.h"

namespace kvasir::attention {
namespace {

int64_t setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoll(text) : otherwise;
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

Status run_on_device(Case& c, CaseOutput* out) {
  KVASIR_ASSIGN(auto attention, cuda_backend().create(c.attributes, c.limits(), {}));
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
  }
  KVASIR_TRY(cuda::check(cudaDeviceSynchronize(), "synchronize"));
  for (Bytes* b : {&c.cache, &c.scale, &out->output, &out->key, &out->value}) moved.fetch(b->data());
  moved.fetch(out->lse.data());
  return moved.status;
}

void expect_agreement(int64_t first, int64_t count, const CaseOptions& options) {
  int failures = 0;
  for (int64_t seed = first; seed < first + count && failures < 20; ++seed) {
    const Case before = random_case(uint64_t(seed), options);
    Case after = before;
    CaseOutput got;
    Status status = run_on_device(after, &got);
    // A query with RoPE or a bias is rounded to the io type before the matrix units see it, and int8 groups under
    // 32 are widened to float16 element by element: where scores are huge that alone is more than r.
    const Attributes& a = before.attributes;
    const bool rounded = a.io != DType::f32 && (a.rope.style != RopeStyle::none || !before.qkv_bias.empty() ||
                                                before.view.quant == kvcache::QuantKind::group);
    const double widen = rounded ? 4.0 : 1.0, slack = a.io == DType::f32 ? 0.0 : widen * row_tolerance(a.io);
    std::string wrong = status.ok() ? compare_with_reference(before, after, got, widen, slack) : status.to_string();
    if (!wrong.empty()) ++failures;
    EXPECT_EQ(wrong, "") << "seed " << seed << ": " << describe(before);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << "the device is lost; seed " << seed << ": " << describe(before);
  }
}

TEST_F(Cuda, RandomCasesAgreeWithTheReference) {
  expect_agreement(setting("KVASIR_ATTENTION_SEED", 1), setting("KVASIR_ATTENTION_CASES", 300), {});
}

// Long enough for many tiles, parts and merges.
TEST_F(Cuda, LargerRandomCasesAgreeWithTheReference) {
  CaseOptions options;
  options.max_kvlen = 2500;
  options.max_work = 60'000'000;
  expect_agreement(setting("KVASIR_ATTENTION_SEED", 1) + 100'000, setting("KVASIR_ATTENTION_CASES", 300) / 8, options);
}

}  // namespace
}  // namespace kvasir::attention
