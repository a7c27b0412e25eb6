#include "model/arch/layers.h"

#include <cmath>

namespace kvasir::model {

Result<Vector> LayerLoader::vector(int32_t layer, std::string_view what, int64_t size) {
  KVASIR_ASSIGN(HostTensor t, w_.get(name(layer, what), 1, size));
  return ops_.load_vector(w_, t, c_.norm_shift);
}

Result<Matrix> LayerLoader::qkv(int32_t layer) {
  int64_t q = int64_t(c_.heads) * c_.head_dim, kv = int64_t(c_.kv_heads) * c_.head_dim;
  std::vector<HostTensor> parts(3);
  KVASIR_ASSIGN(parts[0], w_.get(name(layer, "attn_q"), q, c_.hidden));
  KVASIR_ASSIGN(parts[1], w_.get(name(layer, "attn_k"), kv, c_.hidden));
  KVASIR_ASSIGN(parts[2], w_.get(name(layer, "attn_v"), kv, c_.hidden));
  return ops_.load_matrix(w_, parts, Shard::rows);
}

Result<Matrix> LayerLoader::attention_out(int32_t layer) {
  KVASIR_ASSIGN(HostTensor t, w_.get(name(layer, "attn_output"), c_.hidden, int64_t(c_.heads) * c_.head_dim));
  return ops_.load_matrix(w_, {&t, 1}, Shard::cols);
}

Result<Matrix> LayerLoader::gate_up(int32_t layer) {
  std::vector<HostTensor> parts(2);
  KVASIR_ASSIGN(parts[0], w_.get(name(layer, "ffn_gate"), c_.ffn, c_.hidden));
  KVASIR_ASSIGN(parts[1], w_.get(name(layer, "ffn_up"), c_.ffn, c_.hidden));
  return ops_.load_matrix(w_, parts, Shard::rows);
}

Result<Matrix> LayerLoader::down(int32_t layer) {
  KVASIR_ASSIGN(HostTensor t, w_.get(name(layer, "ffn_down"), c_.hidden, c_.ffn));
  return ops_.load_matrix(w_, {&t, 1}, Shard::cols);
}

Result<Ends> load_ends(const ModelConfig& c, Weights& w, Ops& ops) {
  Ends e;
  KVASIR_ASSIGN(HostTensor embedding, w.get("token_embd.weight", c.vocab, c.hidden));
  KVASIR_ASSIGN(e.embedding, ops.load_matrix(w, {&embedding, 1}, Shard::whole));
  e.head = e.embedding;
  if (w.has("output.weight")) {
    KVASIR_ASSIGN(HostTensor head, w.get("output.weight", c.vocab, c.hidden));
    KVASIR_ASSIGN(e.head, ops.load_matrix(w, {&head, 1}, Shard::rows));
  }
  KVASIR_ASSIGN(HostTensor norm, w.get("output_norm.weight", 1, c.hidden));
  KVASIR_ASSIGN(e.norm, ops.load_vector(w, norm, c.norm_shift));
  return e;
}

Result<Buffers> make_buffers(const ModelConfig& c, Ops& ops) {
  Buffers b;
  int64_t q = int64_t(c.heads) * c.head_dim, kv = int64_t(c.kv_heads) * c.head_dim;
  KVASIR_ASSIGN(b.x, ops.make_buffer(c.hidden, false));
  KVASIR_ASSIGN(b.h, ops.make_buffer(c.hidden, false));
  KVASIR_ASSIGN(b.qkv, ops.make_buffer(q + 2 * kv, false, Shard::rows));
  KVASIR_ASSIGN(b.attended, ops.make_buffer(q, false, Shard::rows));
  KVASIR_ASSIGN(b.gate_up, ops.make_buffer(2 * int64_t(c.ffn), false, Shard::rows));
  KVASIR_ASSIGN(b.ffn, ops.make_buffer(c.ffn, false, Shard::rows));
  KVASIR_ASSIGN(b.last, ops.make_buffer(c.hidden, true));
  KVASIR_ASSIGN(b.logits, ops.make_buffer(c.vocab, true));
  return b;
}

Result<attention::Attributes> attention_of(const ModelConfig& c, const attention::RopeConfig& rope,
                                           const std::vector<float>& divisors, int32_t window) {
  attention::Attributes a;
  a.num_heads = c.heads;
  a.num_kv_heads = c.kv_heads;
  a.head_dim = c.head_dim;
  a.packed_qkv = true;
  a.window = window;
  // Scores are divided by q_scaling * sqrt(head_dim).
  if (c.query_scale > 0) a.q_scaling = 1.0f / (c.query_scale * std::sqrt(float(c.head_dim)));
  KVASIR_ASSIGN(a.rope, attention::rope_frequencies(rope));
  for (size_t i = 0; i < divisors.size(); ++i) a.rope.inv_freq[i] /= divisors[i];
  return a;
}

Result<Buffer> finish(const ModelConfig& c, Ops& ops, const Ends& ends, const Buffers& b, int64_t first,
                      int64_t count) {
  KVASIR_TRY(ops.take_logit_rows(b.x, first, count, b.last));
  KVASIR_TRY(ops.norm(b.last, ends.norm, c.norm_eps, b.last));
  KVASIR_TRY(ops.linear(b.last, ends.head, b.logits));
  return b.logits;
}

}  // namespace kvasir::model
