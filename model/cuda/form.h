#pragma once

#include <cstdint>

namespace kvasir::model::cuda {

// What the sums of a product become: float32 (`added`: to what was there) or bfloat16; the last two are sums of a gate
// and of what it lets through, joined.
enum class Form : uint8_t { f32, added_f32, bf16, silu, gelu };

}  // namespace kvasir::model::cuda
