#include "model/formats/int4.h"

#include <cstring>

#include "core/cat.h"
#include "core/dtype.h"

namespace kvasir::model {
namespace {

constexpr int kAwqPlace[8] = {0, 4, 1, 5, 2, 6, 3, 7};  // of each of eight outputs

int nibble(const uint8_t* words, int64_t word, int place, int bits = 4) {
  uint32_t w;
  std::memcpy(&w, words + 4 * word, 4);
  return int(w >> bits * place & ((1u << bits) - 1));
}

struct Reader {
  const Int4& in;
  int64_t each() const { return 32 / in.bits; }  // in a word
  int weight(int64_t r, int64_t c) const {
    switch (in.form) {
      case Int4::Form::awq: return nibble(in.words, c * (in.rows / 8) + r / 8, kAwqPlace[r % 8]);
      case Int4::Form::gptq: return nibble(in.words, c / each() * in.rows + r, int(c % each()), in.bits);
      case Int4::Form::packed: break;
    }
    return nibble(in.words, r * (in.cols / 8) + c / 8, int(c % 8));
  }
  int64_t group(int64_t c) const {
    if (!in.group_of) return c / (in.cols / in.groups);
    int32_t g;
    std::memcpy(&g, in.group_of + 4 * c, 4);
    return g;
  }
  float scale(int64_t r, int64_t g) const {
    const int64_t at = in.form == Int4::Form::packed ? r * in.groups + g : g * in.rows + r;
    float out;
    dequantize(in.scale_type, in.scales + at * type_info(in.scale_type)->bytes, 1, &out);
    return out;
  }
  int zero(int64_t r, int64_t g) const {
    if (!in.zeros) return 1 << (in.bits - 1);
    const int64_t word = in.form == Int4::Form::packed ? r / 8 * in.groups + g : g * (in.rows / each()) + r / each();
    const int place = in.form == Int4::Form::awq ? kAwqPlace[r % 8] : int(r % each());
    return nibble(in.zeros, word, place, in.bits) + in.zero_shift;
  }
};

}  // namespace

Result<HostTensor> int4_tensor(const std::string& name, const Int4& from) {
  const Reader in{from};
  const int64_t each = from.cols / from.groups;
  bool mixed = from.cols % 32 != 0, in_turn = true;
  for (int64_t c = 0; c < from.cols; ++c) {
    const int64_t g = in.group(c);
    if (g < 0 || g >= from.groups)
      return invalid_argument(cat("tensor ", name, ": input ", c, " is of group ", g, " of ", from.groups));
    mixed |= g != in.group(c / 32 * 32);
    in_turn &= g == c / each;
  }
  // What Q8_0 can say: q - 128 in a byte, and the scale in float16.
  bool bytes = from.bits == 8 && from.scale_type == WeightType::f16;
  for (int64_t g = 0; bytes && g < from.groups; ++g)
    for (int64_t r = 0; bytes && r < from.rows; ++r) bytes = in.zero(r, g) == 128;
  mixed |= from.bits == 8 && !bytes;
  HostTensor out{name, mixed ? WeightType::f16 : bytes ? WeightType::q8_0 : WeightType::int4, from.rows, from.cols};
  if (in_turn) out.group = each;
  const TypeInfo& info = *type_info(out.type);
  out.bytes = from.rows * from.cols / info.block * info.bytes;
  std::shared_ptr<uint8_t[]> memory(new uint8_t[size_t(out.bytes)]);
  uint8_t* to = memory.get();
  for (int64_t r = 0; r < from.rows; ++r) {
    if (mixed) {
      for (int64_t c = 0; c < from.cols; ++c, to += 2) {
        const int64_t g = in.group(c);
        const uint16_t h = f32_to_f16(in.scale(r, g) * float(in.weight(r, c) - in.zero(r, g)));
        std::memcpy(to, &h, 2);
      }
      continue;
    }
    for (int64_t c = 0; c < from.cols; c += 32, to += info.bytes) {
      const int64_t g = in.group(c);
      if (bytes) {
        const uint16_t scale = f32_to_f16(in.scale(r, g));
        std::memcpy(to, &scale, 2);
        for (int j = 0; j < 32; ++j) to[2 + j] = uint8_t(in.weight(r, c + j) - 128);
        continue;
      }
      const float d = in.scale(r, g), m = -d * float(in.zero(r, g));
      std::memcpy(to, &d, 4);
      std::memcpy(to + 4, &m, 4);
      for (int j = 0; j < 16; ++j) to[8 + j] = uint8_t(in.weight(r, c + j) | in.weight(r, c + 16 + j) << 4);
    }
  }
  out.data = memory.get();
  out.owned = std::move(memory);
  return out;
}

}  // namespace kvasir::model
