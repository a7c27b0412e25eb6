// The weights of one layer by what they are, each checked for its shape and with the rule by which it splits over
// ranks.
#pragma once

#include <string>

#include "core/cat.h"
#include "model/config.h"
#include "model/formats/weights.h"
#include "model/ops.h"

namespace kvasir::model {

// Which head of a fused tensor that is qkv_by_group is head `h` of all queries, all keys, all values.
int64_t grouped_head(const ModelConfig& c, int64_t h);
int64_t grouped_head(int64_t heads, int64_t kv_heads, int64_t h);

class LayerLoader {
 public:
  LayerLoader(const ModelConfig& c, Weights& w, Ops& ops) : c_(c), w_(w), ops_(ops) {}

  // Whole names, or those of a layer.
  static std::string of(int32_t layer, std::string_view name) { return cat("blk.", layer, ".", name); }

  // Sizes are this rank's; `share` says of what they are a part.
  Result<Vector> vector(const std::string& name, int64_t size, float shift = 0, float scale = 1,
                        const Share& share = {});
  Result<Matrix> matrix(const std::string& name, int64_t rows, int64_t cols, Shard shard, bool bias,
                        const Share& share = {});
  // [(heads + 2 * kv_heads) * head_dim, hidden], rows; of a layer without a cache of its own [heads * head_dim, hidden]
  Result<Matrix> qkv(int32_t layer);
  Result<Matrix> attention_out(int32_t layer);  // [hidden, heads * head_dim], cols
  Weights& weights() { return w_; }
  Result<Mlp> mlp(int32_t layer) { return mlp(layer, c_.ffn_of(layer), c_.part.ffn, ""); }
  Result<Mlp> shared_expert(int32_t layer) { return mlp(layer, c_.experts.shared_ffn, c_.part.shared_ffn, "_shexp"); }
  Result<Experts> experts(int32_t layer);

 private:
  // One fused tensor, or the parts that it would be made of, stacked by rows.
  struct Part {
    std::string name;
    int64_t rows;
    Share share;
  };
  Result<Matrix> stacked(int32_t layer, const std::string& fused, std::span<const Part> parts, int64_t cols, bool bias,
                         bool by_group);
  Result<Mlp> mlp(int32_t layer, int64_t ffn, const Share& share, std::string_view ending);
  class OfExperts;
  HostTensor straightened(HostTensor t) const;

  const ModelConfig& c_;
  Weights& w_;
  Ops& ops_;
};

}  // namespace kvasir::model
