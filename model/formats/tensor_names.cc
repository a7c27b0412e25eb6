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
    {"blk.#.attn_q_cache", "model.layers.#.self_attn.q_scale$"},
    {"blk.#.ffn_norm", "model.layers.#.post_attention_layernorm"},
    {"blk.#.ffn_gate", "model.layers.#.mlp.gate_proj"},
    {"blk.#.ffn_up", "model.layers.#.mlp.up_proj"},
    {"blk.#.ffn_gate_up", "model.layers.#.mlp.gate_up_proj"},
    {"blk.#.ffn_down", "model.layers.#.mlp.down_proj"},
    {"blk.#.ffn_gate_inp", "model.layers.#.mlp.gate"},
    {"blk.#.ffn_gate.%", "model.layers.#.mlp.experts.%.gate_proj"},
    {"blk.#.ffn_up.%", "model.layers.#.mlp.experts.%.up_proj"},
    {"blk.#.ffn_down.%", "model.layers.#.mlp.experts.%.down_proj"},
    {"blk.#.ffn_gate_up_exps", "model.layers.#.mlp.experts.gate_up_proj$"},
    {"blk.#.ffn_down_exps", "model.layers.#.mlp.experts.down_proj$"},
    {"blk.#.ffn_gate_shexp", "model.layers.#.mlp.shared_expert.gate_proj"},
    {"blk.#.ffn_up_shexp", "model.layers.#.mlp.shared_expert.up_proj"},
    {"blk.#.ffn_down_shexp", "model.layers.#.mlp.shared_expert.down_proj"},
    {"blk.#.ffn_gate_inp_shexp", "model.layers.#.mlp.shared_expert_gate"},
    {"blk.#.nextn.enorm", "model.layers.#.enorm"},
    {"blk.#.nextn.hnorm", "model.layers.#.hnorm"},
    {"blk.#.nextn.eh_proj", "model.layers.#.eh_proj"},
    {"blk.#.nextn.embed_tokens", "model.layers.#.embed_tokens"},
    {"blk.#.nextn.shared_head_norm", "model.layers.#.shared_head.norm"},
    {"blk.#.nextn.shared_head_head", "model.layers.#.shared_head.head"},
};

constexpr TensorName kMistral[] = {
    {"token_embd", "tok_embeddings"},
    {"output_norm", "norm"},
    {"output", "output"},
    {"blk.#.attn_norm", "layers.#.attention_norm"},
    {"blk.#.attn_q", "layers.#.attention.wq"},
    {"blk.#.attn_k", "layers.#.attention.wk"},
    {"blk.#.attn_v", "layers.#.attention.wv"},
    {"blk.#.attn_output", "layers.#.attention.wo"},
    {"blk.#.attn_k_cache", "layers.#.attention.k_fake_quantizer.qscale_act$"},
    {"blk.#.attn_k_cache", "layers.#.attention.kv_fake_quantizer.qscale_act$"},
    {"blk.#.attn_v_cache", "layers.#.attention.v_fake_quantizer.qscale_act$"},
    {"blk.#.attn_v_cache", "layers.#.attention.kv_fake_quantizer.qscale_act$"},
    {"blk.#.attn_q_cache", "layers.#.attention.q_fake_quantizer.qscale_act$"},
    {"blk.#.ffn_norm", "layers.#.ffn_norm"},
    {"blk.#.ffn_gate", "layers.#.feed_forward.w1"},
    {"blk.#.ffn_up", "layers.#.feed_forward.w3"},
    {"blk.#.ffn_down", "layers.#.feed_forward.w2"},
    {"blk.#.ffn_gate_inp", "layers.#.feed_forward.gate"},
    {"blk.#.ffn_gate.%", "layers.#.feed_forward.experts.%.w1"},
    {"blk.#.ffn_up.%", "layers.#.feed_forward.experts.%.w3"},
    {"blk.#.ffn_down.%", "layers.#.feed_forward.experts.%.w2"},
};

// A name in parts: "blk.3.ffn_up.17.weight" is "blk.#.ffn_up.%", "3", "17" and ".weight".
struct Parts {
  std::string stem;
  std::string_view layer, expert, ending;
  explicit Parts(std::string_view name) {
    const size_t dot = name.rfind('.');
    if (dot != std::string_view::npos) ending = name.substr(dot), name = name.substr(0, dot);
    if (name.starts_with("blk.")) {
      layer = name.substr(4, name.find('.', 4) - 4);
      name.remove_prefix(std::min(name.size(), 4 + layer.size()));
      if (const size_t last = name.rfind('.'); last + 1 < name.size() && name[last + 1] >= '0' && name[last + 1] <= '9')
        expert = name.substr(last + 1), name.remove_suffix(expert.size());
      stem = cat("blk.#", name, expert.empty() ? "" : "%");
    } else {
      stem = name;
    }
  }
  std::string fill(std::string_view pattern) const {
    std::string out;
    for (char c : pattern) {
      if (c == '#' || c == '%')
        out += c == '#' ? layer : expert;
      else
        out += c;
    }
    if (!out.ends_with('$')) return out += ending;
    out.pop_back();
    return out;
  }
};

}  // namespace

TensorNames mistral_names() { return TensorNames(kMistral); }

std::vector<std::string> TensorNames::hugging_face(std::string_view name) const {
  const Parts parts(name);
  const std::string whole = cat(parts.stem, parts.ending);
  std::vector<std::string> out;
  for (std::span<const TensorName> table : {own_, std::span<const TensorName>(kLlama)}) {
    for (const TensorName& n : table)
      if ((n.ours == parts.stem || n.ours == whole) && !n.hugging_face.empty())
        out.push_back(parts.fill(n.hugging_face));
    if (!out.empty()) break;
  }
  // A folder of the network without its head leaves the first part of its names out, as embedding models' do.
  for (size_t i = 0, named = out.size(); i < named; ++i)
    if (const size_t dot = out[i].find('.'); dot != std::string::npos && out[i].find('.', dot + 1) != std::string::npos)
      out.push_back(out[i].substr(dot + 1));
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
