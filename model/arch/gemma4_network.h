// Gemma 4's network. It is a decoder with norms around each sublayer, and beside that:
//   - layers with a window have other heads than those without, and the last layers read the cache of earlier ones;
//   - values are normed too, and in some layers made by the keys' weights;
//   - each layer ends with what its token gives it alone (E models), and with a number that the stream is multiplied
//   by;
//   - experts stand beside the MLP, with a norm for each of the two and one for both.
#pragma once

#include <memory>
#include <vector>

#include "model/arch/layer_loader.h"
#include "model/arch/registry.h"

namespace kvasir::model {

class Gemma4 : public Network {
 public:
  Gemma4(const ModelConfig& config, Ops& ops) : c_(config), ops_(ops) {}
  Status load(Weights& weights, const LoadProgress& progress);

  Status forward() override;
  Result<Buffer> logits(int64_t first, int64_t count) override;
  Result<Buffer> hidden(int64_t first, int64_t count) override;

 private:
  // How a kind of layers attends, and its rooms.
  struct Kind {
    bool windowed, own_cache;
    int32_t attention;
    int64_t q, kv;         // columns of queries, of keys
    Buffer qkv, attended;  // [T, q + 2 * kv] ([T, q] where the cache is another layer's), [T, q]
    Vector ones;           // [head]
  };
  struct Width {
    int64_t ffn;
    Buffer up, gated;  // [T, 2 * ffn], [T, ffn]
  };
  struct Layer {
    size_t kind = 0, width = 0;
    Vector attn_norm, post_attn_norm, ffn_norm, post_ffn_norm, q_norm, k_norm;
    Matrix qkv, attn_out;
    Mlp mlp;
    int32_t experts = -1;  // as Ops knows them
    Vector router_norm, experts_norm, post_mlp_norm, post_experts_norm;
    Matrix input_gate, input_out;
    Vector post_input_norm;
    float scale = 1;
  };

  Status load_layer(int32_t i, Weights& w, LayerLoader& in);
  Status load_layer_inputs(LayerLoader& in);
  Result<size_t> kind_of(int32_t layer, Weights& w);
  size_t width_of(int64_t ffn);
  Status make_buffers();
  Status give_layer_inputs();
  Status attend(const Layer& l, int32_t i);
  Status feed_forward(const Layer& l);
  Status add_layer_input(const Layer& l, int32_t i);

  ModelConfig c_;
  Ops& ops_;
  std::vector<Kind> kinds_;
  std::vector<Width> widths_;
  std::vector<Layer> layers_;
  Matrix embedding_, head_;
  Vector output_norm_;
  Matrix input_table_, input_projection_;  // of the numbers for each layer: [vocab, L * n], [L * n, hidden]
  Vector input_norm_;
  Buffer x_, h_;                          // [T, hidden]: the stream, and what a sublayer reads
  Buffer routed_, both_, mixed_;          // [T, hidden]: where there are experts
  Buffer inputs_, token_inputs_, input_;  // [T, L * n], likewise, [T, n]
  Buffer last_, logits_;                  // [R, hidden], [R, vocab]
};

Result<std::unique_ptr<Network>> load_gemma4(const ModelConfig& config, Weights& weights, Ops& ops,
                                             const LoadProgress& progress);

}  // namespace kvasir::model
