// Files' blocks into the narrow planes of stored.h, and a row of those as floats.
#pragma once

#include <span>

#include "model/cpu/packed.h"

namespace kvasir::model::cpu {

// Fills sections with the parts, whose rows are multiplied in the matrix's packing; its shape is known.
void store(std::span<const HostTensor> parts, bool exact, bool beside, Arena& arena, ThreadPool& pool, PackedMatrix* m);

void unpack_stored_row(const PackedMatrix& m, int64_t row, float scale, float* out);

}  // namespace kvasir::model::cpu
