// Counts in fixed buckets: what /metrics exposes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace kvasir::engine {

struct Histogram {
  std::vector<double> bounds;    // upper ends, ascending; one more bucket holds the rest
  std::vector<int64_t> buckets;  // bounds.size() + 1 of them
  int64_t count = 0;
  double sum = 0;

  Histogram() = default;
  explicit Histogram(std::vector<double> upper) : bounds(std::move(upper)), buckets(bounds.size() + 1) {}

  void add(double value) {
    ++buckets[std::lower_bound(bounds.begin(), bounds.end(), value) - bounds.begin()];
    ++count;
    sum += value;
  }
};

// From 100 us to 100 s, ten a decade: a percentile read from them is within 26% of the truth whatever the machine.
inline Histogram time_histogram() {
  std::vector<double> bounds;
  for (double decade = 1e-4; decade < 99; decade *= 10)
    for (double step : {1.0, 1.26, 1.58, 2.0, 2.51, 3.16, 3.98, 5.01, 6.31, 7.94}) bounds.push_back(decade * step);
  bounds.push_back(100);
  return Histogram(std::move(bounds));
}

// Of how often something happened to one request; most often never.
inline Histogram times_histogram() { return Histogram({0, 1, 2, 4, 8, 16, 32, 64}); }

inline Histogram size_histogram() {
  std::vector<double> bounds;
  for (int64_t n = 1; n <= 65536; n *= 2) bounds.push_back(double(n));
  return Histogram(std::move(bounds));
}

}  // namespace kvasir::engine
