// A decoder of which most layers are of linear attention by the gated delta rule, and the others of full attention
// whose output is gated (Qwen 3 Next, Qwen 3.5).
#pragma once

#include <memory>
#include <vector>

#include "model/arch/decoder.h"

namespace kvasir::model {

Result<std::unique_ptr<Network>> load_hybrid(const ModelConfig& config, Weights& weights, Ops& ops,
                                             const LoadProgress& progress);

}  // namespace kvasir::model
