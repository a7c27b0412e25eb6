// The device operations on a GPU: bfloat16 weights and attention. What is added up is float32; what norm(), glu() and
// attend() give is read by products alone, and is bfloat16 at once.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "attention/backend.h"
#include "attention/cuda/memory.h"
#include "kvcache/form.h"
#include "model/cuda/adapter.h"
#include "model/cuda/experts.h"
#include "model/cuda/linear_layers.h"
#include "model/cuda/link.h"
#include "model/cuda/products.h"
#include "model/ops.h"
#include "model/runner.h"
#include "model/shared_prefix.h"
#include "model/sides.h"

namespace kvasir::model::cuda {

struct CudaOptions {
  int64_t max_batch = 0, max_tokens = 0, max_kvlen = 0;
  int64_t max_logit_rows = 0;
  int32_t page_size = 16;
  kvcache::IndexMode index_mode = kvcache::IndexMode::page_table;
  Quantize quantize = Quantize::as_stored;
  bool batch_invariant = false;
  int load_threads = 1;
  const attention::Backend* attention = nullptr;
  RunnerOptions runner;  // what it says of attention
  RankPart part;
  Link* link = nullptr;  // between ranks; null: there is one
};

class CudaOps final : public Ops {
 public:
  CudaOps(const CudaOptions& options, cudaStream_t stream) : options_(options), stream_(stream) {}

  Status prepare();  // opens the product library
  void end_load() { upload_.reset(); }
  // As CpuOps has it: with two caches, the second is that of the kinds that have a window; `apart`: with pages of its
  // own.
  Status set_caches(std::vector<kvcache::CacheView> caches, bool apart, std::vector<int32_t> places,
                    std::vector<kvcache::TensorScales> scales);
  // Room for the states of so many sequences, where the model has any; and a copy of one.
  Status set_states(int64_t slots) { return linear_layers_ ? linear_layers_->set_slots(slots) : Status(); }
  Status copy_state(int32_t from, int32_t to) { return linear_layers_->copy(from, to); }
  // A step of decodes is padded to rows(), of which there are few, so that few kinds of steps serve all batches; what
  // comes of the rows past its own is read by nobody.
  // A token below 0 is what that row of drawn() was given in the step begun before. So two steps may be in flight.
  Status begin(const Batch& batch, const std::vector<int32_t>& tokens);
  Status end();                                                                    // after all that the step launches
  int32_t* drawn() { return drawn_[slot_].as<int32_t>(); }                         // this step's tokens by sample row
  const int32_t* drawn_before() const { return drawn_[slot_ ^ 1].as<int32_t>(); }  // of the step begun before
  int64_t max_logit_rows() const { return options_.max_logit_rows; }               // of one take_logit_rows()
  int64_t most_rows() const { return 2 * options_.max_tokens + options_.max_batch; }  // to draw from
  bool decodes() const { return decodes_; }
  int64_t rows() const { return tokens_; }
  // As many rows or some more: products have few sizes to be timed for.
  static int64_t padded(int64_t rows);
  // Of a step of decodes: forward() and logits() of rows() launch the same for any other of this key. 0: not known yet.
  uint64_t key() const;
  float* data(Buffer b) { return room(b).data.as<float>(); }
  // The same as bfloat16, which norms leave where they write to another buffer or for a product.
  Result<const void*> half_data(Buffer b) { return read_half(b); }
  // Another's weight, with its bias, as one of these too.
  Result<Matrix> borrow(const CudaOps& from, Matrix weight);
  // Where hidden states lie: bfloat16, `cols` of each place.
  void hand_over(std::shared_ptr<DeviceMemory> states, int64_t cols) {
    states_ = std::move(states), state_cols_ = cols;
  }
  int64_t weight_bytes() const { return weight_bytes_ + (experts_ ? experts_->bytes() : 0); }

  Result<Matrix> load_matrix(Weights& source, std::span<const HostTensor> parts, Shard shard) override;
  Result<Vector> load_vector(Weights& source, std::span<const HostTensor> parts, float shift, float scale) override;
  void set_bias(Matrix weight, Vector bias) override { matrices_[size_t(weight.id)]->bias = vectors_[size_t(bias.id)]; }
  Result<Buffer> make_buffer(int64_t cols, bool logit_rows, Shard shard) override;
  Result<int32_t> add_attention(const attention::Attributes& attributes) override;
  Result<int32_t> add_attention_of(Side side, const attention::Attributes& attributes) override;
  Result<int32_t> add_experts(Experts experts) override;
  Result<int32_t> add_delta_rule(const DeltaRule& rule) override;
  Result<AdapterPtr> load_adapter(std::span<const LowRank> changes, int64_t room) override {
    return adapters_.load(changes, matrices_.size(), room, options_.max_tokens,
                          [this](Matrix m) -> const Weight& { return *matrices_[size_t(m.id)]; });
  }

