// Random cases, cpu against reference, without a test library: what is built for another processor and run
// under an emulator. neon_cases FIRST COUNT
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "attention/cases/compare.h"
#include "attention/cases/random_case.h"
#include "attention/cpu/kernels.h"

using namespace kvasir::attention;

int main(int argc, char** argv) {
  if (argc != 3) return std::fputs("usage: neon_cases FIRST COUNT\n", stderr), 2;
  if (!cpu::kernels_neon()) return std::fputs("this build has no NEON kernels\n", stderr), 1;
  const Backend& cpu = **find_backend("cpu");
  kvasir::ThreadPool two(2);
  const int64_t first = std::atoll(argv[1]), count = std::atoll(argv[2]);
  int failures = 0;
  for (int64_t seed = first; seed < first + count && failures < 10; ++seed) {
    const Case before = random_case(uint64_t(seed));
    Case after = before;
    CaseOutput got;
    const kvasir::Status status = run_case(after, cpu, {&two, nullptr}, &got);
    const std::string wrong = status.ok() ? compare_with_reference(before, after, got) : status.to_string();
    if (wrong.empty()) continue;
    ++failures;
    std::printf("seed %lld: %s\n  %s\n", static_cast<long long>(seed), wrong.c_str(), describe(before).c_str());
  }
  std::printf("%lld cases, %d wrong\n", static_cast<long long>(count), failures);
  return failures ? 1 : 0;
}
