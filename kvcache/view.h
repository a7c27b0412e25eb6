// A layout is strides, a page table is indices: one plain-data CacheView serves the six published
// layouts, and one CacheIndex the three index modes. Kernels never switch on a layout number.
#pragma once

#include <bit>
#include <cstdint>

#include "core/dtype.h"
#include "core/status.h"

namespace kvasir::kvcache {

// In elements. Key of (token, layer, head) starts at
//   token*t.token + layer*t.layer + head*t.head, its value t.kv further on.
struct Strides {
  int64_t token = 0, layer = 0, kv = 0, head = 0;
};

// The published layouts; `revision` 2 is seeds 000 and 002, 1 is seed 001.
Result<Strides> layout_strides(int revision, int layout, int64_t max_tokens, int64_t layers, int64_t kv_heads,
                               int64_t head_elements);

enum class QuantKind : uint8_t {
  none,        // cache holds float32, float16 or bfloat16
  group,       // int8 or int4 with one scale per quant_group elements, in `scale`
  per_tensor,  // int8 or FP8 E4M3 with k_scale and v_scale per layer
};

struct CacheView {
  void* data = nullptr;   // host or device memory, as the back end wants it
  void* scale = nullptr;  // QuantKind::group only
  DType dtype = DType::f32;
  DType scale_dtype = DType::f32;  // f32 or f16
  QuantKind quant = QuantKind::none;
  int32_t quant_group = 0;
  float k_scale = 1.0f, v_scale = 1.0f;  // QuantKind::per_tensor, this layer's
  int64_t max_tokens = 0;
  int32_t layers = 1, kv_heads = 1, head_dim = 0;
  Strides strides;        // of data, in elements of dtype
  Strides scale_strides;  // of scale, in elements of scale_dtype
};

enum class IndexMode : uint8_t {
  offset,      // cachestarts[B]:           physical = cachestarts[b] + t
  page_table,  // cachestarts[B, max_pages]: physical = cachestarts[b, t / page] + t % page
  token_table  // cachestarts[kvstarts[B]]: physical = cachestarts[kvstarts[b] + t]
};

constexpr int32_t kMostPageTokens = 65536;

// Pages of so many tokens: where that is a power of two, a shift instead of a division.
class PageSize {
 public:
  constexpr PageSize(int32_t tokens)
      : tokens_(tokens), shift_(std::has_single_bit(uint32_t(tokens)) ? std::countr_zero(uint32_t(tokens)) : -1) {}
  constexpr int32_t tokens() const { return tokens_; }
  constexpr int64_t page(int64_t t) const { return shift_ >= 0 ? t >> shift_ : t / tokens_; }
  constexpr int64_t within(int64_t t) const { return t - page(t) * tokens_; }
  constexpr int64_t left(int64_t t) const { return tokens_ - within(t); }  // of t's page, from t on

 private:
  int32_t tokens_, shift_;
};

struct CacheIndex {
  IndexMode mode = IndexMode::offset;
  PageSize page = 128;  // page_table only
  const int64_t* cachestarts = nullptr;
  int64_t max_pages = 0;  // row length, page_table only
};

// Where logical slot t of sequence b lives, in tokens.
inline int64_t physical_token(const CacheIndex& ix, const int64_t* kvstarts, int64_t b, int64_t t) {
  switch (ix.mode) {
    case IndexMode::offset: return ix.cachestarts[b] + t;
    case IndexMode::page_table: {
      const int64_t page = ix.page.page(t);
      return ix.cachestarts[b * ix.max_pages + page] + t - page * ix.page.tokens();
    }
    case IndexMode::token_table: return ix.cachestarts[kvstarts[b] + t];
  }
  return -1;
}

}  // namespace kvasir::kvcache
