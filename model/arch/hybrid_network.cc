#include "model/arch/hybrid_network.h"

#include <utility>

#include "core/cat.h"
#include "model/arch/layer_loader.h"
#include "model/formats/slices.h"

namespace kvasir::model {
namespace {

class HybridDecoder final : public Decoder {
 public:
  using Decoder::Decoder;
  Status load(Weights& w, const LoadProgress& progress);
  // The names of its projections mean other things in its two kinds of layers.
  std::vector<Projection> projections() const override { return {}; }

 protected:
  Status load_attention(int32_t i, LayerLoader& in, DecoderLayer& l) override;
  Result<Buffer> attend(const DecoderLayer& l, int32_t i, Buffer in) override;

 private:
  struct Mixer {
    Matrix gate;        // of full attention: [heads * head_dim, hidden]
    Matrix qkvz, ba;    // of linear attention: [channels + values, hidden]; beta and alpha: [2 * value heads, hidden]
    int32_t rule = -1;  // as Ops knows it
  };
  Status load_gated(int32_t i, LayerLoader& in, DecoderLayer& l, Mixer& m);
  Status load_linear(int32_t i, LayerLoader& in, DecoderLayer& l, Mixer& m);
  // One tensor in which the rows of each key head lie together, in parts of so many rows, or several that are stacked.
  Result<Matrix> by_key_head(int32_t i, const char* fused, std::vector<int64_t> parts,
                             const std::vector<std::pair<const char*, int64_t>>& apart);

