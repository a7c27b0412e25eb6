// case.json of a stored case: everything but the tensors.
#pragma once

#include "attention/cases/case.h"

namespace kvasir::attention {

struct CaseHead {
  Case c;
  int cache_mode = 0, quant_bit = 0;
  bool has_scale_dtype = false;
  int64_t max_seqlen = -1, max_kvlen = -1;  // -1: not given
};

Status read_case_json(const Bytes& text, CaseHead* head);

}  // namespace kvasir::attention
