#include "model/formats/safetensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "core/cat.h"
#include "core/dtype.h"
#include "model/formats/int4.h"

namespace kvasir::model {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
constexpr uint64_t kMaxHeader = uint64_t(64) << 20;
constexpr int kMaxDepth = 8;

Result<json> parse_object(const std::string& name, std::string_view text) {
  bool deep = false;
  json j = json::parse(
      text, [&](int depth, json::parse_event_t, json&) { return !(deep |= depth > kMaxDepth); }, false);
  if (j.is_discarded() || !j.is_object() || deep)
    return invalid_argument(cat(name, " is not a JSON object we can read"));
  return j;
}

Result<SafeTensor> parse_tensor(const std::string& where, const json& entry, std::span<const uint8_t> data,
                                int64_t base) {
  auto bad = [&](const std::string& what) { return invalid_argument(cat(where, ": ", what)); };
  if (!entry.is_object() || !entry.contains("dtype") || !entry["dtype"].is_string() || !entry.contains("shape") ||
      !entry["shape"].is_array() || !entry.contains("data_offsets") || !entry["data_offsets"].is_array() ||
      entry["data_offsets"].size() != 2)
    return bad("dtype, shape and data_offsets are needed");
  SafeTensor t;
  std::string dtype = entry["dtype"];
  if (dtype == "F32")
    t.type = WeightType::f32;
  else if (dtype == "F16")
    t.type = WeightType::f16;
  else if (dtype == "BF16")
    t.type = WeightType::bf16;
  else if (dtype == "F8_E4M3")
    t.type = WeightType::f8_e4m3;
  else if (dtype == "U8")
    t.type = WeightType::u8;
  else if (dtype == "I32")
    t.type = WeightType::i32;
  else if (dtype == "I64")
    t.type = WeightType::i64;
  else
    return bad(
        cat("dtype ", dtype,
            " is not supported; F32, F16, BF16, F8_E4M3, U8 (of MXFP4 and NVFP4), I32 and I64 (of 4 and 8 bits) are"));
  int64_t elements = 1;
  for (const json& n : entry["shape"]) {
    if (!n.is_number_unsigned() || n.get<uint64_t>() == 0 || n.get<uint64_t>() > uint64_t(INT64_MAX) ||
        __builtin_mul_overflow(elements, n.get<int64_t>(), &elements))
      return bad("a dimension is zero, negative or too large");
    t.shape.push_back(n.get<int64_t>());
  }
  for (const json& n : entry["data_offsets"])
    if (!n.is_number_unsigned() || n.get<uint64_t>() > uint64_t(INT64_MAX)) return bad("an offset is no valid number");
  int64_t begin = entry["data_offsets"][0], end = entry["data_offsets"][1];
  if (__builtin_mul_overflow(elements, int64_t(type_info(t.type)->bytes), &t.bytes) || begin > end ||
      end - begin != t.bytes)
    return bad(cat("offsets ", begin, " to ", end, " do not hold ", elements, " elements of ", dtype));
  if (end > int64_t(data.size()))
    return bad(cat("it ends at byte ", base + end, " of a file of ", base + int64_t(data.size()),
                   "; it is probably truncated"));
  t.data = data.data() + begin;
  return t;
}

// A vector may be a matrix of one row, and a stack of matrices is the rows of them all.
bool is_shape(const std::vector<int64_t>& shape, int64_t rows, int64_t cols) {
  if (shape.empty()) return rows * cols == 1;
  int64_t before = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) before *= shape[i];
  return shape.back() == cols && before == rows && (rows > 1 || shape.size() < 3);
}

// What Mistral's own folders hold beside a model of text.
bool of_other_senses(std::string_view name) {
  constexpr std::string_view kBegins[] = {"vision_encoder.", "vision_language_adapter.", "patch_merger.",
                                          "pre_mm_projector_norm.", "mm_whisper_embeddings."};
  return std::any_of(std::begin(kBegins), std::end(kBegins), [&](std::string_view s) { return name.starts_with(s); });
}

class FolderWeights final : public Weights {
 public:
  FolderWeights(TensorNames names, int32_t int4_zero_shift) : int4_zero_shift_(int4_zero_shift), names_(names) {}

