// The device operations on the host: float32 activations between them, weights packed for SIMD, integers
// inside a product (float32 when `precise`).
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attention/backend.h"
#include "core/thread_pool.h"
#include "kvcache/form.h"
#include "model/cpu/adapter.h"
#include "model/cpu/kernels.h"
#include "model/cpu/link.h"
#include "model/ops.h"
#include "model/runner.h"
#include "model/sides.h"

namespace kvasir::model::cpu {

struct CpuOptions {
  bool precise = false;
  // Where there is one nothing is packed: it counts the bytes that a matrix of these parts would take (footprint.h).
  std::function<int64_t(std::span<const HostTensor> parts)> measure;
  int64_t max_batch = 0, max_tokens = 0, max_kvlen = 0;
  int64_t max_logit_rows = 0;  // of one take_logit_rows()
  int32_t page_size = 16;
  kvcache::IndexMode index_mode = kvcache::IndexMode::page_table;
  const attention::Backend* attention = nullptr;
  RunnerOptions runner;  // what it says of attention
  RankPart part;
  Link* link = nullptr;  // to the other ranks; null: there are none
};

class CpuOps final : public Ops {
 public:
  CpuOps(const CpuOptions& options, ThreadPool& pool, const Kernels& kernels)
      : options_(options), pool_(pool), kernels_(kernels) {}

  // A packed step whose token ids are all real. The batch outlives the step.
  Status begin(const Batch& batch, const std::vector<int32_t>& tokens);
  // The caches exist: attention is set up for them. Once, before the first step. With two, the second is that of
  // the kinds that have a window, with pages of its own where they lie `apart`; `places` says which layer of its cache
  // each layer of the network is.
  // `scales`: of each layer of the network, where a cache has one for all its elements; empty: 1.
  Status set_caches(std::vector<kvcache::CacheView> caches, bool apart, std::vector<int32_t> places,
                    std::vector<kvcache::TensorScales> scales);
  float* data(Buffer b) { return buffers_[size_t(b.id)].data.get(); }
  // Room for the states of so many sequences, once; and a copy of one.
  Status set_states(int64_t slots);
  void copy_state(int32_t from, int32_t to);
  // Another's weight, with its bias, as one of these too; the other must outlive them.
  Matrix borrow(const CpuOps& from, Matrix weight);
  // Where hidden states lie, `cols` of each place.
  void hand_over(std::shared_ptr<float[]> states, int64_t cols) { states_ = std::move(states), state_cols_ = cols; }
  int64_t weight_bytes() const { return measured_ + int64_t(arena_.used()); }
  // Of vectors, and of the buffers once a step has been as large as it may.
  int64_t vector_bytes() const;
  int64_t buffer_bytes() const;
  ExpertLoad expert_load() const;

  Result<Matrix> load_matrix(Weights& source, std::span<const HostTensor> parts, Shard shard) override;
  Result<Vector> load_vector(Weights& source, std::span<const HostTensor> parts, float shift, float scale) override;
  void set_bias(Matrix weight, Vector bias) override;
  Result<Buffer> make_buffer(int64_t cols, bool logit_rows, Shard shard) override;
  Result<int32_t> add_attention(const attention::Attributes& attributes) override;
  Result<int32_t> add_attention_of(Side side, const attention::Attributes& attributes) override;
  Result<int32_t> add_experts(Experts experts) override;
  Result<AdapterPtr> load_adapter(std::span<const LowRank> changes, int64_t room) override;
  Result<int32_t> add_delta_rule(const DeltaRule& rule) override;

