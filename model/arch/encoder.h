// Encoders as BERT is one: every token sees all others, and each sublayer's sum is normalized.
//
//   x = norm(embedding of the tokens + of their positions + of the text of a pair they belong to)
//   each layer:  x = norm(x + attention(x));  x = norm(x + mlp(x))
//   scores of a classifier = out(tanh(dense(x of the first token)))
#pragma once

#include <memory>
#include <vector>

#include "model/arch/registry.h"

namespace kvasir::model {

class Encoder : public Network {
 public:
  Encoder(const ModelConfig& config, Ops& ops) : c_(config), ops_(ops) {}
  Status load(Weights& weights, const LoadProgress& progress);

  Status forward() override;
  Result<Buffer> logits(int64_t, int64_t) override { return unimplemented("an encoder gives no logits of tokens"); }
  // Or, with a classification head, its scores.
  Result<Buffer> hidden(int64_t first, int64_t count) override;

 private:
  struct Norm {
    Vector weight, bias;
  };
  struct Layer {
    Matrix qkv, attn_out;
    Norm attn_norm;
    Mlp mlp;
    Norm norm;
  };
  Status norm(const Norm& norm, Buffer in_out) {
    return ops_.layer_norm(in_out, norm.weight, norm.bias, c_.norm_eps, in_out);
  }

  const ModelConfig c_;
  Ops& ops_;
  Matrix tokens_, positions_, types_;
  Norm embedding_norm_;
  int32_t attention_ = 0;
  std::vector<Layer> layers_;
  Matrix dense_, out_;  // of the classification head
  Buffer x_, qkv_, attended_, up_, ffn_;
  Buffer last_, pooled_, scores_;  // [R, hidden] twice, [R, labels]
};

// A classifier's labels, where config.json says that it is one.
Status read_labels(const JsonKeys& in, ModelConfig& c);
Status no_gguf_encoder(const GgufKeys& in);

Result<std::unique_ptr<Network>> load_encoder(const ModelConfig& config, Weights& weights, Ops& ops,
                                              const LoadProgress& progress);

}  // namespace kvasir::model
