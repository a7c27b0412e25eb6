// What scores are made of. FP8: queries become E4M3 once they are rotated, keys and values are an FP8 cache's, and a
// GPU multiplies prompts as that; every query is rounded alike, so that it cannot matter how a request travels.
#pragma once

#include "attention/params.h"
#include "core/cat.h"
#include "core/status.h"
#include "model/config.h"
#include "model/runner.h"

namespace kvasir::model {

inline bool fp8_attention(const RunnerOptions& o) { return o.attention_dtype == "fp8"; }

// The cache that the options ask for, of what attention's type demands of it.
inline Result<kvcache::FormWish> cache_wish(const ModelConfig& config, const kvcache::FormWish& asked,
                                            const std::string& attention_dtype) {
  auto bad = [&](std::string why) {
    return invalid_argument(cat("attention_dtype is ", attention_dtype, "; ", why)).with_field("attention_dtype");
  };
  if (attention_dtype == "auto" || attention_dtype == "bf16") return asked;
  if (attention_dtype != "fp8") return bad("it must be auto, bf16 or fp8");
  if (config.encoder || config.encoder_layers > 0)
    return bad("it is for models that keep an FP8 cache, and an encoder keeps none: auto");
  kvcache::FormWish wish = asked;
  const bool unsaid = wish.dtype == "auto" && wish.group < 0 && wish.scale_dtype == "auto";
  if (unsaid && (config.kv.dtype == "auto" || config.kv.dtype == "fp8")) wish.dtype = "fp8";
  if (wish.dtype != "fp8")
    return bad(cat("its keys and values are those of an FP8 cache, and kv_dtype is ",
                   wish.dtype == "auto" ? config.kv.dtype : wish.dtype, ": kv_dtype auto or fp8"));
  return wish;
}

// What the options make of one kind of layer.
inline attention::Attributes with_dtype(attention::Attributes a, const RunnerOptions& o) {
  a.fp8_query = fp8_attention(o);
  return a;
}

}  // namespace kvasir::model
