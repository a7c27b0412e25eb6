#pragma once

#include <cstdint>

namespace kvasir::model::cuda {

// What the sums of a product become: float32 (`added`: to what was there) or bfloat16; those of a gate and of what it
// lets through are fused by the last three: as one bfloat16, or not yet (`apart`: both in float32, all gates first).
enum class Form : uint8_t { f32, added_f32, bf16, silu, gelu, apart };
constexpr bool fuses_gates(Form f) { return f == Form::silu || f == Form::gelu || f == Form::apart; }

}  // namespace kvasir::model::cuda
