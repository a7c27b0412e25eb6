// An adapter's modules at the network's weights: found by the names that its kind of file has for them, their shapes
// checked, their rows in the order of the weights'.
#pragma once

#include <vector>

#include "model/arch/registry.h"
#include "model/formats/adapter_file.h"

namespace kvasir::model {

// What it gives points into `file`, but for what was copied: rows in another order, a rank's columns.
Result<std::vector<LowRank>> place_adapter(const AdapterFile& file, const ModelConfig& config, const Network& network);

}  // namespace kvasir::model
