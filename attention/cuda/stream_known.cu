// The stream kernel of decodes for the usual quantized caches, whose groups are known when it is compiled.
#include "attention/cuda/stream.cuh"

namespace kvasir::attention::cuda {

StreamEntry stream_i8_group64() { return few_rows_entry<Kind<Half, Narrow::i8, true, 6>, 128>(); }
StreamEntry stream_i4_group32() { return few_rows_entry<Kind<Half, Narrow::i4, true, 5>, 128>(); }

}  // namespace kvasir::attention::cuda
