// Does a back end's result of a case agree with the reference, by section 9 of docs/attention-ops.md?
#pragma once

#include "attention/cases/case.h"

namespace kvasir::attention {

// `after` is the case with the cache and scale as the back end left them, `got` what it gave; `before`
// is the case as it was. Empty: all right; else the first thing that is wrong.
//   cache and scale   every byte, untouched ones too; with rope or bias within one step of the type
//   lse               to float32's precision, plus lse_slack where operands are 16-bit
//   outputs           ||got - ref|| <= r ||ref|| for each row, over the cache the back end left
std::string compare_with_reference(const Case& before, const Case& after, const CaseOutput& got, double widen = 1,
                                   double lse_slack = 0);

// The r of an output type.
double row_tolerance(DType out);

}  // namespace kvasir::attention