  Status embed(Matrix table, float scale, Buffer out) override;
  Status add_row(Matrix table, RowOf which, int64_t shift, Buffer out) override;
  Status norm(Buffer in, Vector weight, float eps, Buffer out) override { return norm(in, weight, eps, false, out); }
  Status add_norm(Buffer in, Vector weight, float eps, Buffer out) override { return norm(in, weight, eps, true, out); }
  Status layer_norm(Buffer in, Vector weight, Vector bias, float eps, Buffer out) override;
  Status qk_norm(Buffer qkv, int64_t q_cols, Vector q, int64_t kv_cols, Vector k, float eps) override;
  Status qk_norm_over_ranks(Buffer qkv, int64_t q_cols, Vector q, int64_t kv_cols, Vector k, float eps) override;
  Status scale_by_position(Buffer in_out, int64_t cols, float slope, int64_t unit) override;
  Status linear(Buffer in, Matrix weight, Buffer out) override { return linear(in, weight, false, out); }
  Status add_linear(Buffer in, Matrix weight, Buffer out) override { return linear(in, weight, true, out); }
  Status glu(Activation activation, Buffer in, Buffer out) override;
  Status linear_glu(Buffer in, Matrix weight, Activation activation, Buffer between, Buffer out) override;
  Status activate(Activation activation, Buffer in, Buffer out) override;
  Status attend(const Attend& how, Buffer qkv, Buffer out) override;
  Status takes_uneven_layers() const override { return {}; }
  Status linear_heads(Buffer in, Pieces from, const HeadMatrices& of, Buffer out, Pieces to) override;
  Status copy_pieces(Buffer in, Pieces from, Buffer out, Pieces to, int64_t cols, int64_t count) override;
  Status norm_pieces(Buffer in_out, int64_t first, int64_t cols, Vector weight, float eps) override;
  Status add(Buffer in, Buffer out) override;
  Status scale(Buffer in_out, float factor) override;
  Status gate(Activation activation, Buffer in_out, Buffer by, int64_t first) override;
  Status moe(Buffer in, int32_t experts, Buffer out, Buffer routed) override;
  Status sigmoid_gate(Buffer in, Vector gate, Buffer in_out) override;
  Status sigmoid_gates(Buffer in_out, Buffer gate) override;
  Status delta_rule(int32_t rule, Buffer in, Buffer betas, Buffer out) override;
  Status keep(Buffer in, int64_t first, float factor) override;
  int64_t given_cols() const override { return batch_->given_cols; }
  Status take_given(Buffer out) override;
  Status place(Buffer in, int64_t first, Buffer out) override;
  Result<int64_t> turn_to(Side side) override;
  Status store(const Attend& how, Buffer keys, Buffer values) override;
  Status softcap(Buffer in_out, float cap) override;
  Status take_logit_rows(Buffer in, int64_t first, int64_t count, Buffer out) override;
  Result<Buffer> gather(Buffer logits) override;

 private:
  struct Unmap {
    size_t bytes;
    void operator()(float* p) const;
  };
  struct Room {
    std::unique_ptr<float, Unmap> data;
    int64_t cols;
    bool logit_rows;
  };
  struct Weight {
    std::vector<PackedMatrix> runs;  // one below another (runs_of)
    int64_t rows = 0, cols = 0, groups = 0;
    int64_t padded_cols() const { return runs[0].padded_cols(); }
    void unpack(int64_t row, float scale, float* out) const;
  };
  using Quants = std::array<QuantRows, kMostRuns>;  // of each run, where its product is of integers
  // The left side of a product.
  struct Input {
    const Weight& m;
    int64_t rows;
    const float* x;  // [rows, padded columns of m]
    Quants quants;
    const float* bias;
    const ProductAdapters* adapters = nullptr;  // of rows that have one
    void product(const Kernels& kernels, int64_t first, int64_t count, int64_t group, int64_t groups, bool add,
                 float* y, int64_t y_stride) const;
    // Whether x is read as it is.
    bool floats() const {
      return std::any_of(quants.begin(), quants.begin() + std::ssize(m.runs), [](auto& q) { return !q.q; });
    }
    // Row t from a row of padded columns.
    void quantize(const Kernels& kernels, const float* row, int64_t t) const {
      for (size_t i = 0; i < m.runs.size(); ++i)
        if (quants[i].q) kernels.quantize(row, m.runs[i].packing, quants[i], t);
    }
  };
  bool of_integers(const PackedMatrix& m) const { return packing_info(m.packing).quantized && !options_.precise; }
  Status norm(Buffer in, Vector weight, float eps, bool add, Buffer out);
  Status linear(Buffer in, Matrix weight, bool add, Buffer out);
  // Ranks: what this one has of a sum over all is written into partial(), and sum_partials() makes it the sum: out, or
  // what is added to it.
  bool summed(Matrix weight) const { return options_.link && shards_[size_t(weight.id)] == Shard::cols; }
  Status make_partials(int64_t cols);
  Status embed_own(const Weight& m, float scale, Buffer out);
  Buffer partial() const { return partials_[turn_]; }
  Status sum_partials(bool add, Buffer out);
  size_t cache_of(size_t kind) const { return caches_.size() > 1 && windowed_[kind] ? 1 : 0; }
  const float* vector(Vector v) const { return v.id < 0 ? nullptr : vectors_[size_t(v.id)].data(); }
  int64_t rows(Buffer b) const { return buffers_[size_t(b.id)].logit_rows ? logit_rows_ : int64_t(tokens_->size()); }
  kvcache::CacheView cache_for(const Attend& how) const;  // with the layer's own scales
  // ops_linear_attention.cc
  struct LinearLayer {
    LinearConfig config;
    Vector norm;
    float eps = 0;
    std::vector<float> conv;         // [taps, channels]
    std::vector<float> decay, bias;  // a value head; the decay is not negative
    int64_t at = 0;                  // in a slot
  };
  struct LinearRows;
  void run_key_head(const LinearLayer& layer, const LinearRows& rows, int64_t sequence, int64_t head);
  // moe.cc: the rows of a step by expert.
  struct ExpertRows;
  struct LayerExperts {
    Experts of;
    Buffer logits;
    size_t own = 0;  // the first that this rank has
    bool has(int32_t expert) const { return of.mlps[size_t(expert)].up.id >= 0; }
  };
  Status choose_experts(const LayerExperts& layer, Buffer in);
  void count_experts(size_t layer);
  template <class F>
  void each_expert_piece(const std::vector<Input>& inputs, int64_t groups, int64_t most_groups, const F& f);
  template <class RowAt>
  std::vector<Input> expert_inputs(const LayerExperts& layer, Matrix Mlp::*which, bool dense, const RowAt& row_at);
  void expert_glu(const LayerExperts& layer, Buffer in);
  void run_experts(const LayerExperts& layer, Buffer in, int64_t cols);
  void glu_row(Activation activation, const float* gate, const float* up, int64_t n, float* out) const;
  // f(row) for every row, on the pool when there is enough to share.
  template <class F>
  void each_row(int64_t rows, int64_t work, const F& f);
  Input input_of(Buffer in, Matrix weight);
  // f(first row, rows, first group, groups, worker) on the pool until every row has met every group.
  template <class F>
  void each_piece(const Input& in, int64_t groups, int64_t most_groups, const F& f);
  // Padded to whole blocks.
  const float* padded_rows(const Weight& m, const float* x, int64_t rows);

