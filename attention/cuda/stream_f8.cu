// The stream kernel for an FP8 cache with one scale a tensor.
#include "attention/cuda/stream.cuh"

namespace kvasir::attention::cuda {

StreamEntry stream_f8(int head_dim, int list) { return stream_entries<Kind<Half, Narrow::f8, false>>(head_dim, list); }

}  // namespace kvasir::attention::cuda
