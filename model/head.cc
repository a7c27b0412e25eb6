#include "model/head.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/cat.h"
#include "model/arch/registry.h"
#include "model/formats/mapped_file.h"
#include "model/formats/safetensors.h"
#include "model/load.h"

namespace kvasir::model {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
constexpr size_t kMostJson = 1 << 20;

// As EAGLE's authors and SpecForge have it ("midlayer"), and as vLLM's speculators do.
constexpr TensorName kEagle3[] = {
    {"fc", "fc"},
    {"blk.#.hidden_norm", "midlayer.hidden_norm"},
    {"blk.#.hidden_norm", "model.layers.#.hidden_norm"},
    {"blk.#.attn_norm", "midlayer.input_layernorm"},
    {"blk.#.attn_norm", "model.layers.#.input_layernorm"},
    {"blk.#.attn_q", "midlayer.self_attn.q_proj"},
    {"blk.#.attn_q", "model.layers.#.self_attn.q_proj"},
    {"blk.#.attn_k", "midlayer.self_attn.k_proj"},
    {"blk.#.attn_k", "model.layers.#.self_attn.k_proj"},
    {"blk.#.attn_v", "midlayer.self_attn.v_proj"},
    {"blk.#.attn_v", "model.layers.#.self_attn.v_proj"},
    {"blk.#.attn_output", "midlayer.self_attn.o_proj"},
    {"blk.#.attn_output", "model.layers.#.self_attn.o_proj"},
    {"blk.#.ffn_norm", "midlayer.post_attention_layernorm"},
    {"blk.#.ffn_norm", "model.layers.#.post_attention_layernorm"},
    {"blk.#.ffn_gate", "midlayer.mlp.gate_proj"},
    {"blk.#.ffn_gate", "model.layers.#.mlp.gate_proj"},
    {"blk.#.ffn_up", "midlayer.mlp.up_proj"},
    {"blk.#.ffn_up", "model.layers.#.mlp.up_proj"},
    {"blk.#.ffn_down", "midlayer.mlp.down_proj"},
    {"blk.#.ffn_down", "model.layers.#.mlp.down_proj"},
};

std::string config_path(const std::string& folder) { return (fs::path(folder) / "config.json").string(); }

// A folder's config.json; null where there is none that can be read.
json read_config(const std::string& folder) {
  std::error_code error;
  if (!fs::is_directory(folder, error)) return {};
  auto file = MappedFile::open(config_path(folder));
  if (!file.ok() || (*file)->bytes().size() > kMostJson) return {};
  const auto bytes = (*file)->bytes();
  bool deep = false;
  json out = json::parse(
      bytes.begin(), bytes.end(), [&](int depth, json::parse_event_t, json&) { return !(deep |= depth > 16); }, false);
  return out.is_object() && !deep ? out : json();
}

std::string architecture_of(const json& config) {
  const auto a = config.find("architectures");
  return a != config.end() && a->is_array() && !a->empty() && (*a)[0].is_string() ? (*a)[0].get<std::string>() : "";
}

// The keys of a head's config.json that are no decoder's.
struct EagleKeys {
  json decoder;  // the rest
  int32_t drawn = 0, model_hidden = 0;
  bool norm_before_residual = false;
  std::optional<std::vector<int32_t>> kept;
};

Status read_layers(const JsonKeys& in, int32_t shift, EagleKeys& out) {
  const json* ids = in.find("eagle_aux_hidden_state_layer_ids");
  if (!ids) return {};
  if (!ids->is_array() || ids->size() != 3) return in.wrong("eagle_aux_hidden_state_layer_ids", "three layers");
  out.kept.emplace();
  for (const json& id : *ids) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() > 1024)
      return in.wrong("eagle_aux_hidden_state_layer_ids", "three layers");
    out.kept->push_back(id.get<int32_t>() + shift);
  }
  return {};
}

// Beside the other keys a layer is counted by what enters it; in `eagle_config` by what leaves it (so vLLM reads the
// one, and SGLang the other).
Result<EagleKeys> read_keys(json root, const std::string& file) {
  const JsonKeys in(root, file);
  EagleKeys out;
  const bool speculators = root.contains("speculators_model_type");
  out.norm_before_residual = speculators;
  KVASIR_TRY(in.get({"draft_vocab_size"}, &out.drawn));
  KVASIR_TRY(in.get({"target_hidden_size"}, &out.model_hidden));
  KVASIR_TRY(in.get("norm_before_residual", &out.norm_before_residual));
  KVASIR_TRY(read_layers(in, 0, out));
  if (const json* more = in.find("eagle_config"); more && more->is_object()) {
    const JsonKeys eagle(*more, file);
    bool states = true;
    KVASIR_TRY(eagle.get("use_aux_hidden_state", &states));
    if (!states)
      return invalid_argument(cat(file,
                                  ": eagle_config has use_aux_hidden_state false; a head that reads the states "
                                  "of three layers is supported (EAGLE-3)"));
    KVASIR_TRY(read_layers(eagle, 1, out));
  }
  for (const char* key : {"norm_before_fc", "norm_output", "parallel_drafting"})
    if (const json* v = in.find(key); v && *v == true)
      return invalid_argument(cat(file, ": ", key, " is true, which is not supported"));
  if (!speculators) {
    for (const char* key : {"draft_vocab_size", "target_hidden_size", "norm_before_residual", "eagle_config",
                            "eagle_aux_hidden_state_layer_ids", "norm_before_fc", "norm_output", "parallel_drafting"})
      root.erase(key);
    out.decoder = std::move(root);
    return out;
  }
  if (!root.contains("transformer_layer_config") || !root["transformer_layer_config"].is_object())
    return invalid_argument(cat(file, ": transformer_layer_config is missing"));
  out.decoder = root["transformer_layer_config"];
  out.decoder["num_hidden_layers"] = 1;
  return out;
}

