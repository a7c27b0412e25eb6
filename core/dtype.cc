#include "core/dtype.h"

namespace kvasir {

const char* dtype_name(DType type) {
  switch (type) {
    case DType::f32: return "float32";
    case DType::f16: return "float16";
    case DType::bf16: return "bfloat16";
    case DType::f8_e4m3: return "float8_e4m3";
    case DType::i8: return "int8";
    case DType::i4: return "int4";
    case DType::i32: return "int32";
    case DType::i64: return "int64";
    case DType::u8: return "uint8";
  }
  return "?";
}

bool parse_dtype(std::string_view name, DType* out) {
  struct Alias {
    std::string_view name;
    DType type;
  };
  static constexpr Alias aliases[] = {
      {"float32", DType::f32}, {"f32", DType::f32},
      {"fp32", DType::f32},    {"float16", DType::f16},
      {"f16", DType::f16},     {"fp16", DType::f16},
      {"half", DType::f16},    {"bfloat16", DType::bf16},
      {"bf16", DType::bf16},   {"float8_e4m3", DType::f8_e4m3},
      {"fp8", DType::f8_e4m3}, {"fp8_e4m3", DType::f8_e4m3},
      {"int8", DType::i8},     {"i8", DType::i8},
      {"int4", DType::i4},     {"i4", DType::i4},
      {"int32", DType::i32},   {"int64", DType::i64},
      {"uint8", DType::u8},
  };
  for (const Alias& a : aliases)
    if (a.name == name) {
      *out = a.type;
      return true;
    }
  return false;
}

}  // namespace kvasir
