// What a model's cache is made of: what the operator asks for, and the scales that the checkpoint brings.
#pragma once

#include <vector>

#include "kvcache/form.h"
#include "model/config.h"
#include "model/formats/weights.h"

namespace kvasir::model {

// `otherwise`: what `auto` is where the checkpoint says nothing.
Result<kvcache::CacheForm> cache_form_of(const ModelConfig& config, const kvcache::FormWish& wish, DType otherwise,
                                         Weights& weights);

// Layers whose pages lie in one cache.
struct CacheShape {
  kvcache::CacheForm form;
  int32_t layers = 0, kv_heads = 0, head_dim = 0, page_size = 16;
  bool keys_alone = false;  // values are the keys as they lie
};

struct CacheLayout {
  std::vector<CacheShape> shapes;  // one, or that of full layers and that of windowed ones
  std::vector<int32_t> places;     // of each layer in its cache; -1: it has none of its own
};
// `apart`: full layers and windowed ones have pages of their own (page groups). Where they are of different shapes they
// have caches of their own either way.
CacheLayout cache_layout(const ModelConfig& config, const kvcache::CacheForm& form, int32_t page_size, bool apart);

}  // namespace kvasir::model