  Status open(const std::string& folder, bool tied, const std::string& stem) {
    folder_ = folder, tied_ = tied, stem_ = stem;
    KVASIR_ASSIGN(std::vector<std::string> names, file_names());
    for (size_t i = 0; i < names.size(); ++i) {
      KVASIR_ASSIGN(auto file, MappedFile::open((fs::path(folder) / names[i]).string()));
      files_.push_back(file);
      KVASIR_TRY(parse_safetensors(file->path(), file->bytes(), int(i), &tensors_));
    }
    return {};
  }

  bool has(std::string_view name) const override {
    if (tied_ && name == "output.weight") return false;
    return find(name) != tensors_.end();
  }
  Result<HostTensor> get(std::string_view name, int64_t rows, int64_t cols) override {
    auto it = find(name);
    if (it == tensors_.end()) return invalid_argument(cat(folder_, ": the tensor ", missing(name), " is missing"));
    const SafeTensor& t = it->second;
    read_.insert(it->first);
    if (t.type == WeightType::u8 && !it->first.ends_with("_blocks")) return nvfp4(it->first, t, rows, cols);
    if (t.type == WeightType::u8) return mxfp4(it->first, t, rows, cols);
    if (part_of_others(t.type)) return int4(it->first, t, rows, cols);
    if (!is_shape(t.shape, rows, cols)) {
      std::string shape;
      for (int64_t n : t.shape) shape += cat(shape.empty() ? "" : " x ", n);
      return invalid_argument(
          cat(folder_, ": tensor ", it->first, " is ", shape, "; config.json wants ", rows, " x ", cols));
    }
    HostTensor out{std::string(name), t.type, rows, cols, t.data, t.bytes};
    if (t.type == WeightType::f8_e4m3) KVASIR_TRY(scale(it->first, &out));
    return out;
  }
  void leave_bytes() override { leave_bytes_ = true; }
  void release(const HostTensor& tensor) override {
    auto it = find(tensor.name);
    if (it == tensors_.end()) return;
    const SafeTensor& t = it->second;
    const bool own = tensor.owned || !tensor.data;  // else perhaps one expert's part
    files_[size_t(t.file)]->release(own ? t.data : tensor.data, size_t(own ? t.bytes : tensor.bytes));
  }
  std::vector<std::string> unread() const override {
    std::vector<std::string> out;
    for (auto& [name, t] : tensors_)
      if (!read_.count(name) && !name.ends_with("rotary_emb.inv_freq") && !name.ends_with(".masked_bias") &&
          !name.ends_with(".attn.bias") && !name.ends_with(".attention.bias") &&
          !(tied_ && (name.ends_with("lm_head.weight") || name == "output.weight")) && !of_other_senses(name) &&
          !name.ends_with("fake_quantizer.qscale_act"))
        out.push_back(name);
    std::sort(out.begin(), out.end());
    return out;
  }
  int64_t parameters() const override {
    int64_t n = 0;
    auto of_4_bits = [](std::string_view name, const SafeTensor& t) {
      return name.ends_with("_blocks") || name.ends_with(".qweight") || name.ends_with(".weight_packed") ||
             (t.type == WeightType::u8 && name.ends_with(".weight"));
    };
    for (auto& [name, t] : tensors_)
      n += !part_of_others(t.type) ? t.bytes / type_info(t.type)->bytes
           : of_4_bits(name, t)    ? (of_8_bits(name, t) ? 1 : 2) * t.bytes
                                   : 0;
    return n;
  }
  int64_t bytes() const override {
    int64_t n = 0;
    for (auto& [name, t] : tensors_) n += t.bytes;
    return n;
  }
  std::vector<HostTensor> tensors() const override {
    std::vector<HostTensor> out;
    for (auto& [name, t] : tensors_) {
      int64_t rows = t.shape.size() > 1 ? t.shape[0] : 1;
      out.push_back({name, t.type, rows, t.bytes / type_info(t.type)->bytes / rows, t.data, t.bytes});
    }
    std::sort(out.begin(), out.end(), [](auto& a, auto& b) { return a.name < b.name; });
    return out;
  }

