#include "model/arch/layer_loader.h"

#include <cstring>

namespace kvasir::model {

Result<Vector> LayerLoader::vector(const std::string& name, int64_t size, float shift, float scale) {
  KVASIR_ASSIGN(HostTensor t, w_.get(name, 1, size));
  return ops_.load_vector(w_, {&t, 1}, shift, scale);
}

Result<Matrix> LayerLoader::matrix(const std::string& name, int64_t rows, int64_t cols, Shard shard, bool bias) {
  KVASIR_ASSIGN(HostTensor t, w_.get(name + ".weight", rows, cols));
  KVASIR_ASSIGN(Matrix m, ops_.load_matrix(w_, {&t, 1}, shard));
  if (bias) {
    KVASIR_ASSIGN(Vector b, vector(name + ".bias", rows));
    ops_.set_bias(m, b);
  }
  return m;
}

// Rows that lie by key/value head (its queries, its key, its value) as all queries, all keys, all values.
HostTensor LayerLoader::straightened(HostTensor t) const {
  const int64_t heads = c_.heads, kv = c_.kv_heads, group = heads / kv, all = heads + 2 * kv;
  const int64_t bytes = t.bytes / all;  // of a head
  std::shared_ptr<uint8_t[]> to(new uint8_t[size_t(t.bytes)]);
  for (int64_t h = 0; h < all; ++h) {
    const int64_t from = h < heads        ? h / group * (group + 2) + h % group
                         : h < heads + kv ? (h - heads) * (group + 2) + group
                                          : (h - heads - kv) * (group + 2) + group + 1;
    std::memcpy(to.get() + h * bytes, t.data + from * bytes, size_t(bytes));
  }
  t.data = to.get();
  t.owned = std::move(to);
  return t;
}

Result<Matrix> LayerLoader::stacked(int32_t layer, const char* fused, std::span<const Part> parts, int64_t cols,
                                    bool bias, bool by_group) {
  int64_t rows = 0;
  for (const Part& p : parts) rows += p.rows;
  const bool whole = w_.has(of(layer, cat(fused, ".weight")));
  auto load = [&](const char* ending, bool is_matrix) -> Result<std::vector<HostTensor>> {
    std::vector<HostTensor> out;
    auto add = [&](const char* name, int64_t n) -> Status {
      KVASIR_ASSIGN(HostTensor t, is_matrix ? w_.get(of(layer, cat(name, ending)), n, cols)
                                            : w_.get(of(layer, cat(name, ending)), 1, n));
      out.push_back(whole && by_group ? straightened(std::move(t)) : std::move(t));
      return {};
    };
    if (whole) {
      KVASIR_TRY(add(fused, rows));
    } else {
      for (const Part& p : parts) KVASIR_TRY(add(p.name, p.rows));
    }
    return out;
  };
  KVASIR_ASSIGN(auto weights, load(".weight", true));
  KVASIR_ASSIGN(Matrix m, ops_.load_matrix(w_, weights, Shard::rows));
  if (bias) {
    KVASIR_ASSIGN(auto biases, load(".bias", false));
    KVASIR_ASSIGN(Vector b, ops_.load_vector(w_, biases, 0, 1));
    ops_.set_bias(m, b);
  }
  return m;
}

Result<Matrix> LayerLoader::qkv(int32_t layer) {
  const int64_t q = int64_t(c_.heads) * c_.head_dim, kv = int64_t(c_.kv_heads) * c_.head_dim;
  const Part parts[] = {{"attn_q", q}, {"attn_k", kv}, {"attn_v", kv}};
  return stacked(layer, "attn_qkv", parts, c_.hidden, c_.qkv_bias, c_.qkv_by_group);
}

Result<Matrix> LayerLoader::attention_out(int32_t layer) {
  return matrix(of(layer, "attn_output"), c_.hidden, int64_t(c_.heads) * c_.head_dim, Shard::cols, c_.out_bias);
}

Result<Matrix> LayerLoader::up(int32_t layer) {
  if (!c_.gated) return matrix(of(layer, "ffn_up"), c_.ffn, c_.hidden, Shard::rows, c_.mlp_bias);
  const Part parts[] = {{"ffn_gate", c_.ffn}, {"ffn_up", c_.ffn}};
  return stacked(layer, "ffn_gate_up", parts, c_.hidden, c_.mlp_bias, false);
}

Result<Matrix> LayerLoader::down(int32_t layer) {
  return matrix(of(layer, "ffn_down"), c_.hidden, c_.ffn, Shard::cols, c_.mlp_bias);
}

}  // namespace kvasir::model
