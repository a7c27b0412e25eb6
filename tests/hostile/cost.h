// What a piece of work costs this process: processor time of all its threads, and memory at its highest.
#pragma once

#include <gtest/gtest.h>

#include <ctime>
#include <fstream>

#include "core/host.h"

namespace kvasir {

struct Cost {
  double seconds;
  int64_t bytes;
};

template <class F>
Cost cost_of(F work) {
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak begins at what is resident now
  const int64_t before = resident_bytes();
  const std::clock_t from = std::clock();
  work();
  return {double(std::clock() - from) / CLOCKS_PER_SEC, peak_resident_bytes() - before};
}

// The bars for a single input of any kind.
template <class F>
void expect_bounded(const std::string& what, F work) {
  const Cost cost = cost_of(work);
  EXPECT_LT(cost.seconds, 2) << what.substr(0, 200);
  EXPECT_LT(cost.bytes, 256 << 20) << what.substr(0, 200);
}

}  // namespace kvasir