 private:
  // GPTQ's words of four: there are as many zeros for each scale as a word has.
  bool of_8_bits(const std::string& name, const SafeTensor& words) const {
    if (!name.ends_with(".qweight")) return false;
    const std::string stem = name.substr(0, name.size() - 7);
    const auto zeros = tensors_.find(stem + "qzeros"), scales = tensors_.find(stem + "scales");
    if (zeros == tensors_.end() || scales == tensors_.end()) return false;
    const auto &z = zeros->second.shape, &s = scales->second.shape;
    return z.size() == 2 && s.size() == 2 && words.shape.size() == 2 && words.shape[1] == s[1] && 4 * z[1] == s[1];
  }
  std::string missing(std::string_view ours) const {
    const std::vector<std::string> names = names_.hugging_face(ours);
    return names.empty() ? std::string(ours) : names.front();
  }
  // By Hugging Face's name; as part of a model that also sees; or by the name without the whole model's, as files have
  // it that were written of the part without the head.
  SafeTensors::const_iterator find(std::string_view ours) const {
    for (const std::string& name : names_.hugging_face(ours)) {
      const size_t dot = name.find('.');
      const std::string rest = dot == std::string::npos ? name : name.substr(dot + 1);
      for (const std::string& candidate : {name, "language_model." + name, "model.language_model." + rest, rest}) {
        if (auto it = tensors_.find(candidate); it != tensors_.end()) return it;
        if (!candidate.ends_with(".weight")) continue;
        const std::string stem = candidate.substr(0, candidate.size() - 6);
        for (const char* of_4_bits : {"qweight", "weight_packed"})
          if (auto it = tensors_.find(stem + of_4_bits); it != tensors_.end()) return it;
      }
    }
    return tensors_.end();
  }

  // What a tensor of E4M3 stands for: one scale for all, for each row, or for each block of 128 x 128. Scales that
  // checkpoints have for what is multiplied with it are passed over: it has scales of its own, by token.
  Status scale(const std::string& name, HostTensor* t) {
    if (!name.ends_with("weight"))
      return invalid_argument(cat(folder_, ": tensor ", name, " is F8_E4M3; weights alone may be"));
    const std::string stem = name.substr(0, name.size() - 6);
    for (const char* other : {"input_scale", "k_scale", "v_scale", "qscale_act"})
      if (tensors_.count(stem + other)) read_.insert(stem + other);
    auto it = tensors_.find(name + "_scale");
    if (it == tensors_.end()) it = tensors_.find(stem + "qscale_weight");  // Mistral's
    const bool blocks = it == tensors_.end();
    if (blocks) it = tensors_.find(name + "_scale_inv");
    if (it == tensors_.end())
      return invalid_argument(cat(folder_, ": tensor ", name, " is F8_E4M3, and ", name, "_scale is missing"));
    read_.insert(it->first);
    const SafeTensor& s = it->second;
    const int64_t count = s.bytes / type_info(s.type)->bytes, high = (t->rows + 127) / 128,
                  wide = (t->cols + 127) / 128;
    if (s.type == WeightType::f8_e4m3 || (count != 1 && (blocks ? count != high * wide : count != t->rows)))
      return invalid_argument(cat(folder_, ": tensor ", it->first, " has ", count, " elements; 1",
                                  blocks ? cat(", or ", high * wide, " for blocks of 128 x 128") : cat(" or ", t->rows),
                                  " of F32, F16 or BF16 are needed"));
    std::vector<float> scales(static_cast<size_t>(count));
    dequantize(s.type, s.data, count, scales.data());
    auto of = [&](int64_t r, int64_t c) {
      return scales[count == 1 ? 0 : blocks ? size_t(r / 128 * wide + c / 128) : size_t(r)];
    };
    if (leave_bytes_) {
      for (int64_t r = 0; r < t->rows; ++r)
        for (int64_t c = 0; c < (blocks && count > 1 ? wide : 1); ++c) t->row_scales.push_back(of(r, c * 128));
      return {};
    }
    auto half = std::make_unique<uint8_t[]>(size_t(t->rows * t->cols) * 2);
    std::vector<float> row(static_cast<size_t>(t->cols));
    for (int64_t r = 0; r < t->rows; ++r) {
      dequantize(t->type, t->data + r * t->cols, t->cols, row.data());
      for (int64_t c = 0; c < t->cols; ++c) {
        const uint16_t h = f32_to_bf16(row[size_t(c)] * of(r, c));
        std::memcpy(&half[size_t(r * t->cols + c) * 2], &h, 2);
      }
    }
    t->type = WeightType::bf16, t->bytes *= 2, t->data = half.get();
    t->owned = std::move(half);
    return {};
  }

