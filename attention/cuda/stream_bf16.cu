// The stream kernel for a bfloat16 cache.
#include "attention/cuda/stream.cuh"

namespace kvasir::attention::cuda {

StreamEntry stream_bf16(int head_dim, int list) {
  return stream_entries<Kind<Brain, Narrow::none, false>>(head_dim, list);
}

}  // namespace kvasir::attention::cuda
