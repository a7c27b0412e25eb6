#include "model/cuda/graphs.h"

#include <algorithm>

#include "attention/cuda/memory.h"
#include "core/log.h"

namespace kvasir::model::cuda {

using attention::cuda::check;

Graphs::~Graphs() {
  for (auto& [key, kept] : kept_)
    if (kept.graph) cudaGraphExecDestroy(kept.graph);
}

void Graphs::forget_oldest() {
  auto oldest = std::min_element(kept_.begin(), kept_.end(),
                                 [](const auto& a, const auto& b) { return a.second.used < b.second.used; });
  if (oldest->second.graph) cudaGraphExecDestroy(oldest->second.graph);
  kept_.erase(oldest);
}

Status Graphs::capture(const std::function<Status()>& enqueue, cudaGraphExec_t* made) {
  // Other threads may allocate meanwhile.
  KVASIR_TRY(check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture"));
  const Status enqueued = enqueue();
  cudaGraph_t graph = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(stream_, &graph);
  cudaError_t instantiated = cudaSuccess;
  if (enqueued.ok() && ended == cudaSuccess) instantiated = cudaGraphInstantiate(made, graph, 0);
  if (graph) cudaGraphDestroy(graph);
  cudaGetLastError();  // it is in what is returned
  KVASIR_TRY(enqueued);
  KVASIR_TRY(check(ended, "capture"));
  return check(instantiated, "making a graph");
}

Status Graphs::run(uint64_t key, const std::function<Status()>& enqueue) {
  if (off_) return enqueue();
  auto found = kept_.find(key);
  if (found == kept_.end()) {
    if (kept_.size() >= kMost) forget_oldest();
    kept_[key].used = ++runs_;
    return enqueue();
  }
  Kept& kept = found->second;
  kept.used = ++runs_;
  if (!kept.graph) {
    if (Status s = capture(enqueue, &kept.graph); !s.ok()) {
      off_ = true;
      log_warn("CUDA graphs are off: a step could not be captured, and steps are launched kernel by kernel",
               {{"why", s.message()}});
      return enqueue();
    }
  } else {
    ++replays_;
  }
  return check(cudaGraphLaunch(kept.graph, stream_), "graph");
}

}  // namespace kvasir::model::cuda