Status of_one_layer(const json& decoder, const std::string& file) {
  const auto key = decoder.find("model_type");
  const std::string type = key == decoder.end() ? "llama" : key->is_string() ? key->get<std::string>() : "";
  if (type != "llama")
    return invalid_argument(
        cat(file, ": model_type is '", type.substr(0, 64), "'; EAGLE-3 heads of Llama's kind are supported (llama)"));
  const auto layers = decoder.find("num_hidden_layers");
  if (layers == decoder.end() || *layers == 1) return {};
  return invalid_argument(cat(file, ": num_hidden_layers is not 1; EAGLE-3 heads of one layer are supported"));
}

// Which token of the model each of the head's own is: itself and so many on.
Result<std::vector<int32_t>> read_tokens(const std::string& folder, const Weights& weights, int32_t drawn,
                                         int32_t known) {
  std::vector<int32_t> out;
  const std::vector<HostTensor> all = weights.tensors();
  const auto d2t = std::find_if(all.begin(), all.end(), [](const HostTensor& t) { return t.name == "d2t"; });
  if (d2t == all.end()) {
    if (drawn == known) return out;
    return invalid_argument(cat(folder, ": the tensor d2t is missing, which says what the ", drawn,
                                " tokens of the head are among the model's ", known));
  }
  if (d2t->type != WeightType::i64 || d2t->rows != 1 || d2t->cols != drawn)
    return invalid_argument(cat(folder, ": tensor d2t must be ", drawn, " numbers of I64 (draft_vocab_size)"));
  out.reserve(size_t(drawn));
  for (int64_t i = 0; i < drawn; ++i) {
    int64_t on = 0;
    std::memcpy(&on, d2t->data + 8 * i, 8);
    if (on < -i || on >= known - i)
      return invalid_argument(
          cat(folder, ": tensor d2t says that token ", i, " is one ", on, " on, and the model's are 0 to ", known - 1));
    out.push_back(int32_t(i + on));
  }
  return out;
}

Status check_against_model(const std::string& file, const EagleKeys& keys, const ModelConfig& head,
                           const ModelConfig& model) {
  const int32_t hidden = keys.model_hidden > 0 ? keys.model_hidden : head.hidden;
  if (hidden != model.hidden)
    return invalid_argument(cat(file, ": ", keys.model_hidden > 0 ? "target_hidden_size" : "hidden_size", " is ",
                                hidden, ", the model's is ", model.hidden, ": the head was made for another model"));
  if (head.vocab != model.vocab)
    return invalid_argument(cat(file, ": vocab_size is ", head.vocab, ", the model's is ", model.vocab,
                                ": the head was made for another model"));
  if (keys.drawn < 1 || keys.drawn > model.vocab)
    return invalid_argument(
        cat(file, ": draft_vocab_size is ", keys.drawn, "; it must be from 1 to vocab_size, which is ", model.vocab));
  for (int32_t layer : *keys.kept)
    if (layer < 0 || layer > model.layers)
      return invalid_argument(cat(file, ": eagle_aux_hidden_state_layer_ids names what enters layer ", layer,
                                  "; the model has ", model.layers, " layers"));
  return {};
}

// A layer behind the model's own, as the decoder of one layer that a head is.
class NextLayerWeights final : public Weights {
 public:
  NextLayerWeights(std::unique_ptr<Weights> all, int32_t layer) : all_(std::move(all)), layer_(layer) {}

  bool has(std::string_view name) const override { return all_->has(renamed(name)); }
  Result<HostTensor> get(std::string_view name, int64_t rows, int64_t cols) override {
    return all_->get(renamed(name), rows, cols);
  }
  void release(const HostTensor& tensor) override { all_->release(tensor); }
  int64_t parameters() const override {
    int64_t out = 0;
    for (const HostTensor& t : tensors()) out += t.rows * t.cols;
    return out;
  }
  int64_t bytes() const override {
    int64_t out = 0;
    for (const HostTensor& t : tensors()) out += t.bytes;
    return out;
  }
  std::vector<HostTensor> tensors() const override {
    std::vector<HostTensor> out = all_->tensors();
    std::erase_if(out, [this](const HostTensor& t) {
      return t.name.find(cat("layers.", layer_, ".")) == std::string::npos &&
             !t.name.starts_with(cat("blk.", layer_, "."));
    });
    return out;
  }

