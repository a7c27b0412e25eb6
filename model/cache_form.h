// What a model's cache is made of: what the operator asks for, and the scales that the checkpoint brings.
#pragma once

#include "kvcache/form.h"
#include "model/config.h"
#include "model/formats/weights.h"

namespace kvasir::model {

// `otherwise`: what `auto` is where the checkpoint says nothing.
Result<kvcache::CacheForm> cache_form_of(const ModelConfig& config, const kvcache::FormWish& wish, DType otherwise,
                                         Weights& weights);

}  // namespace kvasir::model
