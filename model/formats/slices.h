// Parts of tensors, as a rank has them.
#pragma once

#include <functional>

#include "core/status.h"
#include "model/formats/weights.h"
#include "model/ranks.h"

namespace kvasir::model {

// Rows [first, first + count): the same data.
HostTensor rows_of(const HostTensor& tensor, int64_t first, int64_t count);
// Columns, copied. Refused where they begin or end inside a block.
Result<HostTensor> columns_of(const HostTensor& tensor, const Share& share);

// Row i is row from(i) of the tensor; of a vector, number i.
HostTensor reordered(HostTensor tensor, const std::function<int64_t(int64_t)>& from);

}  // namespace kvasir::model
