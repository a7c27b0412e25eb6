#include "model/arch/layer_loader.h"

#include <cstring>
#include <optional>

#include "model/formats/slices.h"

namespace kvasir::model {

Result<Vector> LayerLoader::vector(const std::string& name, int64_t size, float shift, float scale,
                                   const Share& share) {
  KVASIR_ASSIGN(HostTensor t, w_.get(name, 1, share.whole(size)));
  if (share.split()) {
    KVASIR_ASSIGN(t, columns_of(t, share));
  }
  return ops_.load_vector(w_, {&t, 1}, shift, scale);
}

Result<Matrix> LayerLoader::matrix(const std::string& name, int64_t rows, int64_t cols, Shard shard, bool bias,
                                   const Share& share) {
  const bool by_rows = shard == Shard::rows, by_cols = shard == Shard::cols;
  KVASIR_ASSIGN(HostTensor t,
                w_.get(name + ".weight", by_rows ? share.whole(rows) : rows, by_cols ? share.whole(cols) : cols));
  if (share.split() && by_rows) t = rows_of(t, share.first, share.count);
  if (share.split() && by_cols) {
    KVASIR_ASSIGN(t, columns_of(t, share));
  }
  KVASIR_ASSIGN(Matrix m, ops_.load_matrix(w_, {&t, 1}, shard));
  if (bias) {
    KVASIR_ASSIGN(Vector b, vector(name + ".bias", rows, 0, 1, by_rows ? share : Share()));
    if (!by_cols || c_.part.first()) ops_.set_bias(m, b);  // once in the sum over ranks
  }
  return m;
}

int64_t grouped_head(const ModelConfig& c, int64_t h) { return grouped_head(c.heads, c.kv_heads, h); }

int64_t grouped_head(int64_t heads, int64_t kv, int64_t h) {
  const int64_t group = heads / kv;
  return h < heads        ? h / group * (group + 2) + h % group
         : h < heads + kv ? (h - heads) * (group + 2) + group
                          : (h - heads - kv) * (group + 2) + group + 1;
}

// Rows that lie by key/value head (its queries, its key, its value) as all queries, all keys, all values.
HostTensor LayerLoader::straightened(HostTensor t) const {
  const int64_t heads = c_.part.heads.whole(c_.heads), kv = c_.part.kv_heads.whole(c_.kv_heads);
  const int64_t size = (t.rows > 1 ? t.rows : t.cols) / (heads + 2 * kv);  // of a head
  return reordered(std::move(t), [=](int64_t i) { return grouped_head(heads, kv, i / size) * size + i % size; });
}

Result<Matrix> LayerLoader::stacked(int32_t layer, const std::string& fused, std::span<const Part> parts, int64_t cols,
                                    bool bias, bool by_group) {
  int64_t rows = 0;  // of all ranks
  for (const Part& p : parts) rows += p.share.whole(p.rows);
  const bool whole = w_.has(of(layer, cat(fused, ".weight")));
  auto load = [&](const char* ending, bool is_matrix) -> Result<std::vector<HostTensor>> {
    std::vector<HostTensor> out;
    auto get = [&](const std::string& name, int64_t n) {
      return is_matrix ? w_.get(of(layer, cat(name, ending)), n, cols) : w_.get(of(layer, cat(name, ending)), 1, n);
    };
    // What this rank has of a part that begins at row `at` of a tensor.
    auto add = [&](const HostTensor& t, int64_t at, const Share& share) -> Status {
      const int64_t first = at + share.first, all = is_matrix ? t.rows : t.cols;
      if (is_matrix) return out.push_back(rows_of(t, first, share.count)), Status();
      KVASIR_ASSIGN(out.emplace_back(), columns_of(t, {first, share.count, all}));
      return {};
    };
    std::optional<HostTensor> fused_tensor;
    if (whole) {
      KVASIR_ASSIGN(fused_tensor, get(fused, rows));
      if (by_group) fused_tensor = straightened(std::move(*fused_tensor));
      if (!parts[0].share.split()) return out.push_back(std::move(*fused_tensor)), out;
    }
    int64_t at = 0;
    for (const Part& p : parts) {
      if (whole) {
        KVASIR_TRY(add(*fused_tensor, at, p.share));
        at += p.share.all;
        continue;
      }
      KVASIR_ASSIGN(HostTensor t, get(p.name, p.share.whole(p.rows)));
      if (!p.share.split())
        out.push_back(std::move(t));
      else
        KVASIR_TRY(add(t, 0, p.share));
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
  const int64_t head = c_.head_dim_of(layer), q = c_.heads * head, kv = c_.kv_heads_of(layer) * head;
  if (c_.cache_layer(layer) != layer) return matrix(of(layer, "attn_q"), q, c_.hidden, Shard::rows, c_.qkv_bias);
  const bool same = c_.key_is_value && !c_.windowed(layer);
  const Share of_q = c_.part.heads.times(head), of_kv = c_.part.kv_heads.times(head);
  const Part parts[] = {{"attn_q", q, of_q}, {"attn_k", kv, of_kv}, {same ? "attn_k" : "attn_v", kv, of_kv}};
  return stacked(layer, "attn_qkv", parts, c_.qkv_input > 0 ? c_.qkv_input : c_.hidden, c_.qkv_bias, c_.qkv_by_group);
}

Result<Matrix> LayerLoader::attention_out(int32_t layer) {
  const int64_t head = c_.latent.on() ? c_.latent.value : c_.head_dim_of(layer);
  return matrix(of(layer, "attn_output"), c_.hidden, c_.heads * head, Shard::cols, c_.out_bias,
                c_.part.heads.times(head));
}

Result<Mlp> LayerLoader::mlp(int32_t layer, int64_t ffn, const Share& share, std::string_view ending) {
  const std::string gate = cat("ffn_gate", ending), up = cat("ffn_up", ending);
  Mlp out;
  if (c_.gated) {
    const Part parts[] = {{gate, ffn, share}, {up, ffn, share}};
    KVASIR_ASSIGN(out.up, stacked(layer, cat("ffn_gate_up", ending), parts, c_.hidden, c_.mlp_bias, false));
  } else {
    KVASIR_ASSIGN(out.up, matrix(of(layer, up), ffn, c_.hidden, Shard::rows, c_.mlp_bias, share));
  }
  KVASIR_ASSIGN(out.down, matrix(of(layer, cat("ffn_down", ending)), c_.hidden, ffn, Shard::cols, c_.mlp_bias, share));
  return out;
}

// One of the matrices of a layer's experts: a tensor of its own for each (blk.3.ffn_up.17), one that holds them all
// (ffn_up_exps), or that with inputs and outputs exchanged (ffn_up_exps_t).
class LayerLoader::OfExperts {
 public:
  OfExperts(LayerLoader& in, int32_t layer, std::string_view name, int64_t rows, int64_t cols)
      : w_(in.w_), count_(in.c_.experts.routing.experts), rows_(rows), cols_(cols), name_(of(layer, name)) {}

  bool together() const { return w_.has(cat(name_, "_exps.weight")) || transposed(); }
  Result<HostTensor> get(int32_t expert) {
    if (!together()) return w_.get(cat(name_, ".", expert, ".weight"), rows_, cols_);
    if (!all_) {
      KVASIR_ASSIGN(all_, transposed() ? w_.get(cat(name_, "_exps_t.weight"), count_ * cols_, rows_)
                                       : w_.get(cat(name_, "_exps.weight"), count_ * rows_, cols_));
    }
    HostTensor t = part(*all_, expert, rows_);
    return transposed() ? exchanged(std::move(t)) : t;
  }
  // One that another rank has: all ranks read what there is in the same order.
  Status pass(int32_t expert) {
    if (together()) return {};
    KVASIR_ASSIGN(const HostTensor t, get(expert));
    w_.release(t);
    return {};
  }
  // A row an expert.
  Result<HostTensor> bias(int32_t expert) {
    if (!biases_) {
      KVASIR_ASSIGN(biases_, w_.get(cat(name_, "_exps.bias"), count_, rows_));
    }
    HostTensor t = part(*biases_, expert, 1);
    t.cols = rows_;
    t.name.clear();  // the others are read yet, and there is little to release
    return t;
  }

 private:
  bool transposed() const { return w_.has(cat(name_, "_exps_t.weight")); }
  HostTensor part(HostTensor t, int32_t expert, int64_t rows) const {
    t.bytes /= count_, t.data += expert * t.bytes, t.rows = rows, t.cols = cols_;
    if (const auto scales = std::ssize(t.row_scales) / count_; scales > 0) {
      const auto first = t.row_scales.begin() + expert * scales;
      t.row_scales = std::vector<float>(first, first + scales);
    }
    return t;
  }
  HostTensor exchanged(HostTensor t) const {
    const int64_t each = t.bytes / (rows_ * cols_);
    std::shared_ptr<uint8_t[]> to(new uint8_t[size_t(t.bytes)]);
    for (int64_t c = 0; c < cols_; ++c)
      for (int64_t r = 0; r < rows_; ++r)
        std::memcpy(to.get() + (r * cols_ + c) * each, t.data + (c * rows_ + r) * each, size_t(each));
    t.data = to.get();
    t.owned = std::move(to);
    return t;
  }

  Weights& w_;
  int64_t count_, rows_, cols_;
  std::string name_;
  std::optional<HostTensor> all_, biases_;
};

namespace {

// Rows (or numbers, of a vector) that are by turns a gate's and what it opens: all gates first.
HostTensor gates_first(HostTensor t) {
  const int64_t half = (t.rows > 1 ? t.rows : t.cols) / 2;
  return reordered(std::move(t), [=](int64_t i) { return i < half ? 2 * i : 2 * (i - half) + 1; });
}

}  // namespace

Result<Experts> LayerLoader::experts(int32_t layer) {
  const ExpertsConfig& e = c_.experts;
  Experts out{.routing = e.routing, .activation = c_.activation, .limit = e.limit, .slope = e.slope};
  KVASIR_ASSIGN(out.router,
                matrix(of(layer, "ffn_gate_inp"), e.routing.experts, c_.hidden, Shard::whole, e.router_bias));
  if (e.routing.corrected) {
    KVASIR_ASSIGN(out.correction, vector(of(layer, "exp_probs_b.bias"), e.routing.experts));
  }
  if (e.scaled) {
    KVASIR_ASSIGN(out.scales, vector(of(layer, "ffn_down_exps.scale"), e.routing.experts));
  }
  OfExperts fused(*this, layer, "ffn_gate_up", 2 * e.ffn, c_.hidden), gate(*this, layer, "ffn_gate", e.ffn, c_.hidden),
      up(*this, layer, "ffn_up", e.ffn, c_.hidden), down(*this, layer, "ffn_down", c_.hidden, e.ffn);
  const bool whole = fused.together();
  auto add = [&](OfExperts& from, int32_t i, Result<HostTensor> (OfExperts::*get)(int32_t),
                 std::vector<HostTensor>* to) -> Status {
    KVASIR_ASSIGN(HostTensor t, (from.*get)(i));
    to->push_back(whole && e.by_turns && &from == &fused ? gates_first(std::move(t)) : std::move(t));
    return {};
  };
  auto load = [&](int32_t i, std::initializer_list<OfExperts*> from) -> Result<Matrix> {
    std::vector<HostTensor> weights, biases;
    if (const Share& own = c_.part.experts; own.split() && (i < own.first || i >= own.first + own.count)) {
      for (OfExperts* f : from) KVASIR_TRY(f->pass(i));
      return Matrix();
    }
    for (OfExperts* f : from) KVASIR_TRY(add(*f, i, &OfExperts::get, &weights));
    KVASIR_ASSIGN(Matrix m, ops_.load_matrix(w_, weights, Shard::whole));
    if (!e.bias) return m;
    for (OfExperts* f : from) KVASIR_TRY(add(*f, i, &OfExperts::bias, &biases));
    KVASIR_ASSIGN(Vector b, ops_.load_vector(w_, biases, 0, 1));
    ops_.set_bias(m, b);
    return m;
  };
  for (int32_t i = 0; i < e.routing.experts; ++i) {
    Mlp& mlp = out.mlps.emplace_back();
    KVASIR_ASSIGN(mlp.up, whole ? load(i, {&fused}) : load(i, {&gate, &up}));
    KVASIR_ASSIGN(mlp.down, load(i, {&down}));
  }
  return out;
}

}  // namespace kvasir::model
