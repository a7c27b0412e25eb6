// The stream kernel of decodes for the usual quantized caches, whose groups are known when it is compiled.
#include "attention/cuda/stream.cuh"

namespace kvasir::attention::cuda {

template <class K>
StreamEntry known() {
  return stream_entry<K, 128>(0);
}
StreamEntry stream_i8_group64() { return known<Kind<Half, Narrow::i8, true, 6>>(); }
StreamEntry stream_i4_group32() { return known<Kind<Half, Narrow::i4, true, 5>>(); }

}  // namespace kvasir::attention::cuda