  // Words of 4 bits with what lies beside them, by the names that each maker gives these.
  Result<HostTensor> int4(const std::string& name, const SafeTensor& words, int64_t rows, int64_t cols) {
    const bool packed = name.ends_with(".weight_packed");
    const std::string stem = name.substr(0, name.rfind('.') + 1);
    using Shape = std::vector<int64_t>;
    if (words.type != WeightType::i32 || (!packed && !name.ends_with(".qweight")) || rows % 8 != 0 || cols % 8 != 0)
      return invalid_argument(cat(folder_, ": tensor ", name,
                                  " is of integers, which only packed weights of 4 bits may be, and GPTQ's of 8"));
    const Shape awq{cols, rows / 8}, gptq{cols / 8, rows}, of_8_bits{cols / 4, rows};
    const bool wide = !packed && words.shape == of_8_bits;
    if (!wide && words.shape != (packed ? Shape{rows, cols / 8} : words.shape == awq ? awq : gptq))
      return invalid_argument(cat(folder_, ": tensor ", name, " does not hold ", rows, " x ", cols,
                                  " weights of 4 bits, or of 8 as GPTQ's"));
    Int4 in{.form = packed               ? Int4::Form::packed
                    : words.shape == awq ? Int4::Form::awq
                                         : Int4::Form::gptq,
            .bits = wide ? 8 : 4,
            .rows = rows,
            .cols = cols,
            .words = words.data};
    auto beside = [&](const char* what, bool integers, const Shape& shape, const uint8_t** data) -> Status {
      const auto it = tensors_.find(stem + what);
      if (it == tensors_.end()) return {};
      read_.insert(it->first);
      const bool right = integers ? it->second.type == WeightType::i32
                                  : it->second.type == WeightType::f16 || it->second.type == WeightType::bf16 ||
                                        it->second.type == WeightType::f32;
      if (!right || it->second.shape != shape)
        return invalid_argument(cat(folder_, ": tensor ", it->first, " is of another type or shape than ", name));
      *data = it->second.data;
      return {};
    };
    const std::string scales = packed ? "weight_scale" : "scales";
    const auto scale = tensors_.find(stem + scales);
    if (scale == tensors_.end() || scale->second.shape.size() != 2)
      return invalid_argument(cat(folder_, ": tensor ", stem, scales, " is missing or no matrix"));
    in.groups = scale->second.shape[packed ? 1 : 0], in.scale_type = scale->second.type;
    if (in.groups > cols || cols % in.groups != 0)
      return invalid_argument(
          cat(folder_, ": tensor ", scale->first, " has ", in.groups, " groups of ", cols, " inputs"));
    const int64_t g = in.groups;
    KVASIR_TRY(beside(scales.c_str(), false, packed ? Shape{rows, g} : Shape{g, rows}, &in.scales));
    KVASIR_TRY(beside(packed ? "weight_zero_point" : "qzeros", true,
                      packed ? Shape{rows / 8, g} : Shape{g, rows * in.bits / 32}, &in.zeros));
    if (in.form != Int4::Form::awq) KVASIR_TRY(beside(packed ? "weight_g_idx" : "g_idx", true, {cols}, &in.group_of));
    if (packed) read_.insert(stem + "weight_shape");
    if (in.form == Int4::Form::gptq) in.zero_shift = int4_zero_shift_;
    return int4_tensor(name, in);
  }

  // Blocks of 32 numbers of four bits, two neighbours in a byte, and their scales in a tensor of their own: as GGUF has
  // them, each scale before its block, whose bytes have numbers 16 apart.
  Result<HostTensor> mxfp4(const std::string& name, const SafeTensor& blocks, int64_t rows, int64_t cols) {
    auto bad = [&](const std::string& what) { return invalid_argument(cat(folder_, ": tensor ", name, what)); };
    if (!name.ends_with("_blocks")) return bad(" is of U8, which only blocks of MXFP4 may be");
    const std::string other = name.substr(0, name.size() - 6) + "scales";
    const auto scales = tensors_.find(other);
    if (scales == tensors_.end()) return bad(cat(" has no scales: ", other, " is missing"));
    read_.insert(other);
    const int64_t count = rows * cols / 32;
    if (cols % 32 != 0 || blocks.shape.empty() || blocks.shape.back() != 16 || blocks.bytes != 16 * count)
      return bad(cat(" has ", blocks.bytes, " bytes; config.json wants ", rows, " x ", cols, " in blocks of 16"));
    if (scales->second.type != WeightType::u8 || scales->second.bytes != count)
      return bad(cat(" has ", count, " blocks, and ", other, " ", scales->second.bytes, " bytes"));
    std::shared_ptr<uint8_t[]> to(new uint8_t[size_t(17 * count)]);
    for (int64_t i = 0; i < count; ++i) {
      const uint8_t* from = blocks.data + 16 * i;
      uint8_t* block = to.get() + 17 * i;
      block[0] = scales->second.data[i];
      for (int j = 0; j < 8; ++j) {
        const int low = from[j], high = from[8 + j];  // numbers 2j and 2j + 1, and those 16 on
        block[1 + 2 * j] = uint8_t((low & 15) | (high & 15) << 4);
        block[2 + 2 * j] = uint8_t(low >> 4 | (high & 0xf0));
      }
    }
    HostTensor out{name, WeightType::mxfp4, rows, cols, to.get(), 17 * count};
    out.owned = std::move(to);
    return out;
  }

