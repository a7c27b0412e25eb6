// A barrier between ranks, at which each publishes a pointer to its partial result: what an all-reduce and a gather are
// made of in one address space. Sums are taken in the order of ranks, so no result depends on who arrived last.
#pragma once

#include <array>
#include <atomic>
#include <mutex>

#include "core/status.h"
#include "model/ranks.h"

namespace kvasir::model::cpu {

class Link {
 public:
  explicit Link(int32_t ranks) : ranks_(ranks) {}
  int32_t ranks() const { return ranks_; }

  // Returns when every rank has called it, or with why one is lost. What a rank published may be read until the reader
  // calls this again; with two buffers used alternately a writer therefore needs no second barrier.
  Status meet(int32_t rank, const float* published);
  const float* published_by(int32_t rank) const {
    return published_[slot_of(round_.load(std::memory_order_relaxed))][size_t(rank)];
  }

  // This rank will not call meet() again: all that wait for it return, and so does every later call. What ranks that
  // have passed the barrier are still reading stays as it is.
  void lose(int32_t rank, const Status& why);
  Status lost() const;

 private:
  static size_t slot_of(uint32_t round) { return round & 1; }

  const int32_t ranks_;
  std::atomic<uint32_t> round_{0};
  std::atomic<int32_t> arrived_{0};
  std::atomic<bool> is_lost_{false};
  std::array<std::array<const float*, kMostRanks>, 2> published_{};
  mutable std::mutex mutex_;
  Status why_;
};

}  // namespace kvasir::model::cpu
