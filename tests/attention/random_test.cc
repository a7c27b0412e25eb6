// cpu against reference on random cases, by section 9, and the same bytes from 1, 2 and 8 threads.
// KVASIR_ATTENTION_CASES says how many
// (`./test long` asks for 2,000); KVASIR_ATTENTION_SEED starts elsewhere.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>

#include "attention/cases/compare.h"
#include "attention/cases/random_case.h"
#include "core/cat.h"

namespace kvasir::attention {
namespace {

int64_t setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoll(text) : otherwise;
}

bool same_result(const Case& a, const CaseOutput& x, const Case& b, const CaseOutput& y) {
  return a.cache == b.cache && a.scale == b.scale && x.output == y.output && x.key == y.key && x.value == y.value &&
         x.lse.size() == y.lse.size() &&
         (x.lse.empty() || std::memcmp(x.lse.data(), y.lse.data(), x.lse.size() * sizeof(float)) == 0);
}

TEST(Random, CpuAgreesWithReference) {
  const Backend& cpu = **find_backend("cpu");
  ThreadPool one(1), two(2), eight(8);
  const int64_t first = setting("KVASIR_ATTENTION_SEED", 1), count = setting("KVASIR_ATTENTION_CASES", 300);
  int failures = 0;
  for (int64_t seed = first; seed < first + count && failures < 10; ++seed) {
    const Case before = random_case(uint64_t(seed));
    Case after = before;
    CaseOutput got;
    Status status = run_case(after, cpu, {&two, nullptr}, &got);
    if (status.field() == "KVASIR_ISA") GTEST_SKIP() << status.message();
    std::string wrong = status.ok() ? compare_with_reference(before, after, got) : status.to_string();
    for (ThreadPool* pool : {&one, &eight}) {
      Case other = before;
      CaseOutput same;
      if (!run_case(other, cpu, {pool, nullptr}, &same).ok() || !same_result(after, got, other, same))
        wrong += cat(" ", pool->threads(), " threads give other bytes than two");
    }
    if (!wrong.empty()) ++failures;
    EXPECT_EQ(wrong, "") << "seed " << seed << ": " << describe(before);
  }
}

}  // namespace
}  // namespace kvasir::attention
