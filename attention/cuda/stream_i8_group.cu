// The stream kernel for an int8 cache with a scale a group.
#include "attention/cuda/stream.cuh"

namespace kvasir::attention::cuda {

StreamEntry stream_i8_group(int head_dim, int list) {
  return stream_entries<Kind<Half, Narrow::i8, true>>(head_dim, list);
}

}  // namespace kvasir::attention::cuda
