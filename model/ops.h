// The few operations a device offers a network. A network is written once against them; CPU and CUDA
// each implement them, never the network. Handles name device memory: a network sees no pointer.
//
// Rules every implementation keeps: a row of an output depends only on its own row of the input (and, in
// attend(), on its own sequence), so batch-mates never change a result; and with several ranks the
// sharded operations leave the same values on every rank that one rank alone would have.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/params.h"
#include "core/status.h"
#include "model/adapter.h"
#include "model/batch.h"
#include "model/config.h"
#include "model/formats/weights.h"

namespace kvasir::model {

// How a weight splits over ranks. `rows` gives every rank whole output features (a stacked weight splits
// each of its parts), `cols` gives input features and sums the results over ranks.
enum class Shard : uint8_t { whole, rows, cols };

struct Matrix {
  int32_t id = -1;
  int64_t rows = 0, cols = 0;  // of the whole matrix
};
struct Vector {
  int32_t id = -1;
  int64_t size = 0;
};
struct Buffer {  // one row a token (or a logit row)
  int32_t id = -1;
  int64_t cols = 0;
};

// Columns of a row in pieces, one a head: the first begins at `first`, the next `step` further on.
struct Pieces {
  int64_t first = 0, step = 0;
};

// Which row of a table a token is given: that of its position, or of the text of a pair it belongs to.
enum class RowOf : uint8_t { position, type };

// Of an encoder-decoder's sequences (Batch::sources): what the encoder's layers attend from and to, what the decoder's
// do, and the decoder's to what the encoder has left.
enum class Side : uint8_t { source, target, cross };

// One layer's attention: what add_attention() gave, the layer, and a logit a head without a value (none: id -1).
struct Attend {
  int32_t kind = 0, layer = 0;
  Vector sinks = {};
};

// [2 * ffn, hidden], gates first ([ffn, hidden] without gates), and [hidden, ffn].
struct Mlp {
  Matrix up, down;
};

// A layer's experts, as add_experts() is told of them.
struct Experts {
  Routing routing;
  Activation activation = Activation::silu;
  float limit = 0, slope = 0;  // ExpertsConfig's
  Matrix router;               // [experts, hidden]
  Vector correction;           // Routing's; none: id -1
  Vector scales;               // of each expert's part of the sum; none: id -1
  std::vector<Mlp> mlps;       // of those that another rank has: ids -1
};

// Of each head a matrix of its own, all of one shape; a device has them one by one, or as one that stacks them.
struct HeadMatrices {
  int64_t heads = 0, rows = 0, cols = 0;  // rows and columns of each
  std::vector<Matrix> matrices;
};

// A layer of linear attention, as add_delta_rule() is told of it.
struct DeltaRule {
  LinearConfig config;
  Vector conv;              // [channels, taps]
  Vector decay;             // a value head: what its state fades by a step, times softplus(alpha + bias)
  bool log_decay = false;   // it is the logarithm of that, with the sign left out, as checkpoints have it
  Vector decay_bias, norm;  // [value heads], [value_dim]
  float eps = 0;            // of the norm
};

// A low-rank change of rows [first, first + b.rows) of a weight: its product gains scale * (x a') b' there, and where
// there are magnitudes each of its rows is then as long as they say (DoRA).
struct LowRank {
  Matrix weight;
  int64_t first = 0;
  HostTensor a, b;  // [rank, columns of the weight], [rows, rank]
  float scale = 1;
  std::vector<float> magnitude;  // a row; empty: none
};

class Ops {
 public:
  virtual ~Ops() = default;

  // Loading. The parts are stacked by rows into one matrix, and released once they are copied.
  virtual Result<Matrix> load_matrix(Weights& source, std::span<const HostTensor> parts, Shard shard) = 0;
  // The parts one after another, each value as (it + shift) * scale.
  virtual Result<Vector> load_vector(Weights& source, std::span<const HostTensor> parts, float shift, float scale) = 0;
  // From here on every product by `weight` adds this to each of its rows.
  virtual void set_bias(Matrix weight, Vector bias) = 0;
  // Room for the rows of the largest step, or for the logit rows of one take_logit_rows(); `shard` other than
  // whole: each rank holds its part of the columns.
  virtual Result<Buffer> make_buffer(int64_t cols, bool logit_rows, Shard shard = Shard::whole) = 0;
  // Layers that attend alike share a kind. A step of begin() plans all kinds.
  virtual Result<int32_t> add_attention(const attention::Attributes& attributes) = 0;

