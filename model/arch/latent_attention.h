// Latent attention (MLA) with absorbed weights. A token leaves one row in the cache, for all heads: a part that rope
// rotates, and a latent. The weights that would make a head's keys and values of the latent (W_UK, W_UV) multiply its
// queries and its results instead, so that nothing larger than the row is ever made:
//
//   q = [rope | nope] of each head, of the stream or of a latent of its own;  row = [rope | norm(latent)] of the stream
//   attend: queries [rope | nope * keys'], keys and values the rows  ->  [unused | latent] of each head
//   value of a head = its latent * values'
#pragma once

#include <string_view>
#include <utility>
#include <vector>

#include "model/arch/layer_loader.h"

namespace kvasir::model {

class LatentAttention {
 public:
  LatentAttention(const ModelConfig& config, Ops& ops);

  Status load_layer(int32_t layer, LayerLoader& in);  // one after another
  Status make_buffers();
  // `between`: [T, (heads + 2) * head_dim]; out: [T, heads * value].
  Status attend(const Attend& how, Buffer in, Buffer between, Buffer out);
  // The projections of a layer that are whole, by the names of their tensors.
  std::vector<std::pair<std::string_view, Matrix>> weights(int32_t layer) const;

 private:
  struct Layer {
    Matrix q_a, q;  // q_a: id -1 where queries are made of the stream
    Vector q_norm;
    Matrix row;  // [rank + rope, hidden], the latent first
    Vector row_norm;
    HeadMatrices keys, values;  // of each head: [rank, nope], [value, rank]
  };
  Status load_heads(int32_t layer, LayerLoader& in, Layer* l);
  Status load_heads_of_one(int32_t layer, LayerLoader& in, Layer* l);

  const LatentConfig c_;
  const int64_t heads_, hidden_;
  const bool bias_;
  Ops& ops_;
  std::vector<Layer> layers_;
  Buffer q_latent_, q_;  // [T, query_rank], [T, heads * (nope + rope)]
  Buffer row_;           // [T, rank + rope]
  Buffer attended_;      // [T, heads * (rope + rank)]
};

}  // namespace kvasir::model
