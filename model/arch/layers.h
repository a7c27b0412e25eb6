// What decoder architectures share: how each weight is called, shaped and sharded, the buffers a step
// flows through, and both ends of the network.
#pragma once

#include <string>
#include <vector>

#include "core/cat.h"
#include "model/arch/registry.h"

namespace kvasir::model {

// Weights of layer i, with the rule by which each splits over ranks.
class LayerLoader {
 public:
  LayerLoader(const ModelConfig& c, Weights& w, Ops& ops) : c_(c), w_(w), ops_(ops) {}

  Result<Vector> norm(int32_t layer, std::string_view name) { return vector(layer, name, c_.hidden); }
  Result<Vector> head_norm(int32_t layer, std::string_view name) { return vector(layer, name, c_.head_dim); }
  Result<Matrix> qkv(int32_t layer);            // [(heads + 2 * kv_heads) * head_dim, hidden], rows
  Result<Matrix> attention_out(int32_t layer);  // [hidden, heads * head_dim], cols
  Result<Matrix> gate_up(int32_t layer);        // [2 * ffn, hidden], rows
  Result<Matrix> down(int32_t layer);           // [hidden, ffn], cols

 private:
  std::string name(int32_t layer, std::string_view what) const { return cat("blk.", layer, ".", what, ".weight"); }
  Result<Vector> vector(int32_t layer, std::string_view what, int64_t size);
  const ModelConfig& c_;
  Weights& w_;
  Ops& ops_;
};

// The embedding (whole on every rank), the last norm, and the head (by rows), which may be the embedding.
struct Ends {
  Matrix embedding, head;
  Vector norm;
};
Result<Ends> load_ends(const ModelConfig& c, Weights& w, Ops& ops);

struct Buffers {
  Buffer x, h;      // [T, hidden]: the residual stream, and what a sublayer reads
  Buffer qkv;       // [T, (heads + 2 * kv_heads) * head_dim]
  Buffer attended;  // [T, heads * head_dim]
  Buffer gate_up;   // [T, 2 * ffn]
  Buffer ffn;       // [T, ffn]
  Buffer last;      // [R, hidden]: the rows that want logits
  Buffer logits;    // [R, vocab]
};
Result<Buffers> make_buffers(const ModelConfig& c, Ops& ops);

Result<attention::Attributes> attention_of(const ModelConfig& c, const attention::RopeConfig& rope,
                                           const std::vector<float>& divisors, int32_t window);

// Last norm and head, for the rows that want logits.
Result<Buffer> finish(const ModelConfig& c, Ops& ops, const Ends& ends, const Buffers& b, int64_t first, int64_t count);

}  // namespace kvasir::model
