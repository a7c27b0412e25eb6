// cpu against reference on random cases, by section 9. KVASIR_ATTENTION_CASES says how many
// (`./test long` asks for 2,000); KVASIR_ATTENTION_SEED starts elsewhere.
#include <gtest/gtest.h>

#include <cstdlib>

#include "attention/cases/compare.h"
#include "attention/cases/random_case.h"

namespace kvasir::attention {
namespace {

int64_t setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoll(text) : otherwise;
}

TEST(Random, CpuAgreesWithReference) {
  const Backend& cpu = **find_backend("cpu");
  ThreadPool two(2);
  const int64_t first = setting("KVASIR_ATTENTION_SEED", 1), count = setting("KVASIR_ATTENTION_CASES", 300);
  int failures = 0;
  for (int64_t seed = first; seed < first + count && failures < 10; ++seed) {
    const Case before = random_case(uint64_t(seed));
    Case after = before;
    CaseOutput got;
    Status status = run_case(after, cpu, {&two, nullptr}, &got);
    std::string wrong = status.ok() ? compare_with_reference(before, after, got) : status.to_string();
    if (!wrong.empty()) ++failures;
    EXPECT_EQ(wrong, "") << "seed " << seed << ": " << describe(before);
  }
}

}  // namespace
}  // namespace kvasir::attention
