// Weights of four bits as folders have them: 32-bit words of eight, with scales and zeros by groups of inputs; GPTQ
// also of eight bits, four in a word.
//   AWQ                 words [inputs, outputs / 8], outputs in the order 0 2 4 6 1 3 5 7; zeros [groups, outputs / 8]
//   alike GPTQ                words [inputs / 8, outputs]; zeros [groups, outputs / 8]; the group of each input where
//   they are mixed compressed-tensors  words [outputs, inputs / 8]; zeros [outputs / 8, groups], 8 where there are none
#pragma once

#include <cstdint>

#include "core/status.h"
#include "model/formats/weights.h"

namespace kvasir::model {

struct Int4 {
  enum class Form : uint8_t { awq, gptq, packed };
  Form form = Form::packed;
  int bits = 4;
  int64_t rows = 0, cols = 0, groups = 0;  // outputs, inputs
  const uint8_t* words = nullptr;
  const uint8_t* zeros = nullptr;     // null: 8
  int32_t zero_shift = 0;             // added to zeros: the first GPTQ stored one less
  const uint8_t* group_of = nullptr;  // 32-bit integers; null: as many inputs each
  WeightType scale_type = WeightType::f16;
  const uint8_t* scales = nullptr;  // [groups, outputs], or [outputs, groups] where packed
};

// As rows of blocks (WeightType::int4; Q8_0 of eight bits where zeros are in the middle); as float16 where a block's
// inputs are of several groups. All sizes have been checked; a group that does not exist is refused.
Result<HostTensor> int4_tensor(const std::string& name, const Int4& from);

}  // namespace kvasir::model
