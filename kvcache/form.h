// What a cache is made of and how it lies, chosen once when a model is loaded. Whatever the form, a page of a cache is
// so many stretches of equal length, equally far apart, in its elements and again in its scales: who copies or moves
// pages needs to know nothing else.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/status.h"
#include "kvcache/view.h"

namespace kvasir::kvcache {

// Scales of 8-bit elements that have one for all of a layer's keys and one for its values; and of its queries, where
// attention is FP8.
struct TensorScales {
  float k = 1, v = 1, q = 1;
};

// As an operator of the server asks for it.
struct FormWish {
  std::string dtype = "auto";  // or float32, float16, bfloat16, fp8, int8, int4
  int32_t group = -1;          // elements that share a scale; 0: one scale for all; -1: what suits the type
  std::string scale_dtype = "auto";
  std::string layout = "auto";      // kLayoutNames
  double k_scale = 0, v_scale = 0;  // of one scale for all; 0: the checkpoint's
};

struct CacheForm {
  DType dtype = DType::f16;
  int32_t quant_group = 0;  // int8 and int4; 0: one scale for all, or none
  DType scale_dtype = DType::f16;
  int32_t revision = 2, layout = 3;
  std::vector<TensorScales> tensor_scales;  // by layer, where there is one for all; empty: 1

  QuantKind quant() const {
    if (quant_group > 0) return QuantKind::group;
    return dtype == DType::i8 || dtype == DType::f8_e4m3 ? QuantKind::per_tensor : QuantKind::none;
  }
  int64_t row_bytes(int64_t head_dim) const;  // of one head's key or value, its scales included
  std::string to_string() const;              // "int8, a float16 scale for each 64"
};

extern const std::vector<std::string> kLayoutNames;

// `otherwise`: what `auto` is here. A combination that cannot be is refused with the ones that can.
Result<CacheForm> cache_form(const FormWish& wish, int32_t head_dim, DType otherwise);

// Latent attention: values are the keys as they lie, and only keys are stored. The value of a key lies 0 further on.
inline bool keys_alone(const CacheView& view) { return view.strides.kv == 0; }

// A view of a cache of this form, of layers x heads x head_dim; the memory is still to come.
Result<CacheView> view_of(const CacheForm& form, int64_t tokens, int32_t layers, int32_t kv_heads, int32_t head_dim,
                          bool values = true);

// One array of a cache as pages see it: token t of each stretch begins t * token_bytes after it.
struct Plane {
  int64_t stretches = 0, pitch = 0, token_bytes = 0;
  int64_t bytes() const { return stretches * pitch; }
};
// Of the elements and of the scales; without scales the second is empty.
std::array<Plane, 2> planes_of(const CacheView& view);

}  // namespace kvasir::kvcache
