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

Result<Matrix> LayerLoader::stacked(int32_t layer, const std::string& fused, std::span<const Part> parts, int64_t cols,
                                    bool bias, bool by_group) {
  int64_t rows = 0;
  for (const Part& p : parts) rows += p.rows;
  const bool whole = w_.has(of(layer, cat(fused, ".weight")));
  auto load = [&](const char* ending, bool is_matrix) -> Result<std::vector<HostTensor>> {
    std::vector<HostTensor> out;
    auto add = [&](const std::string& name, int64_t n) -> Status {
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

Result<Mlp> LayerLoader::mlp(int32_t layer, int64_t ffn, std::string_view ending) {
  const std::string gate = cat("ffn_gate", ending), up = cat("ffn_up", ending);
  Mlp out;
  if (c_.gated) {
    const Part parts[] = {{gate, ffn}, {up, ffn}};
    KVASIR_ASSIGN(out.up, stacked(layer, cat("ffn_gate_up", ending), parts, c_.hidden, c_.mlp_bias, false));
  } else {
    KVASIR_ASSIGN(out.up, matrix(of(layer, up), ffn, c_.hidden, Shard::rows, c_.mlp_bias));
  }
  KVASIR_ASSIGN(out.down, matrix(of(layer, cat("ffn_down", ending)), c_.hidden, ffn, Shard::cols, c_.mlp_bias));
  return out;
}

Result<Experts> LayerLoader::experts(int32_t layer) {
  const ExpertsConfig& e = c_.experts;
  Experts out{.routing = e.routing, .activation = c_.activation};
  KVASIR_ASSIGN(out.router,
                matrix(of(layer, "ffn_gate_inp"), e.routing.experts, c_.hidden, Shard::whole, e.router_bias));
  if (e.routing.corrected) {
    KVASIR_ASSIGN(out.correction, vector(of(layer, "exp_probs_b.bias"), e.routing.experts));
  }
  for (int32_t i = 0; i < e.routing.experts; ++i) {
    KVASIR_ASSIGN(Mlp one, expert(layer, i));
    out.mlps.push_back(one);
  }
  return out;
}

Result<Mlp> LayerLoader::expert(int32_t layer, int32_t i) {
  const int64_t ffn = c_.experts.ffn;
  std::vector<HostTensor> up;
  auto add = [&](std::string_view name, int64_t rows) -> Status {
    KVASIR_ASSIGN(HostTensor t, of_expert(layer, name, i, rows, c_.hidden));
    up.push_back(std::move(t));
    return {};
  };
  if (w_.has(of(layer, "ffn_gate_up_exps.weight"))) {
    KVASIR_TRY(add("ffn_gate_up", 2 * ffn));
  } else {
    KVASIR_TRY(add("ffn_gate", ffn));
    KVASIR_TRY(add("ffn_up", ffn));
  }
  Mlp out;
  KVASIR_ASSIGN(out.up, ops_.load_matrix(w_, up, Shard::rows));
  KVASIR_ASSIGN(HostTensor down, of_expert(layer, "ffn_down", i, c_.hidden, ffn));
  KVASIR_ASSIGN(out.down, ops_.load_matrix(w_, {&down, 1}, Shard::cols));
  return out;
}

// Its part of one tensor that holds all experts', or a tensor of its own.
Result<HostTensor> LayerLoader::of_expert(int32_t layer, std::string_view name, int32_t expert, int64_t rows,
                                          int64_t cols) {
  const std::string all = of(layer, cat(name, "_exps.weight"));
  if (!w_.has(all)) return w_.get(of(layer, cat(name, ".", expert, ".weight")), rows, cols);
  KVASIR_ASSIGN(HostTensor t, w_.get(all, c_.experts.routing.experts * rows, cols));
  t.bytes /= c_.experts.routing.experts;
  t.data += expert * t.bytes;
  t.rows = rows;
  return t;
}

}  // namespace kvasir::model