 private:
  std::string renamed(std::string_view name) const {
    if (name.starts_with("blk.0.")) return cat("blk.", layer_, ".", name.substr(6));
    if (name.starts_with("token_embd.")) return cat("blk.", layer_, ".nextn.embed_tokens", name.substr(10));
    if (name.starts_with("output_norm.")) return cat("blk.", layer_, ".nextn.shared_head_norm", name.substr(11));
    if (name.starts_with("output.")) return cat("blk.", layer_, ".nextn.shared_head_head", name.substr(6));
    return cat("blk.", layer_, ".nextn.", name);
  }

  const std::unique_ptr<Weights> all_;
  const int32_t layer_;
};

}  // namespace

bool is_eagle3(const std::string& folder) {
  const json config = read_config(folder);
  if (config.is_null()) return false;
  // Its authors' folders say LlamaForCausalLM, and how many tokens it draws.
  return architecture_of(config).find("Eagle3") != std::string::npos || config.contains("draft_vocab_size");
}

Result<HeadFiles> open_eagle3(const std::string& folder, const ModelConfig& model) {
  const std::string file = config_path(folder);
  const json root = read_config(folder);
  if (root.is_null()) return invalid_argument(cat(file, " is not a JSON object we can read"));
  KVASIR_ASSIGN(EagleKeys keys, read_keys(root, file));
  KVASIR_TRY(of_one_layer(keys.decoder, file));
  keys.decoder["model_type"] = "llama";
  HeadFiles out;
  HeadConfig& c = out.config;
  KVASIR_ASSIGN(c.decoder, config_from_json(keys.decoder.dump(), file));
  if (keys.drawn == 0) keys.drawn = c.decoder.vocab;
  // Where nothing is said: a low, a middle and a high one.
  if (!keys.kept) keys.kept = {std::min(2, model.layers), model.layers / 2, std::max(0, model.layers - 3)};
  KVASIR_TRY(check_against_model(file, keys, c.decoder, model));
  KVASIR_ASSIGN(out.weights, open_safetensors(folder, false, TensorNames(kEagle3)));
  c.eagle = true;
  c.norm_before_residual = keys.norm_before_residual;
  c.kept = *keys.kept;
  c.known_tokens = model.vocab;
  c.given = 3 * model.hidden;
  KVASIR_ASSIGN(c.token_of, read_tokens(folder, *out.weights, keys.drawn, model.vocab));
  c.decoder.vocab = keys.drawn;
  c.decoder.context = model.context;  // places are counted from one another, whatever it was trained on
  c.decoder.rope.configured_context = model.context;
  c.decoder.qkv_input = 2 * c.decoder.hidden;
  c.decoder.name = fs::path(folder).filename().string();
  if (c.decoder.name.empty()) c.decoder.name = fs::path(folder).parent_path().filename().string();
  return out;
}

Result<HeadFiles> open_next_layer(const std::string& path, const ModelConfig& model) {
  HeadFiles out;
  if (model.next_layers < 1) return out;
  KVASIR_ASSIGN(ModelFiles files, open_model(path));
  auto weights = std::make_unique<NextLayerWeights>(std::move(files.weights), model.layers);
  if (!weights->has("eh_proj.weight")) return out;  // who converted them has left the layer out
  HeadConfig& c = out.config;
  c.decoder = model;
  c.decoder.layers = 1;
  c.decoder.next_layers = 0;
  c.decoder.layer_kinds.clear();
  c.decoder.experts.dense.clear();
  c.decoder.kv = {};
  c.decoder.name = cat(model.name, ", layer ", model.layers);
  c.known_tokens = model.vocab;
  c.given = model.hidden;
  c.kept = {kLastState};
  out.weights = std::move(weights);
  return out;
}

Result<HeadFiles> open_head(const std::string& folder, const std::string& path, const ModelConfig& model,
                            int32_t ranks) {
  KVASIR_ASSIGN(HeadFiles files, folder.empty() ? open_next_layer(path, model) : open_eagle3(folder, model));
  if (files.weights && ranks > 1)
    return unimplemented(cat("ranks is ", ranks, "; a head drafts for a model that is not split: --ranks 1"));
  return files;
}

void HeadConfig::describe(int64_t places, ModelInfo* info) const {
  info->vocab_size = known_tokens;
  info->kept = decoder.hidden, info->given = given, info->places = places;
}

void name_tokens(const std::vector<int32_t>& token_of, std::vector<Sampled>& drawn) {
  if (token_of.empty()) return;
  auto named = [&](int32_t& token) {
    if (token >= 0) token = token_of[size_t(token)];
  };
  for (Sampled& s : drawn) {
    named(s.token);
    for (TokenLogprob& t : s.top) named(t.token);
  }
}

}  // namespace kvasir::model
