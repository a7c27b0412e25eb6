// What a request takes while it waits: its prompt and at most 1 KB. Counted, by an operator new of this program's own.
#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "scheduler/policy.h"
#include "scheduler/scheduler.h"

namespace {
std::atomic<int64_t> held{0};  // bytes, as the allocator rounds them
}

void* operator new(size_t n) {
  void* p = std::malloc(n);
  if (p == nullptr) throw std::bad_alloc();
  held += static_cast<int64_t>(malloc_usable_size(p)) + 8;
  return p;
}
void operator delete(void* p) noexcept {
  if (p != nullptr) held -= static_cast<int64_t>(malloc_usable_size(p)) + 8;
  std::free(p);
}
void operator delete(void* p, size_t) noexcept { operator delete(p); }

namespace kvasir::scheduler {
namespace {

TEST(Memory, AWaitingRequestIsItsPromptAndAtMostAKilobyte) {
  for (const std::string& policy : policy_names()) {
    Settings o;
    o.policy = policy;
    o.groups = {{1024, 0}};
    o.max_waiting = 20000;
    o.max_waiting_tokens = int64_t(1) << 40;
    auto scheduler = std::move(Scheduler::create(o)).value();
    constexpr int kRequests = 10000, kPrompt = 300;
    auto submit = [&](int id) {
      Submission s;
      s.id = static_cast<RequestId>(id);
      s.tenant = "a tenant whose name is long enough to be allocated";
      s.cache_salt = "and so is the salt of its cache";
      s.prompt.assign(kPrompt, id);
      s.deadline = Time{} + std::chrono::hours(1);
      ASSERT_TRUE(scheduler->submit(std::move(s), Time{}).ok());
    };
    submit(0);
    const int64_t before = held;
    for (int id = 1; id <= kRequests; ++id) submit(id);
    const double each = static_cast<double>(held - before) / kRequests;
    std::printf("%-9s %.0f bytes a waiting request beside its prompt\n", policy.c_str(),
                each - kPrompt * sizeof(int32_t));
    EXPECT_LE(each, kPrompt * sizeof(int32_t) + 1024) << policy;
  }
}

}  // namespace
}  // namespace kvasir::scheduler
