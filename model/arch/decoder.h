// The decoder that most architectures are: a stream of hidden states to which each layer adds its attention and its
// MLP. What sets one family apart from another are flags and numbers of ModelConfig; each flag is one line here.
//
//   x = embedding of the tokens
//   each layer:  x += [norm] attention([norm] x)      [norm]: where the family has one
//                x += [norm] mlp([norm] x)            parallel families give both the same x
//   logits = head(norm(x))
#pragma once

#include <memory>
#include <vector>

#include "model/arch/latent_attention.h"
#include "model/arch/registry.h"

namespace kvasir::model {

struct Norm {
  Vector weight, bias;
};

struct DecoderLayer {
  Norm attn_norm, ffn_norm, attn_output_norm, ffn_output_norm;
  Vector q_norm, k_norm;
  Matrix qkv, attn_out;
  int32_t attention = 0;  // its kind, as Ops knows it
  Vector sinks;
  Mlp mlp;               // where there are experts: what is shared beside them, if anything is
  int32_t experts = -1;  // as Ops knows them
  Vector shared_gate;
};

class Decoder : public Network {
 public:
  Decoder(const ModelConfig& config, Ops& ops);
  Status load(Weights& weights, const LoadProgress& progress);

  std::vector<Projection> projections() const override;
  Status keep(std::vector<int32_t> layers) override;
  Matrix embedding() const override { return embedding_; }
  Matrix head() const override { return head_; }
  Status forward() override;
  Result<Buffer> logits(int64_t first, int64_t count) override;
  Result<Buffer> hidden(int64_t first, int64_t count) override;

 protected:
  // All layers; the first one's attention reads `first`, which is made of the stream.
  Status run_layers(Buffer first);
  Status keep_stream(int32_t layer);
  Status load_layer(int32_t i, class LayerLoader& in);
  Status make_buffers();
  Status norm(Buffer in, const Norm& norm, Buffer out);
  // A layer's attention, up to the way back into the stream; what it made.
  virtual Status load_attention(int32_t i, class LayerLoader& in, DecoderLayer& layer);
  virtual Result<Buffer> attend(const DecoderLayer& layer, int32_t i, Buffer in);
  Result<int32_t> attention_kind(LayerKind kind);
  Status load_head_norms(int32_t i, class LayerLoader& in, DecoderLayer& layer);
  Status attend_normed(const DecoderLayer& layer, int32_t i);  // of what lies in qkv_
  Status feed_forward(const DecoderLayer& layer, Buffer in, Buffer up, Buffer ffn);
  Status add(Buffer in, Matrix weight, const Norm& output_norm, const Norm* next);

  ModelConfig c_;
  Ops& ops_;
  std::vector<std::pair<LayerKind, int32_t>> kinds_;
  Matrix embedding_, head_;
  Norm embedding_norm_, output_norm_;
  std::vector<DecoderLayer> layers_;
  std::unique_ptr<LatentAttention> latent_;  // where the model has it
  Buffer x_, h_;                             // [T, hidden]: the residual stream, and what a sublayer reads
  Buffer qkv_;                               // [T, (heads + 2 * kv_heads) * head_dim]
  Buffer attended_;                          // [T, heads * head_dim]
  Buffer up_, ffn_;                          // [T, 2 * ffn] (without gates [T, ffn]), [T, ffn]
  Buffer shared_up_, shared_ffn_;            // likewise, of the MLP beside experts
  Buffer last_;                              // [R, hidden]: the rows that want logits
  Buffer logits_;                            // [R, vocab]
  std::vector<int32_t> kept_;                // layers whose stream is handed over
};

Result<std::unique_ptr<Network>> load_decoder(const ModelConfig& config, Weights& weights, Ops& ops,
                                              const LoadProgress& progress);

}  // namespace kvasir::model
