// Counts in fixed buckets: what /metrics exposes and where percentiles are read from.
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

  // Linear inside a bucket; the open last one answers with its lower end.
  double percentile(double p) const {
    if (count == 0) return 0;
    double rank = p * double(count), below = 0;
    for (size_t i = 0; i < bounds.size(); ++i) {
      double in = double(buckets[i]);
      double low = i ? bounds[i - 1] : 0;
      if (in > 0 && below + in >= rank) return low + (bounds[i] - low) * std::max(0.0, rank - below) / in;
      below += in;
    }
    return bounds.empty() ? 0 : bounds.back();
  }
};

// From 100 us to 100 s, ten a decade: a percentile is within 26% of the truth whatever the machine.
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
