#include "model/cpu/pack_stored.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/check.h"
#include "core/dtype.h"
#include "model/formats/weights.h"

namespace kvasir::model::cpu {
namespace {

constexpr float kMost = 16375;  // of integers of rows: rounding adds 8 halves and one

// The code of each value.
void find_codes(const uint8_t* values, uint8_t* q) {
  for (int j = 0; j < 32; ++j) {
    const uint8_t* at = std::find(values, values + 16, q[j]);
    KVASIR_CHECK(at != values + 16, "a weight of ", int(q[j]), " has no code");
    q[j] = uint8_t(at - values);
  }
}

// Row r's 32 integers of a block, which is zeros.
void put_integers(uint8_t* block, int bits, int r, const uint8_t* q) {
  const int low = bits >= 4 ? 4 : 2, high = bits - low;
  uint8_t* more = block + 64 * low;
  for (int i = 0; i < 32; ++i) {
    const int c = i % 16 / 4, half = i / 16, at = 4 * r + i % 4;
    if (low == 4)
      block[64 * c + at] |= uint8_t((q[i] & 15) << (4 * half));
    else
      block[64 * half + at] |= uint8_t((q[i] & 3) << (2 * c));
    const int rest = q[i] >> low;
    if (high == 1)
      more[at] |= uint8_t(rest << (c + 4 * half));
    else if (high == 2)
      more[64 * half + at] |= uint8_t(rest << (2 * c));
  }
}
int integer_at(const uint8_t* block, int bits, int r, int i) {
  const int low = bits >= 4 ? 4 : 2, high = bits - low;
  const uint8_t* more = block + 64 * low;
  const int c = i % 16 / 4, half = i / 16, at = 4 * r + i % 4;
  const int q = low == 4 ? block[64 * c + at] >> (4 * half) & 15 : block[64 * half + at] >> (2 * c) & 3;
  if (high == 1) return q | (more[at] >> (c + 4 * half) & 1) << low;
  return high == 2 ? q | (more[64 * half + at] >> (2 * c) & 3) << low : q;
}

// One row of 16 within a group's planes.
struct StoredRow {
  StoredInfo info;
  int64_t blocks;
  int r;
  const uint8_t* group;

  int64_t quants(int64_t b) const { return b * info.quant_bytes(); }
  // Of d, or of m; `h`: of which half.
  int64_t scale(int64_t b, int h, int kind) const {
    const int place = h * info.kinds() + kind, width = info.scale_width();
    return info.scales_at(blocks) + b * info.scale_bytes() + place * width + r * width / kGroup;
  }
  int64_t super(int64_t b, int kind) const {
    return info.supers_at(blocks) + b / kSuper * info.super_bytes() + 32 * kind + 2 * r;
  }
  int64_t factor() const { return info.group_bytes(blocks) - int64_t(sizeof(float)) * (kGroup - r); }