  Weights* weights_ = nullptr;  // while loading
  std::vector<Mixer> mixers_;
  Buffer gate_;        // [T, heads * head_dim]
  Buffer mixed_, ba_;  // [T, channels + values], [T, 2 * value heads]
  Buffer linear_out_;  // [T, values]
};

Status HybridDecoder::load(Weights& w, const LoadProgress& progress) {
  weights_ = &w;
  mixers_.resize(size_t(c_.layers));
  KVASIR_TRY(Decoder::load(w, progress));
  const LinearConfig& linear = c_.linear;
  KVASIR_ASSIGN(gate_, ops_.make_buffer(attended_.cols, false));
  KVASIR_ASSIGN(mixed_, ops_.make_buffer(linear.channels() + linear.values(), false));
  KVASIR_ASSIGN(ba_, ops_.make_buffer(2 * int64_t(linear.value_heads), false));
  KVASIR_ASSIGN(linear_out_, ops_.make_buffer(linear.values(), false));
  weights_ = nullptr;
  return {};
}

Status HybridDecoder::load_attention(int32_t i, LayerLoader& in, DecoderLayer& l) {
  Mixer& m = mixers_[size_t(i)];
  return c_.is_linear(i) ? load_linear(i, in, l, m) : load_gated(i, in, l, m);
}

// The rows of attn_q are by turns a head's queries and its gates.
Status HybridDecoder::load_gated(int32_t i, LayerLoader& in, DecoderLayer& l, Mixer& m) {
  Weights& w = *weights_;
  const int64_t size = c_.head_dim, q = c_.heads * size, kv = c_.kv_heads * size;
  KVASIR_ASSIGN(l.attention, attention_kind(c_.kind(i)));
  KVASIR_ASSIGN(HostTensor both, w.get(in.of(i, "attn_q.weight"), 2 * q, c_.hidden));
  if (!both.seeded)
    both = reordered(std::move(both), [=](int64_t row) {
      const bool gate = row >= q;
      const int64_t of = gate ? row - q : row;
      return of / size * 2 * size + (gate ? size : 0) + of % size;
    });
  const HostTensor gates = rows_of(both, q, q);
  KVASIR_ASSIGN(m.gate, ops_.load_matrix(w, {&gates, 1}, Shard::rows));
  std::vector<HostTensor> parts{rows_of(both, 0, q)};
  for (const char* name : {"attn_k.weight", "attn_v.weight"}) {
    KVASIR_ASSIGN(parts.emplace_back(), w.get(in.of(i, name), kv, c_.hidden));
  }
  KVASIR_ASSIGN(l.qkv, ops_.load_matrix(w, parts, Shard::rows));
  KVASIR_TRY(load_head_norms(i, in, l));
  KVASIR_ASSIGN(l.attn_out, in.attention_out(i));
  return {};
}

Result<Matrix> HybridDecoder::by_key_head(int32_t i, const char* fused, std::vector<int64_t> parts,
                                          const std::vector<std::pair<const char*, int64_t>>& apart) {
  Weights& w = *weights_;
  std::vector<HostTensor> tensors;
  const std::string whole = LayerLoader::of(i, fused);
  if (!w.has(whole)) {
    for (const auto& [name, rows] : apart) {
      KVASIR_ASSIGN(tensors.emplace_back(), w.get(LayerLoader::of(i, name), rows, c_.hidden));
    }
    return ops_.load_matrix(w, tensors, Shard::rows);
  }
  const int64_t heads = c_.linear.key_heads;
  int64_t each = 0;
  for (int64_t n : parts) each += n;
  KVASIR_ASSIGN(tensors.emplace_back(), w.get(whole, each * heads, c_.hidden));
  tensors[0] = reordered(std::move(tensors[0]), [=](int64_t row) {
    int64_t before = 0;
    for (int64_t n : parts) {
      if (row < n * heads) return row / n * each + before + row % n;
      row -= n * heads, before += n;
    }
    return row;
  });
  return ops_.load_matrix(w, tensors, Shard::rows);
}

Status HybridDecoder::load_linear(int32_t i, LayerLoader& in, DecoderLayer& l, Mixer& m) {
  Weights& w = *weights_;
  const LinearConfig& c = c_.linear;
  const int64_t with = c.value_heads / c.key_heads;
  KVASIR_ASSIGN(m.qkvz, by_key_head(i, "ssm_in.weight", {c.key_dim, c.key_dim, with * c.value_dim, with * c.value_dim},
                                    {{"attn_qkv.weight", c.channels()}, {"attn_gate.weight", c.values()}}));
  KVASIR_ASSIGN(m.ba, by_key_head(i, "ssm_ba.weight", {with, with},
                                  {{"ssm_beta.weight", c.value_heads}, {"ssm_alpha.weight", c.value_heads}}));
  DeltaRule rule;
  rule.config = c;
  KVASIR_ASSIGN(HostTensor conv, w.get(in.of(i, "ssm_conv1d.weight"), c.channels(), c.taps));
  conv.cols *= std::exchange(conv.rows, 1);
  KVASIR_ASSIGN(rule.conv, ops_.load_vector(w, {&conv, 1}, 0, 1));
  KVASIR_ASSIGN(rule.decay, in.vector(in.of(i, "ssm_a.weight"), c.value_heads));
  rule.log_decay = !c_.from_gguf;
  KVASIR_ASSIGN(rule.decay_bias, in.vector(in.of(i, "ssm_dt.bias"), c.value_heads));
  KVASIR_ASSIGN(rule.norm, in.vector(in.of(i, "ssm_norm.weight"), c.value_dim));
  rule.eps = c_.norm_eps;
  KVASIR_ASSIGN(m.rule, ops_.add_delta_rule(rule));
  KVASIR_ASSIGN(l.attn_out, in.matrix(in.of(i, "ssm_out"), c_.hidden, c.values(), Shard::cols, false));
  return {};
}

Result<Buffer> HybridDecoder::attend(const DecoderLayer& l, int32_t i, Buffer in) {
  const Mixer& m = mixers_[size_t(i)];
  if (m.rule >= 0) {
    KVASIR_TRY(ops_.linear(in, m.qkvz, mixed_));
    KVASIR_TRY(ops_.linear(in, m.ba, ba_));
    KVASIR_TRY(ops_.delta_rule(m.rule, mixed_, ba_, linear_out_));
    return linear_out_;
  }
  KVASIR_TRY(ops_.linear(in, l.qkv, qkv_));
  KVASIR_TRY(ops_.linear(in, m.gate, gate_));
  KVASIR_TRY(attend_normed(l, i));
  KVASIR_TRY(ops_.sigmoid_gates(attended_, gate_));
  return attended_;
}

}  // namespace

Result<std::unique_ptr<Network>> load_hybrid(const ModelConfig& config, Weights& weights, Ops& ops,
                                             const LoadProgress& progress) {
  auto net = std::make_unique<HybridDecoder>(config, ops);
  KVASIR_TRY(net->load(weights, progress));
  return std::unique_ptr<Network>(std::move(net));
}

}  // namespace kvasir::model
