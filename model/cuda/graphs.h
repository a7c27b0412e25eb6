// Steps that are launched again and again, as CUDA graphs: the first of a kind is launched as it is (what is loaded or
// allocated on first use happens then), the second is captured, and those after it are replayed.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <unordered_map>

#include "core/status.h"

namespace kvasir::model::cuda {

class Graphs {
 public:
  static constexpr size_t kMost = 128;

  explicit Graphs(cudaStream_t stream) : stream_(stream) {}
  ~Graphs();
  Graphs(const Graphs&) = delete;

  // What `enqueue` puts on the stream must be the same launches for equal keys; what changes between them lies in
  // device memory. Where capturing fails, that is logged and steps are launched from then on.
  Status run(uint64_t key, const std::function<Status()>& enqueue);

  int64_t replays() const { return replays_; }
  bool off() const { return off_; }

 private:
  struct Kept {
    cudaGraphExec_t graph = nullptr;  // null: launched once
    uint64_t used = 0;
  };
  Status capture(const std::function<Status()>& enqueue, cudaGraphExec_t* made);
  void forget_oldest();

  cudaStream_t stream_;
  std::unordered_map<uint64_t, Kept> kept_;
  uint64_t runs_ = 0;
  int64_t replays_ = 0;
  bool off_ = false;
};

}  // namespace kvasir::model::cuda
