#include "model/arch/head_network.h"

#include "core/cat.h"
#include "model/arch/layer_loader.h"

namespace kvasir::model {
namespace {

class HeadNetwork final : public Decoder {
 public:
  HeadNetwork(const HeadConfig& config, Ops& ops) : Decoder(config.decoder, ops), head_config_(config) {}
  Status load(Weights& w, Matrix embedding, Matrix head);
  Status forward() override;

 private:
  Status load_entrance(LayerLoader& in);
  Status enter_eagle();
  Status enter_next_layer();

  const HeadConfig head_config_;
  Matrix fc_;  // EAGLE-3: [hidden, given]; MTP: eh_proj [hidden, 2 * hidden]
  Vector token_norm_, state_norm_;
  Buffer given_;   // [T, given]
  Buffer joined_;  // [T, 2 * hidden]: the token's, and the state's
};

// Weights that the model lends are not split and not copied.
Status HeadNetwork::load(Weights& w, Matrix embedding, Matrix head) {
  LayerLoader in(c_, w, ops_);
  embedding_ = embedding, head_ = head;
  if (w.has("token_embd.weight")) {
    KVASIR_ASSIGN(embedding_, in.matrix("token_embd", head_config_.known_tokens, c_.hidden, Shard::whole, false));
  }
  if (w.has("output.weight")) {
    KVASIR_ASSIGN(head_, in.matrix("output", c_.vocab, c_.hidden, Shard::whole, false));
  }
  if (embedding_.id < 0 || embedding_.cols != c_.hidden || embedding_.rows != head_config_.known_tokens)
    return invalid_argument(cat("the head has no embedding (embed_tokens.weight), and the model's is ", embedding_.rows,
                                " x ", embedding_.cols, "; it wants ", head_config_.known_tokens, " x ", c_.hidden));
  if (head_.id < 0 || head_.cols != c_.hidden || head_.rows != c_.vocab)
    return invalid_argument(cat("the head has no lm_head.weight, and the model's is ", head_.rows, " x ", head_.cols,
                                "; it wants ", c_.vocab, " x ", c_.hidden));
  KVASIR_ASSIGN(output_norm_.weight, in.vector("output_norm.weight", c_.hidden, c_.norm_shift));
  KVASIR_TRY(load_entrance(in));
  KVASIR_TRY(load_layer(0, in));
  KVASIR_TRY(make_buffers());
  KVASIR_ASSIGN(joined_, ops_.make_buffer(2 * int64_t(c_.hidden), false));
  if (head_config_.eagle) {
    KVASIR_ASSIGN(given_, ops_.make_buffer(head_config_.given, false));
  }
  return keep({1});  // what the next row goes on with
}

Status HeadNetwork::load_entrance(LayerLoader& in) {
  if (head_config_.eagle) {
    KVASIR_ASSIGN(fc_, in.matrix("fc", c_.hidden, head_config_.given, Shard::whole, false));
    KVASIR_ASSIGN(state_norm_, in.vector("blk.0.hidden_norm.weight", c_.hidden));
    return {};
  }
  KVASIR_ASSIGN(fc_, in.matrix("eh_proj", c_.hidden, 2 * int64_t(c_.hidden), Shard::whole, false));
  KVASIR_ASSIGN(token_norm_, in.vector("enorm.weight", c_.hidden, c_.norm_shift));
  KVASIR_ASSIGN(state_norm_, in.vector("hnorm.weight", c_.hidden, c_.norm_shift));
  return {};
}

Status HeadNetwork::forward() {
  KVASIR_TRY(ops_.embed(embedding_, c_.embedding_scale, h_));
  return head_config_.eagle ? enter_eagle() : enter_next_layer();
}

// A row of the model becomes a state by fc; one of its own is a state.
Status HeadNetwork::enter_eagle() {
  KVASIR_TRY(ops_.norm(h_, layers_[0].attn_norm.weight, c_.norm_eps, joined_));
  if (ops_.given_cols() == given_.cols) {
    KVASIR_TRY(ops_.take_given(given_));
    KVASIR_TRY(ops_.linear(given_, fc_, x_));
  } else {
    KVASIR_TRY(ops_.take_given(x_));
  }
  KVASIR_TRY(ops_.norm(x_, state_norm_, c_.norm_eps, h_));
  KVASIR_TRY(ops_.place(h_, c_.hidden, joined_));
  if (head_config_.norm_before_residual) KVASIR_TRY(ops_.place(h_, 0, x_));
  return run_layers(joined_);
}

Status HeadNetwork::enter_next_layer() {
  KVASIR_TRY(ops_.norm(h_, token_norm_, c_.norm_eps, joined_));
  KVASIR_TRY(ops_.take_given(x_));
  KVASIR_TRY(ops_.norm(x_, state_norm_, c_.norm_eps, h_));
  KVASIR_TRY(ops_.place(h_, c_.hidden, joined_));
  KVASIR_TRY(ops_.linear(joined_, fc_, x_));
  KVASIR_TRY(ops_.norm(x_, layers_[0].attn_norm.weight, c_.norm_eps, h_));
  return run_layers(h_);
}

}  // namespace

Result<std::unique_ptr<Network>> load_head_network(const HeadConfig& config, Weights& weights, Ops& ops,
                                                   Matrix embedding, Matrix head) {
  auto net = std::make_unique<HeadNetwork>(config, ops);
  KVASIR_TRY(net->load(weights, embedding, head));
  return std::unique_ptr<Network>(std::move(net));
}

}  // namespace kvasir::model
