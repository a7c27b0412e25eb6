// How a weight will lie on a GPU, by its parts alone. Nothing here needs one: `kvasir inspect` counts by it anywhere.
#pragma once

#include <span>

#include "model/cuda/packing.h"
#include "model/formats/weights.h"

namespace kvasir::model::cuda {

enum class Quantize : uint8_t { as_stored, bf16, fp8 };

struct PackingChoice {
  Packing packing = Packing::bf16;
  int64_t rows = 0, cols = 0;
  int64_t bytes = 0;
};
// Of the parts stacked by rows. Quantized ones stay packed where they can, E4M3 with a scale for each 128 elements too;
// fp8 is for the matrices of layers, each row with a scale of its own; all else is bfloat16. `packs`: the device
// multiplies packed ones, as Hopper does.
PackingChoice choose_packing(std::span<const HostTensor> parts, Quantize quantize, bool packs);

// Of an expert, whose weights become tiles of bfloat16 (or of MXFP4, where they are that).
bool of_expert(const HostTensor& t);

}  // namespace kvasir::model::cuda
