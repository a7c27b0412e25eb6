#include "kvcache/view.h"

#include "core/cat.h"

namespace kvasir::kvcache {

Result<Strides> layout_strides(int revision, int layout, int64_t max_tokens, int64_t layers, int64_t kv_heads,
                               int64_t head_elements) {
  if (revision != 1 && revision != 2)
    return invalid_argument(cat("revision is ", revision, "; it must be 1 (seed 001) or 2 (seeds 000 and 002)"))
        .with_field("revision");
  if (layout < 0 || layout > 3)
    return invalid_argument(cat("cache_layout is ", layout, "; it must be 0, 1, 2 or 3")).with_field("cache_layout");
  if (max_tokens <= 0 || layers <= 0 || kv_heads <= 0 || head_elements <= 0)
    return invalid_argument(cat("a cache of ", max_tokens, " tokens, ", layers, " layers, ", kv_heads, " heads of ",
                                head_elements, " elements is empty; every dimension must be at least 1"))
        .with_field("cache");
  int64_t total = 2;
  for (int64_t n : {max_tokens, layers, kv_heads, head_elements})
    if (__builtin_mul_overflow(total, n, &total))
      return invalid_argument(cat("a cache of ", max_tokens, " tokens, ", layers, " layers, ", kv_heads, " heads of ",
                                  head_elements, " elements has more than 2^63 elements"))
          .with_field("cache");

  const int64_t T = max_tokens, L = layers, H = kv_heads, D = head_elements;
  if (revision == 1 && layout == 2) return Strides{2 * D, H * T * 2 * D, D, T * 2 * D};  // (L,H,T,2,D)
  if (revision == 1 && layout == 3) return Strides{D, H * T * D, L * H * T * D, T * D};  // (2,L,H,T,D)
  if (layout == 0) return Strides{L * 2 * H * D, 2 * H * D, H * D, D};                   // (T,L,2,H,D)
  if (layout == 1) return Strides{2 * H * D, T * 2 * H * D, H * D, D};                   // (L,T,2,H,D)
  if (layout == 2) return Strides{H * D, 2 * T * H * D, T * H * D, D};                   // (L,2,T,H,D)
  return Strides{D, 2 * H * T * D, H * T * D, T * D};                                    // (L,2,H,T,D)
}

}  // namespace kvasir::kvcache
