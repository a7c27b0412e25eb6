// The architectures this program knows: each one short file that says what its weights are called, how
// they split over ranks, and how a step flows through the device operations.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "core/status.h"
#include "model/config.h"
#include "model/formats/weights.h"
#include "model/ops.h"

namespace kvasir::model {

class Network {
 public:
  virtual ~Network() = default;
  // One packed step, all layers.
  virtual Status forward() = 0;
  // Afterwards, as often as wanted: the logits of `count` of the step's logit rows, from `first`, into this.
  virtual Result<Buffer> logits(int64_t first, int64_t count) = 0;
};

// Loading tells how far it is, in [0,1].
struct LoadProgress {
  void (*call)(void* context, const char* phase, double fraction) = nullptr;
  void* context = nullptr;
  void operator()(const char* phase, double fraction) const {
    if (call) call(context, phase, fraction);
  }
};

struct Architecture {
  std::string_view name;
  // Defaults that only this architecture knows (Gemma's embedding scale, ...).
  void (*adjust)(ModelConfig& config);
  Result<std::unique_ptr<Network>> (*load)(const ModelConfig&, Weights&, Ops&, const LoadProgress&);
};

const Architecture* find_architecture(std::string_view name);
std::string known_architectures();  // "llama, mistral, gemma3"

}  // namespace kvasir::model
