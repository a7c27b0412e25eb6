// NumPy's .npy files: the part of the format that stored cases use (C order, little endian, plain types).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/status.h"

namespace kvasir::attention {

struct NpyArray {
  std::string descr;  // "<f4", "|u1", ...
  std::vector<int64_t> shape;
  std::vector<uint8_t> data;

  int64_t elements() const;
  std::string shape_text() const;  // "(3, 4)"
};

const char* descr_of(DType type);  // of arrays of such elements; unsigned where NumPy has no such type
constexpr int npy_item_bytes(char digit) { return digit - '0'; }

// `name` is what messages call it. The header must describe exactly the bytes that follow it.
Result<NpyArray> parse_npy(const std::string& name, const uint8_t* bytes, size_t size);
std::vector<uint8_t> format_npy(const NpyArray& array);

}  // namespace kvasir::attention
