// The stream kernel for a float16 cache.
#include "attention/cuda/stream.cuh"

namespace kvasir::attention::cuda {

StreamEntry stream_f16(int head_dim, int list) {
  return stream_entries<Kind<Half, Narrow::none, false>>(head_dim, list);
}

}  // namespace kvasir::attention::cuda
