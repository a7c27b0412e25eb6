// The stream kernel for an int8 cache with one scale a tensor.
#include "attention/cuda/stream.cuh"

namespace kvasir::attention::cuda {

StreamEntry stream_i8(int head_dim, int list) { return stream_entries<Kind<Half, Narrow::i8, false>>(head_dim, list); }

}  // namespace kvasir::attention::cuda
