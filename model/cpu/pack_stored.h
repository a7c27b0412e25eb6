// Files' blocks into the narrow planes of stored.h, and a row of those as floats.
#pragma once

#include "model/cpu/packed.h"

namespace kvasir::model::cpu {

// Row r of a group that is zeros, from its file form.
void store_row(const PackedMatrix& m, uint8_t* group, int r, WeightType type, const uint8_t* row);

void unpack_stored_row(const PackedMatrix& m, int64_t row, float scale, float* out);

}  // namespace kvasir::model::cpu
