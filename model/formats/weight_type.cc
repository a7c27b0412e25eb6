#include "model/formats/weight_type.h"

#include <array>
#include <cmath>
#include <cstring>

#include "core/check.h"
#include "core/dtype.h"

namespace kvasir::model {
namespace {

uint16_t load16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}
uint32_t load32(const uint8_t* p) {
  uint32_t v;
  std::memcpy(&v, p, 4);
  return v;
}
float half_at(const uint8_t* p) { return f16_to_f32(load16(p)); }

float e4m3(uint8_t b) {  // 0x7f and 0xff are no numbers
  const int exponent = b >> 3 & 15, fraction = b & 7;
  if (exponent == 15 && fraction == 7) return std::nanf("");
  const float x = exponent == 0 ? float(fraction) * 0x1p-9f : std::ldexp(float(8 + fraction), exponent - 10);
  return b & 0x80 ? -x : x;
}

void nibbles(const uint8_t* p, uint8_t* q) {
  for (int j = 0; j < 16; ++j) q[j] = p[j] & 15, q[j + 16] = p[j] >> 4;
}
void fifth_bits(uint32_t high, uint8_t* q) {
  for (int j = 0; j < 32; ++j) q[j] |= uint8_t(((high >> j) & 1) << 4);
}
void whole(Unpacked* out, float d, float m) { out->d[0] = out->d[1] = d, out->m[0] = out->m[1] = m; }
// Scales of float16: d, with what stands for 0, or with minima behind it.
void scaled_by(const uint8_t* d, int zero, Unpacked* out) {
  out->of_d = load16(d);
  whole(out, f16_to_f32(out->of_d), -float(zero) * f16_to_f32(out->of_d));
}
void scaled_by(const uint8_t* d, Unpacked* out) {
  out->of_d = load16(d), out->of_m = load16(d + 2);
  whole(out, f16_to_f32(out->of_d), f16_to_f32(out->of_m));
}
// A half's small scale by the block's, with what stands for 0, or a small minimum by the block's.
void part_scaled(Unpacked* out, int h, const uint8_t* d, int scale, int zero) {
  out->of_d = load16(d), out->scale[h] = int8_t(scale);
  out->d[h] = f16_to_f32(out->of_d) * float(scale), out->m[h] = -float(zero) * out->d[h];
}
void part_scaled(Unpacked* out, int h, const uint8_t* d, int scale, const uint8_t* m, int min) {
  part_scaled(out, h, d, scale, 0);
  out->of_m = load16(m), out->min[h] = int8_t(min);
  out->m[h] = -(f16_to_f32(out->of_m) * float(min));
}

void unpack_q4_0(const uint8_t* b, int, Unpacked* out) { nibbles(b + 2, out->q), scaled_by(b, 8, out); }
void unpack_q4_1(const uint8_t* b, int, Unpacked* out) { nibbles(b + 4, out->q), scaled_by(b, out); }
void unpack_q5_0(const uint8_t* b, int, Unpacked* out) {
  nibbles(b + 6, out->q), fifth_bits(load32(b + 2), out->q), scaled_by(b, 16, out);
}
void unpack_q5_1(const uint8_t* b, int, Unpacked* out) {
  nibbles(b + 8, out->q), fifth_bits(load32(b + 4), out->q), scaled_by(b, out);
}
void unpack_q8_0(const uint8_t* b, int, Unpacked* out) {
  for (int j = 0; j < 32; ++j) out->q[j] = b[2 + j] ^ 0x80;
  scaled_by(b, 128, out);
}

// Q4_K and Q5_K: eight 6-bit scales and minima in 12 bytes.
void scale_min(const uint8_t* s, int j, int* scale, int* min) {
  if (j < 4) {
    *scale = s[j] & 63, *min = s[j + 4] & 63;
  } else {
    *scale = (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4);
    *min = (s[j + 4] >> 4) | ((s[j] >> 6) << 4);
  }
}

// In the K types, chunk c of 32 lies in half n = c / 4 of the 256, at shift 2 * (c % 4).
void unpack_q2k(const uint8_t* b, int c, Unpacked* out) {
  const uint8_t* q = b + 16 + 32 * (c / 4);
  for (int j = 0; j < 32; ++j) out->q[j] = (q[j] >> (2 * (c % 4))) & 3;
  for (int h = 0; h < 2; ++h) part_scaled(out, h, b + 80, b[2 * c + h] & 15, b + 82, b[2 * c + h] >> 4);
}
void unpack_q3k(const uint8_t* b, int c, Unpacked* out) {
  const uint8_t *q = b + 32 + 32 * (c / 4), *s = b + 96;
  for (int j = 0; j < 32; ++j) out->q[j] = uint8_t(((q[j] >> (2 * (c % 4))) & 3) | (((b[j] >> c) & 1) << 2));
  for (int h = 0; h < 2; ++h) {
    int i = 2 * c + h, low = i < 8 ? s[i] & 15 : s[i - 8] >> 4, high = (s[8 + i % 4] >> (2 * (i / 4))) & 3;
    part_scaled(out, h, b + 108, (low | (high << 4)) - 32, 4);
  }
}
template <bool five>
void unpack_q45k(const uint8_t* b, int c, Unpacked* out) {
  const uint8_t* q = b + (five ? 48 : 16) + 32 * (c / 2);
  for (int j = 0; j < 32; ++j) out->q[j] = c % 2 ? q[j] >> 4 : q[j] & 15;
  if (five)
    for (int j = 0; j < 32; ++j) out->q[j] |= uint8_t(((b[16 + j] >> c) & 1) << 4);
  int scale, min;
  scale_min(b + 4, c, &scale, &min);
  for (int h = 0; h < 2; ++h) part_scaled(out, h, b, scale, b + 2, min);
}
void unpack_q6k(const uint8_t* b, int c, Unpacked* out) {
  int n = c / 4, part = c % 4;
  const uint8_t *low = b + 64 * n + 32 * (part % 2), *high = b + 128 + 32 * n;
  for (int j = 0; j < 32; ++j)
    out->q[j] = uint8_t((part < 2 ? low[j] & 15 : low[j] >> 4) | (((high[j] >> (2 * part)) & 3) << 4));
  for (int h = 0; h < 2; ++h) part_scaled(out, h, b + 208, int8_t(b[192 + 2 * c + h]), 32);
}

// Four bits that stand for one of 16 values, as integers from 0 on.
template <size_t n>
void look_up(const uint8_t (&table)[n], uint8_t* q) {
  for (int j = 0; j < 32; ++j) q[j] = table[q[j]];
}

// Values of IQ4_NL and IQ4_XS, and of twice E2M1, beside what stands for 0.
constexpr uint8_t kIq4[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t kE2m1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

void unpack_iq4_nl(const uint8_t* b, int, Unpacked* out) {
  nibbles(b + 2, out->q), look_up(kIq4, out->q), scaled_by(b, 128, out);
}
void unpack_iq4_xs(const uint8_t* b, int c, Unpacked* out) {
  const int low = b[4 + c / 2] >> (4 * (c % 2)) & 15, high = load16(b + 2) >> (2 * c) & 3;
  nibbles(b + 8 + 16 * c, out->q), look_up(kIq4, out->q);
  for (int h = 0; h < 2; ++h) part_scaled(out, h, b, (low | high << 4) - 32, 128);
}
void unpack_mxfp4(const uint8_t* b, int, Unpacked* out) {
  const float d = std::ldexp(0.5f, b[0] - 127);
  nibbles(b + 1, out->q), look_up(kE2m1, out->q), whole(out, d, -12 * d);
  out->scale[0] = int8_t(b[0]);
}

// Stood for 0 by 16, so that what is taken off has the bits of the scale however short it becomes.
void unpack_nvfp4(const uint8_t* b, int, Unpacked* out) {
  nibbles(b + 8, out->q), look_up(kE2m1, out->q);
  for (uint8_t& q : out->q) q = uint8_t(q + 4);
  std::memcpy(&out->of_row, b, 4);
  out->of_row /= 2;
  for (int h = 0; h < 2; ++h) {
    out->scale[h] = int8_t(b[4 + h]);
    out->d[h] = e4m3(b[4 + h]) * out->of_row, out->m[h] = -16 * out->d[h];
  }
}

void unpack_int4(const uint8_t* b, int, Unpacked* out) {
  float d, m;
  std::memcpy(&d, b, 4);
  std::memcpy(&m, b + 4, 4);
  nibbles(b + 8, out->q), whole(out, d, m);
}

// A type is one row: its kernels' packing follows from what the row says of its integers (packing_of in model/cpu).
struct TypeRow {
  WeightType type;
  TypeInfo info;
  void (*unpack)(const uint8_t* block, int chunk, Unpacked* out) = nullptr;  // chunk: which 32 of the block
};
constexpr TypeRow kRows[] = {
    {WeightType::f32, {"F32", 1, 4, false, 0, -1, false, false}},
    {WeightType::f16, {"F16", 1, 2, false, 0, -1, false, false}},
    {WeightType::bf16, {"BF16", 1, 2, false, 0, -1, false, false}},
    {WeightType::nvfp4, {"NVFP4", 32, 24, true, 5, 16, true, false}, unpack_nvfp4},
    {WeightType::int4, {"INT4", 32, 24, true, 4, -1, false, false}, unpack_int4},
    {WeightType::i64, {"I64", 1, 8, false, 0, -1, false, false}},
    {WeightType::i32, {"I32", 1, 4, false, 0, -1, false, false}},
    {WeightType::u8, {"U8", 1, 1, false, 0, -1, false, false}},
    {WeightType::f8_e4m3, {"F8_E4M3", 1, 1, false, 0, -1, false, false}},
    {WeightType::q4_0, {"Q4_0", 32, 18, true, 4, 8, false, true}, unpack_q4_0},
    {WeightType::q4_1, {"Q4_1", 32, 20, true, 4, -1, false, true}, unpack_q4_1},
    {WeightType::q5_0, {"Q5_0", 32, 22, true, 5, 16, false, true}, unpack_q5_0},
    {WeightType::q5_1, {"Q5_1", 32, 24, true, 5, -1, false, true}, unpack_q5_1},
    {WeightType::q8_0, {"Q8_0", 32, 34, true, 8, 128, false, true}, unpack_q8_0},
    {WeightType::q2_k, {"Q2_K", 256, 84, true, 2, -1, true, false}, unpack_q2k},
    {WeightType::q3_k, {"Q3_K", 256, 110, true, 3, 4, true, false}, unpack_q3k},
    {WeightType::q4_k, {"Q4_K", 256, 144, true, 4, -1, false, false}, unpack_q45k<false>},
    {WeightType::q5_k, {"Q5_K", 256, 176, true, 5, -1, false, false}, unpack_q45k<true>},
    {WeightType::q6_k, {"Q6_K", 256, 210, true, 6, 32, true, false}, unpack_q6k},
    {WeightType::iq4_nl, {"IQ4_NL", 32, 18, true, 8, 128, false, true}, unpack_iq4_nl},
    {WeightType::iq4_xs, {"IQ4_XS", 256, 136, true, 8, 128, false, false}, unpack_iq4_xs},
    {WeightType::mxfp4, {"MXFP4", 32, 17, true, 5, 12, false, false}, unpack_mxfp4},
};

// By the file's number, since a load looks up every block.
constexpr auto kByNumber = [] {
  std::array<const TypeRow*, 64> out{};
  for (const TypeRow& row : kRows) out[size_t(row.type)] = &row;
  return out;
}();
const TypeRow* find(WeightType type) { return size_t(type) < kByNumber.size() ? kByNumber[size_t(type)] : nullptr; }

}  // namespace

const TypeInfo* type_info(WeightType type) {
  const TypeRow* row = find(type);
  return row ? &row->info : nullptr;
}

void unpack32(WeightType type, const uint8_t* row, int64_t i, Unpacked* out) {
  const TypeRow& r = *find(type);
  KVASIR_CHECK(r.unpack, r.info.name, " is not quantized");
  const int64_t chunks = r.info.block / 32;
  r.unpack(row + i / chunks * r.info.bytes, int(i % chunks), out);
}

void dequantize(WeightType type, const uint8_t* row, int64_t n, float* out) {
  if (type == WeightType::f32) {
    std::memcpy(out, row, size_t(n) * 4);
  } else if (type == WeightType::f16) {
    for (int64_t i = 0; i < n; ++i) out[i] = half_at(row + 2 * i);
  } else if (type == WeightType::f8_e4m3) {
    for (int64_t i = 0; i < n; ++i) out[i] = e4m3(row[i]);
  } else if (type == WeightType::bf16) {
    for (int64_t i = 0; i < n; ++i) out[i] = bf16_to_f32(load16(row + 2 * i));
  } else {
    Unpacked u;
    for (int64_t i = 0; i < n / 32; ++i) {
      unpack32(type, row, i, &u);
      for (int j = 0; j < 32; ++j) out[32 * i + j] = std::fma(u.d[j / 16], float(u.q[j]), u.m[j / 16]);
    }
  }
}

}  // namespace kvasir::model
