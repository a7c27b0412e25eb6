// Random operations on random schedulers. KVASIR_RANDOM_OPS says how many (200,000; `./test long` 10 million).
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "tests/scheduler/random_world.h"

namespace kvasir::scheduler {
namespace {

uint64_t seed_now = 0;
int operations_now = 0;

// A broken invariant says how to repeat it.
void say_seed(int) {
  std::fprintf(stderr, "repeat with: scheduler_random_test %llu %d\n", static_cast<unsigned long long>(seed_now),
               operations_now);
  std::_Exit(134);
}

uint64_t live(uint64_t seed, int operations) {
  seed_now = seed;
  operations_now = operations;
  std::signal(SIGABRT, say_seed);
  RandomWorld world(seed);
  for (int i = 0; i < operations; ++i) world.operate();
  world.finish();
  return world.plans_hash();
}

int64_t wanted() {
  const char* ops = std::getenv("KVASIR_RANDOM_OPS");
  return ops != nullptr ? std::atoll(ops) : 200000;
}

TEST(Random, NothingIsLostOrSharedWrongly) {
  int64_t done = 0;
  uint64_t base = 0;
  while (done < wanted()) {
    const bool good = rc::check([&] {
      const uint64_t seed = *rc::gen::resize(100, rc::gen::arbitrary<uint64_t>());
      const int operations = *rc::gen::inRange(1, 1000);
      live(seed + base, operations);
      done += operations;
    });
    ASSERT_TRUE(good);
    base += 0x9e3779b97f4a7c15ull;
  }
}

// An idle page below one in use: two had brought it back from the second tier (depth 2).
TEST(Random, AWorldThatOnceBroke) { live(6612323109426645864u, 417); }

// Two beams behind a window came back one at a time, and the first gave its pages up again, for ever.
TEST(Random, AWorldThatNeverEnded) { live(11028714021159511378u, 172); }

// A beam was moved to the second tier by the very plan that was to write its last page.
TEST(Random, AWorldThatMovedTooEarly) { live(8972206558244202372u, 512); }

TEST(Random, TheSameSeedGivesTheSamePlans) {
  for (uint64_t seed = 0; seed < 60; ++seed) EXPECT_EQ(live(seed, 300), live(seed, 300)) << seed;
}

}  // namespace
}  // namespace kvasir::scheduler

// Broken invariants abort; `random_test SEED OPERATIONS` repeats one world.
int main(int argc, char** argv) {
  if (argc == 3 && argv[1][0] != '-') {
    kvasir::scheduler::live(std::strtoull(argv[1], nullptr, 10), std::atoi(argv[2]));
    return 0;
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
