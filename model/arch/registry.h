// The architectures this program knows: each one short file that says what its configuration files mean, what its
// tensors are called, and how a step flows where the decoder that they share (decoder.h) does not do.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "core/status.h"
#include "model/config.h"
#include "model/config_keys.h"
#include "model/formats/tensor_names.h"
#include "model/formats/weights.h"
#include "model/ops.h"

namespace kvasir::model {

// Where a projection that adapters may change lies: rows [first, first + rows) of a weight. Of several ranks: those
// that this one has of what the file has.
struct Projection {
  enum class Order : uint8_t {
    plain,
    heads,
    groups
  };                 // heads: q or k, whose rows some files permute; groups: qkv_by_group
  std::string name;  // "blk.3.attn_q"
  Matrix weight;
  int64_t first = 0, rows = 0;
  Order order = Order::plain;
  std::vector<Share> outputs;  // of the file's rows, piece by piece; empty: all of them
  Share inputs;                // of its columns
};

constexpr int32_t kLastState = -1;  // of Network::keep(): behind all layers and their norm

class Network {
 public:
  virtual ~Network() = default;
  // From here on each step hands over (Ops::keep) the stream as it enters each of these layers, side by side; behind
  // the last one it is the layer after it.
  virtual Status keep(std::vector<int32_t>) {
    return unimplemented("models of this architecture hand over no hidden states, which a head that drafts needs");
  }
  // What a head may share: the embedding, and what makes logits. None: ids -1.
  virtual Matrix embedding() const { return {}; }
  virtual Matrix head() const { return {}; }
  // None: it takes no adapters.
  virtual std::vector<Projection> projections() const { return {}; }
  // One packed step, all layers.
  virtual Status forward() = 0;
  // Afterwards, as often as wanted: the logits of `count` of the step's logit rows, from `first`, into this.
  virtual Result<Buffer> logits(int64_t first, int64_t count) = 0;
  // Likewise their last hidden states, before any head.
  virtual Result<Buffer> hidden(int64_t first, int64_t count) = 0;
};

// Loading tells how far it is, in [0,1].
struct LoadProgress {
  void (*call)(void* context, const char* phase, double fraction) = nullptr;
  void* context = nullptr;
  void operator()(const char* phase, double fraction) const {
    if (call) call(context, phase, fraction);
  }
};

// All but the first two may be left out: then it is Llama's.
struct Architecture {
  std::string_view name;               // also that of its GGUF files, where `gguf` names no other
  std::string_view models;             // what people know of it
  std::string_view gguf = {};          // general.architecture
  std::string_view hugging_face = {};  // model_type of config.json, where it is not `name`
  std::span<const TensorName> names = {};
  // Its converter to GGUF interleaves the halves of each head's q and k rows, so that RoPE (gptj style) rotates
  // neighbours.
  bool gguf_turns_neighbours = false;
  std::string_view json_defaults = {};  // an object: what its config.json says where it leaves a key out
  // What the family always is, before any key is read; then what its own keys say, those of every decoder having been
  // read; last what follows from all of them.
  void (*family)(ModelConfig& config) = nullptr;
  Status (*json)(const JsonKeys& in, ModelConfig& config) = nullptr;
  Status (*metadata)(const GgufKeys& in, ModelConfig& config) = nullptr;
  void (*derive)(ModelConfig& config) = nullptr;
  Result<std::unique_ptr<Network>> (*load)(const ModelConfig&, Weights&, Ops&, const LoadProgress&) = nullptr;
};

const Architecture* find_architecture(std::string_view name);
const Architecture* find_model_type(std::string_view model_type);      // of config.json
const Architecture* find_gguf_architecture(std::string_view general);  // of general.architecture
std::string known_architectures();                                     // "llama, mistral, gemma3"
std::span<const Architecture* const> architectures();

// What `config` names, with its weights; a tensor of theirs that it has no use for is warned of.
Result<std::unique_ptr<Network>> load_network(const ModelConfig& config, Weights& weights, Ops& ops,
                                              const LoadProgress& progress);

}  // namespace kvasir::model
