#include "core/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <thread>
#include <vector>

namespace kvasir {
namespace {

TEST(ThreadPool, RunsEachWorkerOnce) {
  for (int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    for (int round = 0; round < 200; ++round) {
      std::vector<int> calls(threads);
      if (round % 3 == 0) pool.begin_step();
      pool.run([&](int worker) { ++calls[worker]; });
      if (round % 3 == 2) pool.end_step();
      for (int c : calls) ASSERT_EQ(c, 1);
    }
  }
}

TEST(ThreadPool, ForEachCoversEveryIndexOnce) {
  ThreadPool pool(4);
  std::vector<std::atomic<int>> seen(1001);
  pool.for_each(1001, 7, [&](int64_t i, int) { ++seen[i]; });
  for (auto& s : seen) EXPECT_EQ(s.load(), 1);
}

TEST(ThreadPool, ForEachNearCoversEveryIndexOnce) {
  for (int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    for (int64_t n : {0, 1, 4, 7, 1001}) {
      std::vector<std::atomic<int>> seen(static_cast<size_t>(n));
      std::vector<std::atomic<int64_t>> last(static_cast<size_t>(threads * threads));
      for (auto& l : last) l = -1;
      std::atomic<int> backwards{0};
      pool.for_each_near(n, [&](int64_t i, int worker) {
        ++seen[static_cast<size_t>(i)];
        int64_t stretch = 0;
        while (n * (stretch + 1) / threads <= i) ++stretch;
        backwards += last[static_cast<size_t>(worker * threads + stretch)].exchange(i) >= i;
      });
      for (auto& s : seen) EXPECT_EQ(s.load(), 1);
      EXPECT_EQ(backwards.load(), 0) << "each stretch is gone through upwards";
    }
  }
}

TEST(ThreadPool, SleepsBetweenSteps) {
  ThreadPool pool(4);
  pool.begin_step();
  pool.run([](int) {});
  pool.end_step();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  std::clock_t before = std::clock();  // processor time of all threads
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_LT(double(std::clock() - before) / CLOCKS_PER_SEC, 0.02);
}

}  // namespace
}  // namespace kvasir