  // The scales, then 32 numbers, of which the first and the 17th share a byte, not neighbours as in the file.
  static void nvfp4_block(const uint8_t* numbers, float whole, const uint8_t* scales, uint8_t* block) {
    std::memcpy(block, &whole, 4);
    std::memcpy(block + 4, scales, 2);
    std::memset(block + 6, 0, 2);
    for (int i = 0; i < 16; ++i) {
      const int shift = i % 2 * 4;
      block[8 + i] = uint8_t((numbers[i / 2] >> shift & 15) | (numbers[8 + i / 2] >> shift & 15) << 4);
    }
  }

  // Two numbers of E2M1 in a byte, a scale of E4M3 for 16 of them and one for all: compressed-tensors divides by that
  // (weight_packed, weight_global_scale), modelopt multiplies by it (weight, weight_scale_2).
  Result<HostTensor> nvfp4(const std::string& name, const SafeTensor& bytes, int64_t rows, int64_t cols) {
    constexpr float kE2m1[] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    auto bad = [&](const std::string& what) { return invalid_argument(cat(folder_, ": tensor ", name, what)); };
    const bool packed = name.ends_with(".weight_packed");
    if (!packed && !name.ends_with(".weight")) return bad(" is of U8, which only weights in MXFP4 or NVFP4 may be");
    const std::string stem = name.substr(0, name.rfind('.') + 1);
    if (cols % 16 != 0 || bytes.shape != std::vector<int64_t>{rows, cols / 2})
      return bad(cat(" does not hold ", rows, " x ", cols, " weights of NVFP4"));
    const auto scales = tensors_.find(stem + "weight_scale"),
               all = tensors_.find(stem + (packed ? "weight_global_scale" : "weight_scale_2"));
    if (scales == tensors_.end() || scales->second.type != WeightType::f8_e4m3 ||
        scales->second.shape != std::vector<int64_t>{rows, cols / 16})
      return bad(cat(" is of U8, and ", stem, "weight_scale is no F8_E4M3 of ", rows, " x ", cols / 16));
    if (all == tensors_.end() || all->second.type != WeightType::f32 || all->second.bytes != 4)
      return bad(cat(" is in NVFP4, and ", stem, packed ? "weight_global_scale" : "weight_scale_2", " is no F32"));
    for (const char* other : {"input_scale", "input_global_scale"})  // of activations in NVFP4; ours are not
      if (tensors_.count(stem + other)) read_.insert(stem + other);
    read_.insert(scales->first), read_.insert(all->first);
    float whole = 0;
    std::memcpy(&whole, all->second.data, 4);
    if (packed) whole = 1 / whole;
    if (!std::isfinite(whole)) return bad(cat(" has a scale, ", all->first, ", that is not finite"));
    const bool blocks = leave_bytes_ && cols % 32 == 0;
    const TypeInfo& info = *type_info(blocks ? WeightType::nvfp4 : WeightType::f16);
    HostTensor out{name, blocks ? WeightType::nvfp4 : WeightType::f16, rows, cols};
    out.bytes = rows * cols / info.block * info.bytes;
    std::shared_ptr<uint8_t[]> memory(new uint8_t[size_t(out.bytes)]);
    std::vector<float> of(size_t(cols / 16));
    for (int64_t r = 0; r < rows; ++r) {
      const uint8_t* scale = scales->second.data + r * (cols / 16);
      if (blocks) {
        for (int64_t c = 0; c < cols; c += 32)
          nvfp4_block(bytes.data + (r * cols + c) / 2, whole, scale + c / 16,
                      memory.get() + (r * cols + c) / 32 * info.bytes);
        continue;
      }
      dequantize(WeightType::f8_e4m3, scale, cols / 16, of.data());
      for (int64_t c = 0; c < cols; ++c) {
        const int q = bytes.data[(r * cols + c) / 2] >> (c % 2 * 4) & 15;
        const uint16_t h = f32_to_f16(kE2m1[q] * of[size_t(c / 16)] * whole);
        std::memcpy(memory.get() + 2 * (r * cols + c), &h, 2);
      }
    }
    out.data = memory.get();
    out.owned = std::move(memory);
    return out;
  }

