// The boundary: every shape, range and invariant of docs/attention-ops.md, checked on the host before
// anything is written. Errors name the tensor, the index, the value and the limit. Back ends call these
// from create() and plan(); run() validates nothing.
#pragma once

#include "attention/backend.h"
#include "attention/params.h"
#include "core/status.h"

namespace kvasir::attention {

Status validate_attributes(const Attributes& attributes, const Limits& limits);

// One step: starts, lengths, scalars, every index that attention will read or write, and that no slot
// is written twice. Index entries past kvlen or wholly behind a window are not looked at.
enum class PageStarts { anywhere, multiples };  // of page_size: all that a back end which numbers pages can take
Status validate_step(const Attributes& attributes, const Limits& limits, const Step& step,
                     PageStarts starts = PageStarts::anywhere);

// A cache against the attributes that will use it: geometry, dtype, quantization, strides in range.
Status validate_cache(const Attributes& attributes, const kvcache::CacheView& cache, int32_t layer);

// The pointers of one layer: what the attributes ask for is there.
Status validate_tensors(const Attributes& attributes, const Tensors& tensors);
Status validate_tensors(const Attributes& attributes, const KvcTensors& tensors);

}  // namespace kvasir::attention