  Status takes_uneven_layers() const override { return {}; }
  Result<HeadMatrices> load_heads(Weights& source, std::span<const HostTensor> parts) override;
  Status linear_heads(Buffer in, Pieces from, const HeadMatrices& of, Buffer out, Pieces to) override;
  Status linear_pieces(Buffer in, Matrix weight, Buffer out) override { return product(in, weight, Form::bf16, out); }
  Status copy_pieces(Buffer in, Pieces from, Buffer out, Pieces to, int64_t cols, int64_t count) override;
  Status embed(Matrix table, float scale, Buffer out) override;
  Status add_row(Matrix table, RowOf which, int64_t shift, Buffer out) override;
  Status norm(Buffer in, Vector weight, float eps, Buffer out) override;
  Status add_norm(Buffer in, Vector weight, float eps, Buffer out) override;
  Status layer_norm(Buffer in, Vector weight, Vector bias, float eps, Buffer out) override;
  Status qk_norm(Buffer qkv, int64_t q_cols, Vector q, int64_t kv_cols, Vector k, float eps) override;
  Status qk_norm_over_ranks(Buffer qkv, int64_t q_cols, Vector q, int64_t kv_cols, Vector k, float eps) override;
  Status norm_pieces(Buffer in_out, int64_t first, int64_t cols, Vector weight, float eps) override;
  Status add(Buffer in, Buffer out) override;
  Status scale(Buffer in_out, float factor) override;
  Status gate(Activation activation, Buffer in_out, Buffer by, int64_t first) override;
  Status scale_by_position(Buffer in_out, int64_t cols, float slope, int64_t unit) override;
  Status linear(Buffer in, Matrix weight, Buffer out) override {
    return crosses(weight) ? summed(in, weight, false, out) : product(in, weight, Form::f32, out);
  }
  Status add_linear(Buffer in, Matrix weight, Buffer out) override {
    return crosses(weight) ? summed(in, weight, true, out) : product(in, weight, Form::added_f32, out);
  }
  Status add_linear_norm(Buffer in, Matrix weight, Buffer out, Vector norm, float eps, Buffer normed) override;
  Status glu(Activation activation, Buffer in, Buffer out) override;
  Status linear_glu(Buffer in, Matrix weight, Activation activation, Buffer between, Buffer out) override;
  Status activate(Activation activation, Buffer in, Buffer out) override;
  Status moe(Buffer in, int32_t experts, Buffer out, Buffer routed) override;
  Status sigmoid_gate(Buffer in, Vector gate, Buffer in_out) override;
  Status sigmoid_gates(Buffer in_out, Buffer gate) override;
  Status delta_rule(int32_t rule, Buffer in, Buffer betas, Buffer out) override;
  Status attend(const Attend& how, Buffer qkv, Buffer out) override { return attend(how, nullptr, qkv, out); }
  // The bias is attention's to add: it reads the products anyway.
  Status linear_attend(Buffer in, Matrix weight, const Attend& how, Buffer between, Buffer out) override {
    KVASIR_TRY(product(in, weight, Form::bf16, between, false));
    return attend(how, matrices_[size_t(weight.id)]->bias.get(), between, out);
  }
  Result<int64_t> turn_to(Side side) override;
  Status store(const Attend& how, Buffer keys, Buffer values) override;
  Status keep(Buffer in, int64_t first, float factor) override;
  int64_t given_cols() const override { return given_cols_; }
  Status take_given(Buffer out) override;
  Status place(Buffer in, int64_t first, Buffer out) override;
  Status softcap(Buffer in_out, float cap) override;
  Status take_logit_rows(Buffer in, int64_t first, int64_t count, Buffer out) override;
  // On all ranks: each draws the same tokens from them, and needs no word from another.
  Result<Buffer> gather(Buffer logits) override;

