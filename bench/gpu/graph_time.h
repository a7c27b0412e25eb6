// How the benches here time launches: many of them in one CUDA graph, replayed.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "core/check.h"

#define CUDA(x) KVASIR_CHECK((x) == cudaSuccess, cudaGetErrorString(cudaGetLastError()))

namespace kvasir::bench {

// Microseconds of one of the `count` launches of a graph: the median over `replays`, after two that warm up.
// `before_replays` runs once the graph is made.
inline double graph_time(cudaStream_t stream, int count, const std::function<void(int)>& launch, int replays = 7,
                         const std::function<void()>& before_replays = nullptr) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < count; ++i) launch(i);
  CUDA(cudaStreamEndCapture(stream, &graph));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t a, b;
  CUDA(cudaEventCreate(&a));
  CUDA(cudaEventCreate(&b));
  if (before_replays) before_replays();
  std::vector<float> ms;
  for (int i = 0; i < replays + 2; ++i) {
    float t;
    CUDA(cudaEventRecord(a, stream));
    CUDA(cudaGraphLaunch(exec, stream));
    CUDA(cudaEventRecord(b, stream));
    CUDA(cudaEventSynchronize(b));
    CUDA(cudaEventElapsedTime(&t, a, b));
    if (i >= 2) ms.push_back(t);
  }
  std::sort(ms.begin(), ms.end());
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
  CUDA(cudaEventDestroy(a));
  CUDA(cudaEventDestroy(b));
  return 1e3 * ms[ms.size() / 2] / count;
}

}  // namespace kvasir::bench