  // The one file, or what the index lists: plain names of files that lie in the folder.
  Result<std::vector<std::string>> file_names() const {
    std::string index = (fs::path(folder_) / (stem_ + ".safetensors.index.json")).string();
    std::error_code error;
    if (!fs::exists(index, error)) return std::vector<std::string>{stem_ + ".safetensors"};
    KVASIR_ASSIGN(auto file, MappedFile::open(index));
    auto bytes = file->bytes();
    KVASIR_ASSIGN(json j, parse_object(index, {reinterpret_cast<const char*>(bytes.data()), bytes.size()}));
    if (!j.contains("weight_map") || !j["weight_map"].is_object())
      return invalid_argument(cat(index, ": weight_map is missing"));
    std::set<std::string> names;
    fs::path home = fs::canonical(folder_, error);
    for (auto& [tensor, value] : j["weight_map"].items()) {
      if (!value.is_string()) return invalid_argument(cat(index, ": the file of ", tensor, " is no string"));
      std::string name = value;
      if (name.empty() || name.find('/') != std::string::npos || name.find('\\') != std::string::npos || name == "..")
        return invalid_argument(cat(index, ": ", tensor, " lies in '", name, "', which is not a file of this folder"));
      fs::path real = fs::canonical(home / name, error);
      if (error) return not_found(cat(index, " names ", name, ", which is not there"));
      if (real.parent_path() != home)
        return invalid_argument(cat(index, ": ", name, " is a link that leaves the folder"));
      names.insert(name);
    }
    return std::vector<std::string>(names.begin(), names.end());
  }

  std::string folder_, stem_;
  bool tied_ = false;
  bool leave_bytes_ = false;
  int32_t int4_zero_shift_ = 0;
  TensorNames names_;
  std::set<std::string> read_;
  std::vector<std::shared_ptr<MappedFile>> files_;
  SafeTensors tensors_;
};

}  // namespace

Status parse_safetensors(const std::string& name, std::span<const uint8_t> bytes, int file, SafeTensors* out) {
  uint64_t header = 0;
  if (bytes.size() < 8) return invalid_argument(cat(name, ": ", bytes.size(), " bytes are too few for safetensors"));
  std::memcpy(&header, bytes.data(), 8);
  if (header > kMaxHeader || header > bytes.size() - 8)
    return invalid_argument(cat(name, ": the header claims ", header, " bytes; the file has ", bytes.size() - 8,
                                " and the limit is ", kMaxHeader));
  KVASIR_ASSIGN(json j, parse_object(name, {reinterpret_cast<const char*>(bytes.data()) + 8, size_t(header)}));
  auto data = bytes.subspan(8 + size_t(header));
  std::vector<std::pair<const uint8_t*, const uint8_t*>> ranges;
  for (auto& [key, entry] : j.items()) {
    if (key == "__metadata__") continue;
    KVASIR_ASSIGN(SafeTensor t, parse_tensor(cat(name, ": tensor ", key), entry, data, int64_t(8 + header)));
    t.file = file;
    ranges.emplace_back(t.data, t.data + t.bytes);
    if (!out->emplace(key, std::move(t)).second) return invalid_argument(cat(name, ": tensor ", key, " appears twice"));
  }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i)
    if (ranges[i].first < ranges[i - 1].second)
      return invalid_argument(cat(name, " at byte ", ranges[i].first - bytes.data(), ": two tensors overlap"));
  return {};
}

Result<std::unique_ptr<Weights>> open_safetensors(const std::string& folder, bool tied, TensorNames names,
                                                  int32_t int4_zero_shift, const std::string& stem) {
  auto w = std::make_unique<FolderWeights>(names, int4_zero_shift);
  KVASIR_TRY(w->open(folder, tied, stem));
  return std::unique_ptr<Weights>(std::move(w));
}

}  // namespace kvasir::model
