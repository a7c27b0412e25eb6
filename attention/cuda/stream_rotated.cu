// The stream kernels of StreamingLLM, by kind of cache.
#include "attention/cuda/stream.cuh"

namespace kvasir::attention::cuda {

StreamEntry stream_rotated(const Shape& s, const CacheLayer& c) {
  switch (static_cast<kvcache::QuantKind>(c.quant)) {
    case kvcache::QuantKind::none:
      if (c.dtype == DType::f16) return rotated_entry<Kind<Half, Narrow::none, false>>(s.head_dim);
      if (c.dtype == DType::bf16 && s.work == DType::bf16)
        return rotated_entry<Kind<Brain, Narrow::none, false>>(s.head_dim);
      return {};
    case kvcache::QuantKind::per_tensor:
      return c.dtype == DType::i8 ? rotated_entry<Kind<Half, Narrow::i8, false>>(s.head_dim)
                                  : rotated_entry<Kind<Half, Narrow::f8, false>>(s.head_dim);
    case kvcache::QuantKind::group:
      if (const int bytes = s.head_dim / c.quant_group * dtype_bits(c.scale_dtype) / 8; bytes != 2 && bytes % 4)
        return {};
      return c.dtype == DType::i8 ? rotated_entry<Kind<Half, Narrow::i8, true>>(s.head_dim)
                                  : rotated_entry<Kind<Half, Narrow::i4, true>>(s.head_dim);
  }
  return {};
}

}  // namespace kvasir::attention::cuda