  // Likewise for one side of an encoder-decoder.
  virtual Result<int32_t> add_attention_of(Side, const attention::Attributes&) {
    return unimplemented("encoder-decoders are not supported on this device; on the CPU they are (--device cpu)");
  }

  // A layer's experts, for moe(). A device that has none says so here.
  virtual Result<int32_t> add_experts(Experts) {
    return unimplemented("mixtures of experts are not supported on this device; on the CPU they are (--device cpu)");
  }

  // A layer of linear attention, for delta_rule(). A device that has none says so here.
  virtual Result<int32_t> add_delta_rule(const DeltaRule&) {
    return unimplemented("linear attention is not supported on this device; on the CPU it is (--device cpu)");
  }

  // What the rows of a batch's sequences gain from here on where it names this (Batch::adapters), in every product by
  // these weights, before its bias. May be called while steps run. Refused where it would take more than `room` bytes.
  virtual Result<AdapterPtr> load_adapter(std::span<const LowRank> changes, int64_t room) = 0;

  // Layers whose heads differ, or that read another layer's cache. A device that has no such layers says so here.
  virtual Status takes_uneven_layers() const {
    return unimplemented(
        "layers with heads of different sizes, or that share a cache, are not supported on this device; on the CPU "
        "they are (--device cpu)");
  }

