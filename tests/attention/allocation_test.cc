// run() allocates nothing: every operator new of this program is counted while one is at work.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "attention/cases/random_case.h"

namespace {
std::atomic<bool> g_counting{false};
std::atomic<int64_t> g_allocations{0};

void* counted(size_t bytes, size_t alignment) {
  if (g_counting.load(std::memory_order_relaxed)) g_allocations.fetch_add(1, std::memory_order_relaxed);
  const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* p = std::aligned_alloc(alignment, rounded > 0 ? rounded : alignment);
  if (!p) throw std::bad_alloc();
  return p;
}
}  // namespace

void* operator new(size_t n) { return counted(n, 16); }
void* operator new[](size_t n) { return counted(n, 16); }
void* operator new(size_t n, std::align_val_t a) { return counted(n, size_t(a)); }
void* operator new[](size_t n, std::align_val_t a) { return counted(n, size_t(a)); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t, std::align_val_t) noexcept { std::free(p); }

namespace kvasir::attention {
namespace {

int64_t allocations_of_a_run(Case c, ThreadPool& pool) {
  auto op = std::move((*find_backend("cpu"))->create(c.attributes, c.limits(), {&pool, nullptr})).value();
  EXPECT_TRUE(op->plan(c.step()).ok());
  CaseOutput out;
  Tensors tensors;
  KvcTensors kvc;
  if (c.op == Op::key_value_cache)
    kvc = case_kvc_tensors(c, &out);
  else
    tensors = case_tensors(c, &out);
  g_allocations = 0;
  g_counting = true;
  const Status status = c.op == Op::key_value_cache ? op->store_and_gather(kvc) : op->run(tensors);
  g_counting = false;
  EXPECT_TRUE(status.ok()) << status.to_string();
  return g_allocations;
}

TEST(Allocation, TheCounterSeesOne) {
  g_allocations = 0;
  g_counting = true;
  delete new int(1);
  g_counting = false;
  EXPECT_EQ(g_allocations, 1);
}

TEST(Allocation, RunAllocatesNothing) {
  for (int threads : {1, 2}) {
    ThreadPool pool(threads);
    for (uint64_t seed = 1; seed <= 120; ++seed) {
      const Case c = random_case(seed);
      EXPECT_EQ(allocations_of_a_run(c, pool), 0) << "seed " << seed << ": " << describe(c);
    }
  }
}

}  // namespace
}  // namespace kvasir::attention
