// What files call a network's tensors. A network asks by GGUF's names; a table of an architecture says where Hugging
// Face's folders, or GGUF files of that architecture, differ from Llama's; and one where Mistral's own folders do.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvasir::model {

// Without ".weight" or ".bias", which follow in both; '#' is the layer, '%' an expert
// ("blk.3.ffn_up.17.weight"). A name that ends in '$' is the whole name; one of ours that has its ending is of that
// alone, and stands before the one without. Where `ours` stands in several lines the first that a file has counts.
struct TensorName {
  std::string_view ours, hugging_face, gguf = {};  // empty: as everywhere
};

class TensorNames {
 public:
  TensorNames() = default;
  explicit TensorNames(std::span<const TensorName> own) : own_(own) {}
  // "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"; what it may be called, best first.
  std::vector<std::string> hugging_face(std::string_view name) const;
  std::vector<std::string> gguf(std::string_view name) const;

 private:
  std::span<const TensorName> own_;
};

// Of a folder as Mistral publishes it.
TensorNames mistral_names();

}  // namespace kvasir::model