  // A step. The runner has called begin(); all that follows is for its rows.
  virtual Status embed(Matrix table, float scale, Buffer out) = 0;
  // out += the table's row; `shift` rows on.
  virtual Status add_row(Matrix, RowOf, int64_t, Buffer) {
    return unimplemented("learned positions are not supported on this device; on the CPU they are (--device cpu)");
  }
  // out = in / rms(in) * weight, and out += that.
  virtual Status norm(Buffer in, Vector weight, float eps, Buffer out) = 0;
  virtual Status add_norm(Buffer in, Vector weight, float eps, Buffer out) = 0;
  // out = (in - mean) / deviation * weight + bias; a bias that is not there is 0. `in` may be `out`, which stays
  // float32.
  virtual Status layer_norm(Buffer in, Vector weight, Vector bias, float eps, Buffer out) = 0;
  // norm() in place of queries and of keys, in pieces as long as their weights (a head, or all of them); qkv rows are
  // [q heads | k heads | v heads], q_cols and twice kv_cols. Only scale_by_position() and attend() read them after.
  virtual Status qk_norm(Buffer qkv, int64_t q_cols, Vector q, int64_t kv_cols, Vector k, float eps) = 0;
  // All queries of all ranks together, and all keys.
  virtual Status qk_norm_over_ranks(Buffer qkv, int64_t q_cols, Vector q, int64_t kv_cols, Vector k, float eps) = 0;
  // norm() in place of columns [first, first + cols), in pieces as long as the weight.
  virtual Status norm_pieces(Buffer, int64_t, int64_t, Vector, float) {
    return unimplemented("this device norms no pieces of rows");
  }
  // out += in, and in_out *= factor (0 clears it, whatever it holds).
  virtual Status add(Buffer, Buffer) { return unimplemented("this device adds no rows"); }
  virtual Status scale(Buffer, float) { return unimplemented("this device scales no rows"); }
  // in_out = activation(in_out) * columns of `by`, from `first`.
  virtual Status gate(Activation, Buffer, Buffer, int64_t) { return unimplemented("this device has no such gates"); }
  // Columns [0, cols) times 1 + slope * log(1 + floor(position / unit)), before anything rotates them.
  virtual Status scale_by_position(Buffer in_out, int64_t cols, float slope, int64_t unit) = 0;
  // out = in * weight' (+ bias), and out += that. By a weight that is split by columns: the sum over all ranks.
  virtual Status linear(Buffer in, Matrix weight, Buffer out) = 0;
  virtual Status add_linear(Buffer in, Matrix weight, Buffer out) = 0;
  // add_linear(), then norm() of `out` into `normed`.
  virtual Status add_linear_norm(Buffer in, Matrix weight, Buffer out, Vector norm, float eps, Buffer normed) {
    KVASIR_TRY(add_linear(in, weight, out));
    return this->norm(out, norm, eps, normed);
  }
  // out = activation(first half of in) * second half.
  virtual Status glu(Activation activation, Buffer in, Buffer out) = 0;
  // glu() of linear(); `between` is room for linear()'s output on devices that need it.
  virtual Status linear_glu(Buffer in, Matrix weight, Activation activation, Buffer between, Buffer out) {
    KVASIR_TRY(linear(in, weight, between));
    return glu(activation, between, out);
  }
  // out = activation(linear()), for an MLP without gates.
  virtual Status activate(Activation activation, Buffer in, Buffer out) = 0;
  // out += the sum of the experts that each row's router chooses, as it weighs them. The router reads `routed` where
  // that is there, else what the experts read.
  virtual Status moe(Buffer, int32_t, Buffer, Buffer = {}) {
    return unimplemented("this device has no mixtures of experts");
  }
  // in_out *= sigmoid(in . gate)
  virtual Status sigmoid_gate(Buffer, Vector, Buffer) { return unimplemented("this device has no gates of rows"); }
  // Append this step's keys and values to the cache, and attend. qkv rows are [q heads | k heads | v heads].
  virtual Status attend(const Attend& how, Buffer qkv, Buffer out) = 0;
  // attend() of linear(), which nobody else reads: `between` is room for it, in what precision the device likes.
  virtual Status linear_attend(Buffer in, Matrix weight, const Attend& how, Buffer between, Buffer out) {
    KVASIR_TRY(linear(in, weight, between));
    return attend(how, between, out);
  }
  // in_out *= sigmoid(gate), column by column.
  virtual Status sigmoid_gates(Buffer, Buffer) { return unimplemented("this device has no gates of columns"); }
  // A layer of linear attention: of each sequence the state in its slot goes on by its rows, one by one, so that it
  // does not matter in which pieces they come. Rows are [queries | keys | values | gates] and [betas | alphas], each as
  // wide as the value heads; out: [values].
  virtual Status delta_rule(int32_t, Buffer, Buffer, Buffer) {
    return unimplemented("this device has no linear attention");
  }
  // Of an encoder-decoder: from here on the step is its sources' rows, or its targets' (as it is left). How many.
  virtual Result<int64_t> turn_to(Side) { return unimplemented("this device has no encoder-decoders"); }
  // Keys and values of the sources' rows, for `cross`, in place of what the layer's cache has of them.
  virtual Status store(const Attend&, Buffer, Buffer) { return unimplemented("this device stores no keys alone"); }
  // Heads that draft. Rows, times `factor`, to Batch::kept_at, into columns from `first`; rows from Batch::given_at;
  // and columns of `out` from `first`, or all of them.
  virtual Status keep(Buffer, int64_t, float) { return unimplemented("this device hands over no hidden states"); }
  virtual int64_t given_cols() const { return 0; }
  virtual Status take_given(Buffer) { return unimplemented("this device takes no hidden states"); }
  virtual Status place(Buffer, int64_t, Buffer) { return unimplemented("this device places no columns"); }
  // in_out = cap * tanh(in_out / cap)
  virtual Status softcap(Buffer in_out, float cap) = 0;
  // [first, first + count) of the rows whose logits are wanted, into a buffer of logit rows; what follows on
  // such buffers is for these `count` rows.
  virtual Status take_logit_rows(Buffer in, int64_t first, int64_t count, Buffer out) = 0;
  // The columns of all ranks beside one another, on the first of them.
  virtual Result<Buffer> gather(Buffer logits) { return logits; }

  // Latent attention (LatentConfig).
  // A part a head; they are released by whoever gave them.
  virtual Result<HeadMatrices> load_heads(Weights& source, std::span<const HostTensor> parts) {
    HeadMatrices out{int64_t(parts.size()), parts[0].rows, parts[0].cols, {}};
    for (const HostTensor& part : parts) {
      KVASIR_ASSIGN(out.matrices.emplace_back(), load_matrix(source, {&part, 1}, Shard::whole));
    }
    return out;
  }
  // Piece h of `out` = piece h of `in` * head h's matrix': each head's own product.
  virtual Status linear_heads(Buffer, Pieces, const HeadMatrices&, Buffer, Pieces) {
    return unimplemented("this device has no products by head");
  }
  // linear() that these two alone read, in what precision the device likes.
  virtual Status linear_pieces(Buffer in, Matrix weight, Buffer out) { return linear(in, weight, out); }
  // `count` pieces of `cols` columns.
  virtual Status copy_pieces(Buffer, Pieces, Buffer, Pieces, int64_t, int64_t) {
    return unimplemented("this device copies no columns");
  }
};

}  // namespace kvasir::model
