#include "model/formats/tensor_names.h"

#include <algorithm>

#include "core/cat.h"

namespace kvasir::model {
namespace {

constexpr TensorName kLlama[] = {
    {"token_embd", "model.embed_tokens"},
    {"output_norm", "model.norm"},
    {"output", "lm_head"},
    {"blk.#.attn_norm", "model.layers.#.input_layernorm"},
    {"blk.#.attn_q", "model.layers.#.self_attn.q_proj"},
    {"blk.#.attn_k", "model.layers.#.self_attn.k_proj"},
    {"blk.#.attn_v", "model.layers.#.self_attn.v_proj"},
    {"blk.#.attn_qkv", "model.layers.#.self_attn.qkv_proj"},
    {"blk.#.attn_output", "model.layers.#.self_attn.o_proj"},
    {"blk.#.attn_q_norm", "model.layers.#.self_attn.q_norm"},
    {"blk.#.attn_k_norm", "model.layers.#.self_attn.k_norm"},
    // Of an 8-bit cache, by the names its makers have given them.
    {"blk.#.attn_k_cache", "model.layers.#.self_attn.k_scale$"},
    {"blk.#.attn_k_cache", "model.layers.#.self_attn.k_proj.k_scale$"},
    {"blk.#.attn_k_cache", "model.layers.#.self_attn.kv_scale$"},
    {"blk.#.attn_v_cache", "model.layers.#.self_attn.v_scale$"},
    {"blk.#.attn_v_cache", "model.layers.#.self_attn.v_proj.v_scale$"},
    {"blk.#.attn_v_cache", "model.layers.#.self_attn.kv_scale$"},
    {"blk.#.ffn_norm", "model.layers.#.post_attention_layernorm"},
    {"blk.#.ffn_gate", "model.layers.#.mlp.gate_proj"},
    {"blk.#.ffn_up", "model.layers.#.mlp.up_proj"},
    {"blk.#.ffn_gate_up", "model.layers.#.mlp.gate_up_proj"},
    {"blk.#.ffn_down", "model.layers.#.mlp.down_proj"},
};

// A name in parts: "blk.3.attn_q.weight" is "blk.#.attn_q", "3" and ".weight".
struct Parts {
  std::string stem;
  std::string_view layer, ending;
  explicit Parts(std::string_view name) {
    const size_t dot = name.rfind('.');
    if (dot != std::string_view::npos) ending = name.substr(dot), name = name.substr(0, dot);
    if (name.starts_with("blk.")) {
      layer = name.substr(4, name.find('.', 4) - 4);
      name.remove_prefix(std::min(name.size(), 4 + layer.size()));
      stem = cat("blk.#", name);
    } else {
      stem = name;
    }
  }
  std::string fill(std::string_view pattern) const {
    const size_t at = pattern.find('#');
    std::string out =
        at == std::string_view::npos ? std::string(pattern) : cat(pattern.substr(0, at), layer, pattern.substr(at + 1));
    if (!out.ends_with('$')) return out += ending;
    out.pop_back();
    return out;
  }
};

}  // namespace

std::vector<std::string> TensorNames::hugging_face(std::string_view name) const {
  const Parts parts(name);
  std::vector<std::string> out;
  for (std::span<const TensorName> table : {own_, std::span<const TensorName>(kLlama)}) {
    for (const TensorName& n : table)
      if (n.ours == parts.stem && !n.hugging_face.empty()) out.push_back(parts.fill(n.hugging_face));
    if (!out.empty()) break;
  }
  return out;
}

std::vector<std::string> TensorNames::gguf(std::string_view name) const {
  const Parts parts(name);
  std::vector<std::string> out;
  for (const TensorName& n : own_)
    if (n.ours == parts.stem && !n.gguf.empty()) out.push_back(parts.fill(n.gguf));
  if (out.empty()) out.emplace_back(name);
  return out;
}

}  // namespace kvasir::model