  CpuOptions options_;
  ThreadPool& pool_;
  const Kernels& kernels_;
  Arena arena_;
  int64_t measured_ = 0;
  std::vector<Weight> matrices_;
  std::vector<Vector> biases_;  // of each matrix
  std::vector<Shard> shards_;   // likewise
  std::vector<std::vector<float>> vectors_;
  std::vector<Room> buffers_;
  std::vector<attention::Attributes> kinds_;
  std::vector<std::optional<Side>> side_of_;                       // of each kind, in an encoder-decoder
  std::vector<bool> windowed_;                                     // kinds that have a window of the model's own
  std::vector<std::unique_ptr<attention::Attention>> attentions_;  // one a kind
  QuantRoom quants_[kMostRuns];
  std::vector<float> padded_;
  std::vector<std::vector<float>> gates_;  // by worker
  std::vector<LayerExperts> experts_;
  std::shared_ptr<ExpertRows> expert_rows_;
  std::vector<kvcache::CacheView> caches_;
  bool apart_ = false;
  std::vector<int32_t> places_;
  std::vector<kvcache::TensorScales> scales_;
  std::vector<LinearLayer> linear_;
  std::unique_ptr<float, Unmap> slots_;  // of states: [slots, slot_floats_]
  int64_t slot_floats_ = 0;
  AdapterRows adapter_rows_;
  Sides sides_;                        // of the step, in an encoder-decoder
  std::vector<float> squares_;         // of the queries and the keys of each row
  Buffer partials_[2], whole_logits_;  // alternate: others still read one while the next is written
  size_t turn_ = 0;
  const Batch* batch_ = nullptr;
  const std::vector<int32_t>* tokens_ = nullptr;
  int64_t logit_rows_ = 0;
  std::shared_ptr<float[]> states_;
  int64_t state_cols_ = 0;
};

// Each worker has the same stretch of rows from one operation to the next, still in its cache.
template <class F>
void CpuOps::each_row(int64_t rows, int64_t work, const F& f) {
  constexpr int64_t kWorthSharing = 16384;  // below, waking the workers costs more than they save
  if (rows * work < kWorthSharing || rows == 1 || pool_.threads() == 1) {
    for (int64_t i = 0; i < rows; ++i) f(i);
  } else {
    const int64_t parts = std::min<int64_t>(rows, 8 * pool_.threads());
    pool_.for_each_near(parts, [&](int64_t part, int) {
      for (int64_t i = rows * part / parts; i < rows * (part + 1) / parts; ++i) f(i);
    });
  }
}

}  // namespace kvasir::model::cpu
