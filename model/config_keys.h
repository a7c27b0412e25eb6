// The keys of a config.json and of a GGUF file's metadata as an architecture reads them. Each remembers what was read:
// a key that changes numbers and that nobody read is refused by its name, and one that nobody knows is warned of.
#pragma once

#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/cat.h"
#include "core/status.h"
#include "model/config.h"
#include "model/formats/gguf.h"

namespace kvasir::model {

// One object of config.json. A key may have several names: the first that is there counts.
class JsonKeys {
 public:
  using Names = std::initializer_list<const char*>;
  JsonKeys(const nlohmann::json& object, std::string file) : object_(object), file_(std::move(file)) {}

  // Null where there is none, or null itself.
  const nlohmann::json* find(const char* key) const;
  bool has(const char* key) const { return find(key) != nullptr; }
  Status need(Names keys, int32_t* out) const;
  Status get(Names keys, int32_t* out) const;
  Status get(Names keys, double* out) const;
  Status get(Names keys, float* out) const;
  Status get(const char* key, bool* out) const;
  Status get(const char* key, std::vector<float>* out) const;
  std::string text(const char* key) const;
  // Read by this architecture only so: any other value is refused.
  Status only(const char* key, const char* value) const;
  void pass_over(Names keys) const;

  Status wrong(std::string_view key, std::string_view want) const;
  const std::string& file() const { return file_; }
  // What was not read and is not known to be harmless.
  Status judge_unread(std::string_view architecture) const;

 private:
  const nlohmann::json& object_;
  std::string file_;
  mutable std::set<std::string, std::less<>> read_;
};

// The metadata under "ARCHITECTURE.".
class GgufKeys {
 public:
  GgufKeys(const Gguf& gguf, std::string prefix) : gguf_(gguf), prefix_(std::move(prefix)) {}

  const Gguf& file() const { return gguf_; }
  std::string key(std::string_view field) const { return cat(prefix_, ".", field); }
  const GgufValue* find(std::string_view field) const;
  bool has(std::string_view field) const { return find(field) != nullptr; }
  Status need(std::string_view field, int32_t* out) const;
  Status get(std::string_view field, int32_t* out) const;
  Status get(std::string_view field, int64_t* out) const;
  Status get(std::string_view field, double* out) const;
  Status get(std::string_view field, float* out) const;
  Status get(std::string_view field, bool* out) const;
  std::string text(std::string_view field) const;
  // The values of a tensor of float32, as long as it says; empty where there is none.
  Result<std::vector<float>> tensor(std::string_view name) const;
  void pass_over(std::initializer_list<std::string_view> fields) const;

  Status judge_unread() const;

 private:
  const Gguf& gguf_;
  std::string prefix_;
  mutable std::set<std::string, std::less<>> read_;
};

}  // namespace kvasir::model
