#include "model/formats/gguf.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <type_traits>

#include "core/cat.h"
#include "core/utf8.h"

namespace kvasir::model {
namespace {
constexpr size_t kKindBytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
constexpr uint64_t kMaxName = 512, kMaxKey = 65535;
constexpr int64_t kMaxAlignment = 1 << 20;

template <class T>
T load(const uint8_t* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

std::optional<int64_t> integer_at(GgufKind kind, const uint8_t* p) {
  switch (kind) {
    case GgufKind::u8: return *p;
    case GgufKind::i8: return load<int8_t>(p);
    case GgufKind::u16: return load<uint16_t>(p);
    case GgufKind::i16: return load<int16_t>(p);
    case GgufKind::u32: return load<uint32_t>(p);
    case GgufKind::i32: return load<int32_t>(p);
    case GgufKind::i64: return load<int64_t>(p);
    case GgufKind::u64:
      if (load<uint64_t>(p) <= uint64_t(INT64_MAX)) return int64_t(load<uint64_t>(p));
      return std::nullopt;
    default: return std::nullopt;
  }
}

// A cursor that cannot leave the file.
class FileReader {
 public:
  FileReader(const std::string& name, std::span<const uint8_t> bytes) : name_(name), bytes_(bytes) {}
  size_t at() const { return at_; }
  size_t left() const { return bytes_.size() - at_; }
  const uint8_t* here() const { return bytes_.data() + at_; }

  Status error(const std::string& what) const { return invalid_argument(cat(name_, " at byte ", at_, ": ", what)); }
  Status skip(uint64_t n, const char* what) {
    if (n > left()) return error(cat(what, " needs ", n, " bytes, the file has ", left(), " left"));
    at_ += size_t(n);
    return {};
  }
  template <class T>
  Status read(T* out, const char* what) {
    const uint8_t* p = here();
    KVASIR_TRY(skip(sizeof(T), what));
    *out = load<T>(p);
    return {};
  }
  Status read_string(std::string_view* out, uint64_t limit, const char* what) {
    uint64_t n = 0;
    KVASIR_TRY(read(&n, what));
    if (n > limit) return error(cat(what, " is ", n, " bytes long; the limit is ", limit));
    const char* p = reinterpret_cast<const char*>(here());
    KVASIR_TRY(skip(n, what));
    *out = {p, size_t(n)};
    return {};
  }
  // One that others are shown.
  Status read_name(std::string_view* out, uint64_t limit, const char* what) {
    KVASIR_TRY(read_string(out, limit, what));
    return is_utf8(*out) ? Status() : error(cat(what, " is not valid UTF-8"));
  }
  Status read_value(GgufValue* out) {
    uint32_t kind = 0;
    KVASIR_TRY(read(&kind, "a value's type"));
    if (kind > uint32_t(GgufKind::f64)) return error(cat("unknown metadata type ", kind));
    out->kind = GgufKind(kind);
    if (out->kind == GgufKind::array) {
      KVASIR_TRY(read(&kind, "an array's type"));
      if (kind > uint32_t(GgufKind::f64) || GgufKind(kind) == GgufKind::array)
        return error(cat("arrays of metadata type ", kind, " are not supported"));
      out->element = GgufKind(kind);
      KVASIR_TRY(read(&out->count, "an array's length"));
    } else {
      out->element = out->kind;
    }
    out->data = here();
    size_t begin = at_;
    if (out->element == GgufKind::string) {
      if (out->count > left() / 8) return error(cat("an array of ", out->count, " strings cannot fit the file"));
      for (uint64_t i = 0; i < out->count; ++i) {
        std::string_view s;
        KVASIR_TRY(read_string(&s, left(), "a string"));
      }
    } else {
      size_t each = kKindBytes[uint32_t(out->element)];
      if (out->count > left() / each) return error(cat("an array of ", out->count, " values cannot fit the file"));
      KVASIR_TRY(skip(out->count * each, "a value"));
    }
    out->size = at_ - begin;
    return {};
  }

 private:
  const std::string& name_;
  std::span<const uint8_t> bytes_;
  size_t at_ = 0;
};

// An entry of the list of tensors; its data is not looked for yet.
Result<GgufTensor> read_tensor(FileReader& in, int64_t alignment) {
  GgufTensor t;
  uint32_t dims = 0, type = 0;
  uint64_t offset = 0;
  KVASIR_TRY(in.read_name(&t.name, kMaxName, "a tensor's name"));
  KVASIR_TRY(in.read(&dims, "a tensor's rank"));
  if (dims < 1 || dims > 4) return in.error(cat("tensor ", t.name, " has ", dims, " dimensions; 1 to 4 are allowed"));
  int64_t elements = 1;
  for (uint32_t d = 0; d < dims; ++d) {
    uint64_t n = 0;
    KVASIR_TRY(in.read(&n, "a tensor's dimension"));
    if (n == 0 || n > uint64_t(INT64_MAX) || __builtin_mul_overflow(elements, int64_t(n), &elements))
      return in.error(cat("tensor ", t.name, ": dimension ", d, " is ", n, ", which is zero or too large"));
    t.dims[d] = int64_t(n);
  }
  KVASIR_TRY(in.read(&type, "a tensor's type"));
  KVASIR_TRY(in.read(&offset, "a tensor's offset"));
  t.type = WeightType(type);
  const TypeInfo* info = type_info(t.type);
  if (info == nullptr || !of_gguf(t.type))
    return in.error(cat("tensor ", t.name, " has type number ", type,
                        "; F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and Q2_K to Q6_K are supported"));
  if (t.dims[0] % info->block != 0)
    return in.error(cat("tensor ", t.name, ": rows of ", t.dims[0], " are not whole blocks of ", info->block));
  if (__builtin_mul_overflow(elements / info->block, int64_t(info->bytes), &t.bytes) || offset > uint64_t(INT64_MAX))
    return in.error(cat("tensor ", t.name, " is too large"));
  if (offset % uint64_t(alignment) != 0)
    return in.error(cat("tensor ", t.name, ": offset ", offset, " is not a multiple of ", alignment));
  t.offset = int64_t(offset);
  return t;
}

// Where the data of these tensors lies, from byte `base` of the file on: inside it, and none over another's.
Status place_tensors(const std::string& name, std::span<const uint8_t> bytes, int64_t base,
                     std::span<GgufTensor> tensors) {
  const int64_t size = int64_t(bytes.size());
  std::vector<const GgufTensor*> order;
  for (GgufTensor& t : tensors) {
    if (base > size || t.bytes > size - base || t.offset > size - base - t.bytes)
      return invalid_argument(cat(name, ": tensor ", t.name, " needs ", t.bytes, " bytes at ", t.offset,
                                  " of the data, the file has only ", std::max<int64_t>(0, size - base),
                                  "; it is probably truncated"));
    t.offset += base;
    t.data = bytes.data() + t.offset;
    order.push_back(&t);
  }
  std::sort(order.begin(), order.end(), [](auto* a, auto* b) { return a->offset < b->offset; });
  for (size_t i = 1; i < order.size(); ++i)
    if (order[i]->offset < order[i - 1]->offset + order[i - 1]->bytes)
      return invalid_argument(cat(name, " at byte ", order[i]->offset, ": tensors ", order[i - 1]->name, " and ",
                                  order[i]->name, " overlap"));
  return {};
}

}  // namespace

Status Gguf::read(const std::string& name, std::span<const uint8_t> bytes, int file) {
  FileReader in(name, bytes);
  uint32_t magic = 0, version = 0;
  uint64_t tensor_count = 0, value_count = 0;
  KVASIR_TRY(in.read(&magic, "the magic number"));
  if (magic != 0x46554747) return in.error("not a GGUF file (it should start with the letters GGUF)");
  KVASIR_TRY(in.read(&version, "the version"));
  if (version != 2 && version != 3)
    return in.error(cat("GGUF version ", version, " is not supported; versions 2 and 3 (little-endian) are"));
  KVASIR_TRY(in.read(&tensor_count, "the tensor count"));
  KVASIR_TRY(in.read(&value_count, "the metadata count"));
  // The smallest value takes 13 bytes, the smallest tensor entry 33.
  if (value_count > in.left() / 13) return in.error(cat(value_count, " metadata values cannot fit the file"));
  if (tensor_count > in.left() / 33) return in.error(cat(tensor_count, " tensors cannot fit the file"));
  if (file == 0) version_ = version;

  int64_t alignment = 32;
  for (uint64_t i = 0; i < value_count; ++i) {
    std::string_view key;
    GgufValue value;
    KVASIR_TRY(in.read_name(&key, kMaxKey, "a metadata key"));
    KVASIR_TRY(in.read_value(&value));
    if (key == "general.alignment") {
      alignment = integer_at(value.kind, value.data).value_or(0);
      if (alignment <= 0 || alignment > kMaxAlignment || (alignment & (alignment - 1)) != 0)
        return in.error("general.alignment must be a power of two of at most 1048576");
    }
    if (file != 0) continue;  // a split's later files repeat what the first says
    if (!keys_.emplace(key, metadata_.size()).second) return in.error(cat("metadata key ", key, " appears twice"));
    metadata_.emplace_back(key, value);
  }

  size_t first = tensors_.size();
  for (uint64_t i = 0; i < tensor_count; ++i) {
    KVASIR_ASSIGN(GgufTensor t, read_tensor(in, alignment));
    t.file = file;
    if (!names_.emplace(t.name, tensors_.size()).second) return in.error(cat("tensor ", t.name, " appears twice"));
    tensors_.push_back(t);
  }

  return place_tensors(name, bytes, (int64_t(in.at()) + alignment - 1) / alignment * alignment,
                       std::span(tensors_).subspan(first));
}

Result<std::unique_ptr<Gguf>> Gguf::parse(std::string name, std::span<const uint8_t> bytes) {
  auto gguf = std::make_unique<Gguf>();
  gguf->name_ = std::move(name);
  KVASIR_TRY(gguf->read(gguf->name_, bytes, 0));
  return gguf;
}

Result<std::unique_ptr<Gguf>> Gguf::open(const std::string& path) {
  auto gguf = std::make_unique<Gguf>();
  gguf->name_ = path;
  KVASIR_ASSIGN(auto first, MappedFile::open(path));
  gguf->files_.push_back(first);
  KVASIR_TRY(gguf->read(path, first->bytes(), 0));

  int64_t splits = gguf->integer("split.count").value_or(1);
  if (splits <= 1) return gguf;
  if (splits > 1000) return invalid_argument(cat(path, ": split.count is ", splits, "; the limit is 1000"));
  if (gguf->integer("split.no").value_or(0) != 0)
    return invalid_argument(cat(path, " is a later part of a split model; name its first part"));
  char suffix[64];
  std::snprintf(suffix, sizeof suffix, "-00001-of-%05d.gguf", int(splits));
  if (!path.ends_with(suffix))
    return invalid_argument(cat(path, " says it has ", splits, " parts, so its name must end in ", suffix));
  for (int i = 1; i < splits; ++i) {
    char part[64];
    std::snprintf(part, sizeof part, "-%05d-of-%05d.gguf", i + 1, int(splits));
    std::string other = path.substr(0, path.size() - std::strlen(suffix)) + part;
    KVASIR_ASSIGN(auto file, MappedFile::open(other));
    gguf->files_.push_back(file);
    KVASIR_TRY(gguf->read(other, file->bytes(), i));
  }
  int64_t expected = gguf->integer("split.tensors.count").value_or(int64_t(gguf->tensors_.size()));
  if (expected != int64_t(gguf->tensors_.size()))
    return invalid_argument(
        cat(path, ": the parts hold ", gguf->tensors_.size(), " tensors, split.tensors.count says ", expected));
  return gguf;
}

void Gguf::release(const GgufTensor& t) const {
  if (size_t(t.file) < files_.size()) files_[size_t(t.file)]->release(t.data, size_t(t.bytes));
}

const GgufTensor* Gguf::tensor(std::string_view name) const {
  auto it = names_.find(name);
  return it == names_.end() ? nullptr : &tensors_[it->second];
}
const GgufValue* Gguf::value(std::string_view key) const {
  auto it = keys_.find(key);
  return it == keys_.end() ? nullptr : &metadata_[it->second].second;
}
std::optional<int64_t> Gguf::integer(std::string_view key) const {
  const GgufValue* v = value(key);
  return v ? integer_at(v->kind, v->data) : std::nullopt;
}
std::optional<double> Gguf::number(std::string_view key) const {
  const GgufValue* v = value(key);
  if (!v) return std::nullopt;
  if (v->kind == GgufKind::f32) return load<float>(v->data);
  if (v->kind == GgufKind::f64) return load<double>(v->data);
  auto i = integer_at(v->kind, v->data);
  return i ? std::optional<double>(double(*i)) : std::nullopt;
}
std::optional<bool> Gguf::boolean(std::string_view key) const {
  const GgufValue* v = value(key);
  return v && v->kind == GgufKind::boolean ? std::optional<bool>(*v->data != 0) : std::nullopt;
}
std::optional<std::string_view> Gguf::string(std::string_view key) const {
  const GgufValue* v = value(key);
  if (!v || v->kind != GgufKind::string) return std::nullopt;
  return std::string_view(reinterpret_cast<const char*>(v->data + 8), v->size - 8);
}
std::vector<std::string> Gguf::strings(std::string_view key) const {
  std::vector<std::string> out;
  const GgufValue* v = value(key);
  if (!v || v->kind != GgufKind::array || v->element != GgufKind::string) return out;
  out.reserve(v->count);
  const uint8_t* p = v->data;
  for (uint64_t i = 0; i < v->count; ++i) {
    uint64_t n = load<uint64_t>(p);
    out.emplace_back(reinterpret_cast<const char*>(p + 8), n);
    p += 8 + n;
  }
  return out;
}
std::vector<float> Gguf::floats(std::string_view key) const {
  std::vector<float> out;
  const GgufValue* v = value(key);
  if (!v || v->kind != GgufKind::array || v->element != GgufKind::f32) return out;
  out.resize(v->count);
  if (v->count > 0) std::memcpy(out.data(), v->data, v->size);
  return out;
}
std::vector<int32_t> Gguf::integers(std::string_view key) const {
  std::vector<int32_t> out;
  const GgufValue* v = value(key);
  if (!v || v->kind != GgufKind::array) return out;
  out.reserve(v->count);
  for (uint64_t i = 0; i < v->count; ++i) {
    auto n = integer_at(v->element, v->data + i * kKindBytes[uint32_t(v->element)]);
    out.push_back(n ? int32_t(*n) : 0);
  }
  return out;
}

}  // namespace kvasir::model
