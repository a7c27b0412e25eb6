// What clients may make the server hold, in total, and how it goes back to the system.
#pragma once

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <string>
#include <unordered_map>

#include "core/status.h"

namespace kvasir::server {

// Bytes that requests hold while they are read, looked at and answered: one total for every port, of which one tenant
// may have three quarters. A request's first kFree bytes are not counted, so that small ones are taken whatever the
// large ones do; their number is bounded by the connections and calls that may be open.
class ByteBudget {
 public:
  static constexpr size_t kFree = 64 << 10;
  explicit ByteBudget(size_t total) : total_(total) {}

  // What one request holds; goes back when it is destroyed. Not for two threads at once.
  class Share {
   public:
    Share() = default;
    Share(ByteBudget* budget, std::string tenant) : budget_(budget), tenant_(std::move(tenant)) {}
    Share(Share&& other) noexcept { *this = std::move(other); }
    Share& operator=(Share&& other) noexcept;
    ~Share() { resize(0); }

    Status hold(size_t bytes);  // RESOURCE_EXHAUSTED: there is no room for so many
    void drop() { resize(0); }

   private:
    bool resize(size_t bytes);

    ByteBudget* budget_ = nullptr;
    std::string tenant_;
    size_t held_ = 0;
  };

 private:
  bool change(const std::string& tenant, size_t from, size_t to);

  const size_t total_;
  std::mutex mutex_;
  size_t held_ = 0, highest_ = 0;
  std::unordered_map<std::string, size_t> by_tenant_;  // of those that hold some
};

// Says when a count has fallen to an eighth of its peak: memory is worth giving back then. Not for two threads at once.
class PeakWatch {
 public:
  void grew(size_t now) { peak_ = std::max(peak_, now); }
  bool fell(size_t now) {
    if (peak_ < kMany || now > peak_ / 8) return false;
    peak_ = now;
    return true;
  }

 private:
  static constexpr size_t kMany = 1000;
  size_t peak_ = 0;
};

// The allocator keeps what was freed for later. When that is much, the system gets it back; cheap to call often.
void give_memory_back();

// For the whole process: what malloc_trim() does not reach, the free end of each thread's heap, stays below a few MiB.
// By default it grows with the largest block that was ever freed, to 64 MiB a heap.
void bound_free_ends();

}  // namespace kvasir::server