  template <class T>
  T at(int64_t place) const {
    T v;
    std::memcpy(&v, group + place, sizeof v);
    return v;
  }
  float scale_at(int64_t b, int h, int kind) const {
    const int64_t place = scale(b, h, kind);
    switch (info.scaling) {
      case StoredScales::half: return f16_to_f32(at<uint16_t>(place));
      case StoredScales::power:
        if (group[place] == 0 || group[place] == 255) return group[place] == 0 ? 0 : INFINITY;
        return std::ldexp(1.0f, group[place] - 128);
      case StoredScales::e4m3: {
        float scale;
        dequantize(WeightType::f8_e4m3, group + place, 1, &scale);
        return scale * at<float>(factor());
      }
      case StoredScales::small:
      case StoredScales::nibble: break;
    }
    const int small =
        info.scaling == StoredScales::small ? int8_t(group[place]) : (group[place] >> (r % 2 * 4) & 15) ^ 8;
    const float by = f16_to_f32(at<uint16_t>(super(b, kind))) * float(small);
    return kind == 0 ? by : -by;
  }
};

void put_scales(const StoredRow& at, int64_t b, const Unpacked& u, uint8_t* group) {
  const StoredInfo& info = at.info;
  for (int h = 0; h < (info.halves ? 2 : 1); ++h)
    for (int kind = 0; kind < info.kinds(); ++kind) {
      uint8_t* to = group + at.scale(b, h, kind);
      const int8_t small = kind == 0 ? u.scale[h] : u.min[h];
      const uint16_t of = kind == 0 ? u.of_d : u.of_m;
      if (info.scaling == StoredScales::half) {
        std::memcpy(to, &of, 2);
      } else if (info.scaling == StoredScales::nibble) {
        *to = uint8_t(*to | (small ^ 8) << (at.r % 2 * 4));  // less 8, as the vectors' nibbles are
      } else {
        *to = uint8_t(small);
      }
      if (info.super_bytes() > 0) std::memcpy(group + at.super(b, kind), &of, 2);
    }
}

// What is no number makes every sum of its row none: its scales are 0 then, and the row's own is NaN.
void find_row_scale(const StoredRow& at, uint8_t* group) {
  const int parts = at.info.halves ? 2 : 1, half = 1 << std::max(0, at.info.bits - 1);
  float most = 0;
  bool finite = true;
  for (int64_t b = 0; b < at.blocks; ++b)
    for (int h = 0; h < parts; ++h) {
      const float d = at.scale_at(b, h, 0);
      const float m = at.info.zero != 0 ? -float(at.info.zero) * d : at.scale_at(b, h, 1), middle = m + float(half) * d;
      finite &= std::isfinite(d) && std::isfinite(middle);
      most = std::max({most, std::fabs(middle - 8 * d), std::fabs(middle + 7 * d)});
    }
  const float scale = finite ? most / kMost : NAN;
  std::memcpy(group + at.factor(), &scale, sizeof scale);
  if (finite) return;
  const uint16_t zero = 0;
  for (int64_t b = 0; b < at.blocks; ++b)
    for (int kind = 0; kind < at.info.kinds(); ++kind)
      for (int h = 0; h < parts; ++h)
        std::memcpy(group + (at.info.super_bytes() > 0 ? at.super(b, kind) : at.scale(b, h, kind)), &zero, 2);
}

}  // namespace

Stored stored_of(WeightType type, bool exact) {
  switch (type) {
    case WeightType::q2_k: return Stored::q2_k;
    case WeightType::q3_k: return Stored::q3_k;
    // A ninth narrower than its integers of rows, which one row is multiplied by a third faster as they are.
    case WeightType::q4_k: return exact ? Stored::q4_k : Stored::none;
    case WeightType::q5_0: return Stored::q5_0;
    case WeightType::q5_1: return Stored::q5_1;
    case WeightType::q5_k: return Stored::q5_k;
    case WeightType::q6_k: return Stored::q6_k;
    case WeightType::iq4_nl: return Stored::iq4_nl;
    case WeightType::iq4_xs: return Stored::iq4_xs;
    case WeightType::mxfp4: return Stored::mxfp4;
    case WeightType::nvfp4: return Stored::nvfp4;
    default: return Stored::none;
  }
}

void store_row(const PackedMatrix& m, uint8_t* group, int r, WeightType type, const uint8_t* row) {
  const StoredInfo info = stored_info(m.stored);
  const StoredRow at{info, m.blocks, r, group};
  Unpacked u{};
  for (int64_t b = 0; b < m.blocks; ++b) {
    unpack32(type, row, b, &u);
    if (info.values) find_codes(info.values, u.q);
    put_integers(group + at.quants(b), info.bits, r, u.q);
    put_scales(at, b, u, group);
  }
  if (info.scaling == StoredScales::e4m3) std::memcpy(group + at.factor(), &u.of_row, sizeof u.of_row);
  if (packing_info(m.packing).of_rows) find_row_scale(at, group);
}

void unpack_stored_row(const PackedMatrix& m, int64_t row, float scale, float* out) {
  const StoredRow at{stored_info(m.stored), m.blocks, int(row % kGroup), m.quants(row / kGroup)};
  const bool number = !packing_info(m.packing).of_rows || !std::isnan(at.at<float>(at.factor()));
  for (int64_t b = 0; b < m.blocks; ++b)
    for (int i = 0; i < 32; ++i) {
      const int64_t k = 32 * b + i;
      if (k >= m.cols) return;
      const int h = at.info.halves ? i / 16 : 0;
      int q = integer_at(at.group + at.quants(b), at.info.bits, at.r, i);
      if (at.info.values) q = at.info.values[q];
      const float d = at.scale_at(b, h, 0), min = at.info.zero != 0 ? -float(at.info.zero) * d : at.scale_at(b, h, 1);
      out[k] = number ? scale * std::fma(d, float(q), min) : NAN;
    }
}

}  // namespace kvasir::model::cpu
