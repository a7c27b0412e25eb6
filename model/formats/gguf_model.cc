#include "model/formats/gguf_model.h"

#include <set>

#include "core/cat.h"

namespace kvasir::model {
namespace {

class GgufWeights final : public Weights {
 public:
  GgufWeights(std::shared_ptr<const Gguf> gguf, TensorNames names) : gguf_(std::move(gguf)), names_(names) {}

  bool has(std::string_view name) const override { return find(name) != nullptr; }

  Result<HostTensor> get(std::string_view ours, int64_t rows, int64_t cols) override {
    const GgufTensor* t = find(ours);
    if (!t) return invalid_argument(cat(gguf_->name(), ": the tensor ", names_.gguf(ours).front(), " is missing"));
    const std::string name(t->name);
    read_.insert(t->name);
    // Experts' matrices in one tensor are the rows of them all.
    if (t->dims[0] != cols || rows % t->dims[1] != 0 || t->dims[2] != rows / t->dims[1] || t->dims[3] != 1)
      return invalid_argument(cat(gguf_->name(), ": tensor ", name, " at byte ", t->offset, " is ", t->dims[0], " x ",
                                  t->dims[1], " x ", t->dims[2], " x ", t->dims[3],
                                  "; the model's configuration wants ", cols, " x ", rows));
    return HostTensor{name, t->type, rows, cols, t->data, t->bytes};
  }

  void release(const HostTensor& tensor) override {
    const GgufTensor* t = gguf_->tensor(tensor.name);
    if (!t) return;
    GgufTensor part = *t;  // perhaps one expert's
    part.data = tensor.data, part.bytes = tensor.bytes;
    gguf_->release(part);
  }

  std::vector<std::string> unread() const override {
    std::vector<std::string> out;
    for (const GgufTensor& t : gguf_->tensors())
      if (!read_.count(t.name) && !t.name.starts_with("rope_f")) out.emplace_back(t.name);
    return out;
  }

  int64_t parameters() const override {
    int64_t n = 0;
    for (const GgufTensor& t : gguf_->tensors()) n += t.dims[0] * t.dims[1] * t.dims[2] * t.dims[3];
    return n;
  }
  int64_t bytes() const override {
    int64_t n = 0;
    for (const GgufTensor& t : gguf_->tensors()) n += t.bytes;
    return n;
  }

  std::vector<HostTensor> tensors() const override {
    std::vector<HostTensor> out;
    for (const GgufTensor& t : gguf_->tensors())
      out.push_back({std::string(t.name), t.type, t.dims[1] * t.dims[2] * t.dims[3], t.dims[0], t.data, t.bytes});
    return out;
  }

 private:
  const GgufTensor* find(std::string_view ours) const {
    for (const std::string& name : names_.gguf(ours))
      if (const GgufTensor* t = gguf_->tensor(name)) return t;
    return nullptr;
  }

  std::shared_ptr<const Gguf> gguf_;
  TensorNames names_;
  std::set<std::string_view> read_;
};

}  // namespace

std::unique_ptr<Weights> gguf_weights(std::shared_ptr<const Gguf> gguf, TensorNames names) {
  return std::make_unique<GgufWeights>(std::move(gguf), names);
}

Result<text::GgufVocab> gguf_vocab(const Gguf& gguf) {
  text::GgufVocab v;
  auto model = gguf.string("tokenizer.ggml.model");
  if (!model) return invalid_argument(cat(gguf.name(), ": the key tokenizer.ggml.model is missing"));
  v.model = *model;
  v.pre = gguf.string("tokenizer.ggml.pre").value_or("");
  v.tokens = gguf.strings("tokenizer.ggml.tokens");
  if (v.tokens.empty())
    return invalid_argument(cat(gguf.name(), ": the key tokenizer.ggml.tokens is missing or empty"));
  v.scores = gguf.floats("tokenizer.ggml.scores");
  v.types = gguf.integers("tokenizer.ggml.token_type");
  v.merges = gguf.strings("tokenizer.ggml.merges");
  if (!v.types.empty() && v.types.size() != v.tokens.size())
    return invalid_argument(cat(gguf.name(), ": ", v.types.size(), " token types for ", v.tokens.size(), " tokens"));
  if (!v.scores.empty() && v.scores.size() != v.tokens.size())
    return invalid_argument(cat(gguf.name(), ": ", v.scores.size(), " token scores for ", v.tokens.size(), " tokens"));
  for (auto [key, id] : {std::pair<const char*, int32_t*>{"bos_token_id", &v.bos},
                         {"eos_token_id", &v.eos},
                         {"unknown_token_id", &v.unk},
                         {"eot_token_id", &v.eot},
                         {"padding_token_id", &v.pad}}) {
    std::string full = cat("tokenizer.ggml.", key);
    auto n = gguf.integer(full);
    if (n && (*n < 0 || *n >= int64_t(v.tokens.size())))
      return invalid_argument(cat(gguf.name(), ": ", full, " is ", *n, "; the vocabulary has ", v.tokens.size()));
    if (n) *id = int32_t(*n);
  }
  v.add_bos = gguf.boolean("tokenizer.ggml.add_bos_token").value_or(v.model == "llama");
  const bool t5 = v.model == "t5";  // llama.cpp's converter leaves out what all of them are
  v.add_eos = gguf.boolean("tokenizer.ggml.add_eos_token").value_or(t5);
  if (t5 && v.tokens.size() > 2) {
    if (v.eos < 0) v.eos = 1;
    if (v.unk < 0) v.unk = 2;
  }
  v.remove_extra_spaces = gguf.boolean("tokenizer.ggml.remove_extra_whitespaces").value_or(false);
  if (const GgufValue* map = gguf.value("tokenizer.ggml.precompiled_charsmap")) {
    if (map->kind != GgufKind::array || (map->element != GgufKind::u8 && map->element != GgufKind::i8))
      return invalid_argument(cat(gguf.name(), ": tokenizer.ggml.precompiled_charsmap must be a list of bytes"));
    v.charsmap.assign(map->data, map->data + map->count);
  }
  v.add_space_prefix = gguf.boolean("tokenizer.ggml.add_space_prefix").value_or(true);
  v.chat_template = gguf.string("tokenizer.chat_template").value_or("");
  return v;
}

}  // namespace kvasir::model
