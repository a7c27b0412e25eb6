// GGUF v2 and v3, memory-mapped. Everything a file claims is checked against the bytes it has before it
// is believed: no allocation is larger than the file justifies.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/status.h"
#include "model/formats/mapped_file.h"
#include "model/formats/weight_type.h"

namespace kvasir::model {

enum class GgufKind : uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64 };

// A metadata value, still in the file.
struct GgufValue {
  GgufKind kind = GgufKind::u8;
  GgufKind element = GgufKind::u8;  // of an array
  uint64_t count = 1;               // of an array
  const uint8_t* data = nullptr;    // the first element (a string starts with its length)
  size_t size = 0;                  // bytes of all elements
};

struct GgufTensor {
  std::string_view name;
  WeightType type = WeightType::f32;
  int64_t dims[4] = {1, 1, 1, 1};  // dims[0] runs fastest
  int64_t offset = 0;              // from the start of the file
  int64_t bytes = 0;
  int file = 0;  // of a split model
  const uint8_t* data = nullptr;
};

class Gguf {
 public:
  // Also the other files when `path` is NAME-00001-of-0000N.gguf.
  static Result<std::unique_ptr<Gguf>> open(const std::string& path);
  // One file's bytes that outlive the reader (fuzzing, tests).
  static Result<std::unique_ptr<Gguf>> parse(std::string name, std::span<const uint8_t> bytes);

  uint32_t version() const { return version_; }
  const std::vector<std::pair<std::string_view, GgufValue>>& metadata() const { return metadata_; }
  const std::vector<GgufTensor>& tensors() const { return tensors_; }
  const GgufTensor* tensor(std::string_view name) const;
  const GgufValue* value(std::string_view key) const;

  // nullopt when the key is absent or of another kind; integers convert when they fit.
  std::optional<int64_t> integer(std::string_view key) const;
  std::optional<double> number(std::string_view key) const;
  std::optional<bool> boolean(std::string_view key) const;
  std::optional<std::string_view> string(std::string_view key) const;
  std::vector<std::string> strings(std::string_view key) const;
  std::vector<float> floats(std::string_view key) const;
  std::vector<int32_t> integers(std::string_view key) const;

  void release(const GgufTensor& tensor) const;
  const std::string& name() const { return name_; }

 private:
  Status read(const std::string& name, std::span<const uint8_t> bytes, int file);

  std::string name_;
  uint32_t version_ = 0;
  std::vector<std::shared_ptr<MappedFile>> files_;
  std::vector<std::pair<std::string_view, GgufValue>> metadata_;
  std::vector<GgufTensor> tensors_;
  std::unordered_map<std::string_view, size_t> keys_, names_;
};

}  // namespace kvasir::model
