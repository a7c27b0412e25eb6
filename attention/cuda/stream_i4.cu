// The stream kernel for an int4 cache with a scale a group.
#include "attention/cuda/stream.cuh"

namespace kvasir::attention::cuda {

StreamEntry stream_i4(int head_dim, int list) { return stream_entries<Kind<Half, Narrow::i4, true>>(head_dim, list); }

}  // namespace kvasir::attention::cuda
