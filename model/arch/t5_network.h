// T5's network: an encoder over the prompt, and a decoder that attends to itself and to what the encoder has made of
// it.
//
//   source: each layer  x += attention(norm(x)), biased by distance, both ways;  x += mlp(norm(x));  at last y =
//   norm(x) target: each layer  x += attention(norm(x)), biased by distance, causal;  x += attention(norm(x)) to y;  x
//   += mlp(norm(x))
//
// Biases are a number a head and bucket of distances, and all layers of a side share them. The two networks take turns
// in the layers of the cache: once y is there nobody reads the encoder's own keys and values, and what the decoder's
// layers make of y is stored in their place.
#pragma once

#include <memory>
#include <vector>

#include "model/arch/layer_loader.h"
#include "model/arch/registry.h"

namespace kvasir::model {

// The bucket of a key that stands `distance` behind its query; `both_ways`: half of the buckets are for those behind.
int32_t bias_bucket(int64_t distance, bool both_ways, int32_t buckets, int32_t reach);

class T5 : public Network {
 public:
  T5(const ModelConfig& config, Ops& ops) : c_(config), ops_(ops) {}
  Status load(Weights& weights, const LoadProgress& progress);

  Status forward() override;
  Result<Buffer> logits(int64_t first, int64_t count) override;
  Result<Buffer> hidden(int64_t first, int64_t count) override;

 private:
  struct EncoderLayer {
    Vector attn_norm, ffn_norm;
    Matrix qkv, attn_out;
    Mlp mlp;
  };
  struct DecoderLayer {
    Vector attn_norm, cross_norm, ffn_norm;
    Matrix qkv, attn_out;
    Matrix cross_q, cross_k, cross_v, cross_out;
    Mlp mlp;
  };

  Result<int32_t> add_attention(Side side, Weights& weights, const std::string& biases);
  Status load_layer(int32_t i, Weights& w, LayerLoader& in, EncoderLayer* l);
  Status load_layer(int32_t i, Weights& w, LayerLoader& in, DecoderLayer* l);
  Status make_buffers();
  Status encode();
  Status feed_forward(const Mlp& mlp);

  const ModelConfig c_;
  Ops& ops_;
  Matrix embedding_, head_;
  Vector source_norm_, output_norm_;
  int32_t source_ = 0, target_ = 0, cross_ = 0;  // attention kinds
  std::vector<EncoderLayer> encoder_;
  std::vector<DecoderLayer> decoder_;
  Buffer x_, h_;                       // [T, hidden]: the stream, and what a sublayer reads
  Buffer qkv_, q_, k_, v_, attended_;  // [T, 3 * heads * head], [T, heads * head]
  Buffer up_, ffn_;
  Buffer last_, logits_;  // [R, hidden], [R, vocab]
};

Result<std::unique_ptr<Network>> load_t5(const ModelConfig& config, Weights& weights, Ops& ops,
                                         const LoadProgress& progress);

}  // namespace kvasir::model
