// What configuration files say of a mixture of experts; every family has these keys by the same names.
#pragma once

#include "model/config_keys.h"

namespace kvasir::model {

Status read_experts(const JsonKeys& in, ModelConfig& config);
Status read_experts(const GgufKeys& in, ModelConfig& config);

}  // namespace kvasir::model
