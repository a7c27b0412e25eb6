// dummy:ARCH,key=value,...: a network of any architecture and size without a file, for load tests; dummy:qwen3-8b,...:
// one of a known model's shape (dummy_shapes.h), of which keys may change what they name. Its weights are a function of
// the seed, its vocabulary is the 256 bytes, four special tokens and then words that no text encodes to.
//   layers=2 hidden=256 heads=4 kv_heads=2 head_dim=64 ffn=512 vocab=512 context=2048 seed=0
//   experts=8 experts_used=2 expert_ffn=128 shared_ffn=0 expert_type (mxfp4, or as below), where the architecture has
//   experts type=q8_0 (f32, f16, bf16, q4_0, q4_1, q4_k)  step_ms=0  window=0  name=dummy
#pragma once

#include <memory>
#include <string_view>

#include "model/config.h"
#include "model/formats/weights.h"
#include "model/text/text.h"

namespace kvasir::model {

constexpr int32_t kDummyMinVocab = 260;

// config.quantization names the weights' type, config.dummy_seed the seed.
std::unique_ptr<Weights> dummy_weights(const ModelConfig& config);
text::GgufVocab dummy_vocab(const ModelConfig& config);

}  // namespace kvasir::model
