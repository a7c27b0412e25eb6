// One source of weights for several ranks that load the same network side by side, each on a thread of its own: a
// tensor is read once, by who asks first, and given back when the last rank has done with it.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "model/formats/weights.h"

namespace kvasir::model {

class SharedWeights {
 public:
  // The source outlives this.
  SharedWeights(Weights& source, int ranks) : source_(source), asked_(size_t(ranks)) {}
  // What a rank loads from; a rank that has ended (its object is gone) keeps nobody waiting.
  std::unique_ptr<Weights> of_rank(int rank);

 private:
  class OfRank;
  struct Held {
    HostTensor tensor;
    int64_t asked = 0, released = 0;
  };
  static constexpr int64_t kAhead = 32;  // tensors, of one rank before another
  Result<HostTensor> get(int rank, std::string_view name, int64_t rows, int64_t cols);
  void release(const HostTensor& tensor);
  void leave(int rank);

  Weights& source_;
  mutable std::mutex mutex_;
  std::condition_variable moved_;
  std::vector<int64_t> asked_;                     // by rank; of one that has ended the greatest there is
  std::map<std::string, Held, std::less<>> held_;  // by the network's names
};

}  // namespace kvasir::model