 private:
  struct Room {
    DeviceMemory data, half_data;   // float32 and bfloat16
    DeviceMemory elements, scales;  // E4M3, where weights are that
    bool half = false;              // what was written last
    bool bytes = false;             // and E4M3 says the same
    bool half_lacks = false;        // or has it alone
    bool logit_rows = false;
    // What products of many rows have read of it so far: made where it is written, from then on.
    bool wants_bytes = false, wants_half = false;
    Bytes as_bytes() { return {elements.get(), scales.as<float>()}; }
  };
  struct Values {
    DeviceMemory data, half_data;  // float32 and bfloat16
  };
  struct Loaded : Weight {
    std::shared_ptr<Values> bias;
    Shard shard = Shard::whole;
  };
  Status upload(const Batch& batch, const std::vector<int32_t>& tokens);
  Status product(Buffer in, Matrix weight, Form form, Buffer out, bool biased = true);
  // Whether products by it are parts of sums over all ranks.
  bool crosses(Matrix weight) const { return options_.link && matrices_[size_t(weight.id)]->shard == Shard::cols; }
  Buffer partial() const { return partials_[size_t(turn_)]; }
  Status make_partials(int64_t cols);
  Status summed(Buffer in, Matrix weight, bool add, Buffer out);
  LinkView link_view() const;
  Status sum_partials(bool add, Buffer out);
  Status embed_rows(const Loaded& w, const int32_t* ids, const int32_t* before, float scale, Buffer out);
  Status embed_own(const Loaded& w, float scale, Buffer out);
  Status attend(const Attend& how, const Values* bias, Buffer qkv, Buffer out);
  const float* vector(Vector v) const { return v.id < 0 ? nullptr : vectors_[size_t(v.id)]->data.as<float>(); }
  size_t cache_of(size_t kind) const { return caches_.size() > 1 && windowed_[kind] ? 1 : 0; }
  const int32_t* ids() const { return ids_[slot_].as<const int32_t>() + first_id_; }
  const int32_t* ids(int64_t nth) const { return ids() + nth * tokens_ + step_logit_rows_; }  // behind the logit rows
  kvcache::CacheView cache_for(const Attend& how) const;
  bool sided() const { return !side_of_.empty() && side_of_[0]; }  // all kinds of an encoder-decoder are
  Room& room(Buffer b) { return *buffers_[size_t(b.id)]; }
  int64_t rows(Buffer b) { return room(b).logit_rows ? logit_rows_ : tokens_; }
  int64_t product_rows(Buffer b);
  Status unpack(Loaded* weight);            // to bfloat16, where it is not
  const float* read(Buffer b);              // that is float32
  Result<const void*> read_half(Buffer b);  // made bfloat16 where it is not
  Result<Bytes> read_bytes(Buffer b);       // made E4M3 where it is not
  float* write(Buffer b) { return written(b, false), room(b).data.as<float>(); }
  void* write_half(Buffer b) { return written(b, true), room(b).half_data.get(); }
  void written(Buffer b, bool half) { room(b).half = half, room(b).bytes = room(b).half_lacks = false; }
  // Whether what is written now is to be E4M3 at once.
  bool makes_bytes(Buffer b) { return rows(b) > kFewRows && room(b).wants_bytes; }
  bool norms_to_bytes(int64_t cols, Buffer out) {
    return makes_bytes(out) && out.cols == cols && cols % 8 == 0 && cols <= most_norm_bytes();
  }
  bool gates_to_bytes(Activation activation, Buffer out);
  bool leaves_sums(Buffer in, Matrix weight);
  Result<Products::Sums> unscaled(Buffer in, Matrix weight, Buffer out);
  Status add_sums_norm(Buffer in, Matrix weight, Buffer out, Vector norm, float eps, Buffer normed);
  Status launched(const char* what) const { return attention::cuda::check(cudaGetLastError(), what); }

  CudaOptions options_;
  cudaStream_t stream_;
  static constexpr int64_t kFewRows = 16;      // these are multiplied as bfloat16 whatever the weights are
  static constexpr int64_t kLeastPadded = 32;  // fewer are multiplied by kernels that need no timing
  std::optional<Upload> upload_;               // while weights are loaded
  std::unique_ptr<Products> products_;
  bool any_bytes_ = false;  // of the weights
  std::vector<std::shared_ptr<Loaded>> matrices_;
  std::vector<std::shared_ptr<Values>> vectors_;
  std::vector<std::unique_ptr<Room>> buffers_;
  std::optional<ExpertLayers> experts_;
  std::optional<LinearLayers> linear_layers_;
  Buffer router_logits_;
  // What a rank adds to sums, by turns: while one is written others may still read the one before.
  Buffer partials_[2], whole_logits_;
  DeviceMemory own_ids_;  // token ids as rows of this rank's part of the vocabulary
  DeviceMemory squares_;  // Link::publish_squares
  int turn_ = 0;
  bool sum_is_last_ = false;  // of what has crossed ranks in this step
  std::vector<attention::Attributes> kinds_;
  std::vector<bool> windowed_;                // kinds that have a window of the model's own
  std::vector<std::optional<Side>> side_of_;  // of each kind, in an encoder-decoder
  Sides sides_;                               // of the step
  bool apart_ = false;
  std::vector<std::unique_ptr<attention::Attention>> attentions_;
  // Token ids, then logit rows, positions and types; where there are hidden states, where they are kept and given. Of
  // an encoder-decoder the sources' token ids, then these of its targets.
  DeviceMemory ids_[2], drawn_[2];
  PinnedMemory host_ids_[2];
  int slot_ = 0;
  std::shared_ptr<DeviceMemory> states_;
  int64_t state_cols_ = 0, given_cols_ = 0;
  bool keeps_ = false;
  std::vector<kvcache::CacheView> caches_;
  std::vector<int32_t> places_;
  std::vector<kvcache::TensorScales> scales_;
  SharedPrefixes shared_;
  AdapterRows adapters_;
  bool decodes_ = false;
  int64_t sources_ = 0, targets_ = 0, first_id_ = 0;
  int64_t tokens_ = 0, logit_rows_ = 0, step_logit_rows_ = 0, weight_bytes_ = 0;
};

}  // namespace kvasir::model::cuda
