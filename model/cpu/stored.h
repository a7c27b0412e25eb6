// How types lie in memory whose files are smaller than what kernels multiply: their integers and scales as narrow as
// they are in the file, 16 rows interleaved. Kernels expand some blocks at a time into the form they have (expand.h).
//
// A group is four planes. Of each block of 32 inputs x 16 rows:
//   integers: of 4 bits or more, 4 chunks of 64 bytes as packed.h has them; then a fifth bit: 64 bytes, bit c of byte
//     4*r + j: row r, input 4c+j; or a fifth and a sixth: two such, of two bits each, for the inputs of either half.
//     Of 2 and 3 bits: two times 64 bytes, bits 2c and 2c+1 of byte 4*r + j: row r, input 4c+j of either half; then a
//     third bit as a fifth would be
//   scales: as StoredScales has them, rows beside one another, once or for each half
// of each 8 blocks 16 d, then 16 m where there are minima (float16), by which small scales are multiplied; and 16
// floats, the rows' s where kernels want integers of rows (packed.h), or what E4M3 scales are multiplied by.
#pragma once

#include <cstdint>

#include "model/cpu/packing.h"

namespace kvasir::model::cpu {

// q4_k lies so only where results are to be float32's own.
enum class Stored : uint8_t { none, q2_k, q3_k, q4_k, q5_0, q5_1, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4, nvfp4 };

enum class StoredScales : uint8_t {
  half,    // float16 d, then m where there are minima
  power,   // a byte, d = 2^(byte - 128); the least is 0, the greatest infinite
  small,   // int8, then as many for minima: times the d and m of 8 blocks
  nibble,  // two of less 8 in a byte, likewise
  e4m3,    // a byte, times the row's float32
};

// Values that codes of four bits stand for, from 0 on.
constexpr uint8_t kIq4Values[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t kE2m1Values[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr uint8_t kE2m1From4[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

constexpr int64_t kSuper = 8;  // blocks that share d and m

struct StoredInfo {
  int bits;  // of an integer or code
  StoredScales scaling;
  bool halves;
  int zero;               // the integer that stands for 0, where there are no minima
  const uint8_t* values;  // of codes
  Packing form, exact;    // what kernels multiply; where results are to be float32's own

  constexpr int quant_bytes() const { return 64 * bits; }
  constexpr int scale_width() const {  // of 16 rows
    return scaling == StoredScales::half ? 32 : scaling == StoredScales::nibble ? 8 : 16;
  }
  constexpr int kinds() const { return zero == 0 ? 2 : 1; }  // d, and m
  constexpr int scale_bytes() const { return scale_width() * kinds() * (halves ? 2 : 1); }
  constexpr int super_bytes() const {
    return scaling == StoredScales::small || scaling == StoredScales::nibble ? 32 * kinds() : 0;
  }
  constexpr int64_t scales_at(int64_t blocks) const { return blocks * quant_bytes(); }
  constexpr int64_t supers_at(int64_t blocks) const { return blocks * (quant_bytes() + scale_bytes()); }
  constexpr int64_t group_bytes(int64_t blocks) const {
    return ((supers_at(blocks) + (blocks + kSuper - 1) / kSuper * super_bytes() + 63) & ~int64_t(63)) +
           kGroup * int64_t(sizeof(float));
  }
};
constexpr StoredInfo stored_info(Stored s) {
  constexpr auto wide = Packing::n8_wide, halves = Packing::n8_halves;
  switch (s) {
    case Stored::none: break;
    case Stored::q2_k: return {2, StoredScales::nibble, true, 0, nullptr, Packing::i4_halves, halves};
    case Stored::q3_k: return {3, StoredScales::small, true, 4, nullptr, Packing::i4_halves, halves};
    case Stored::q4_k: return {4, StoredScales::small, false, 0, nullptr, Packing::i4_min, wide};
    case Stored::q5_0: return {5, StoredScales::half, false, 16, nullptr, wide, wide};
    case Stored::q5_1: return {5, StoredScales::half, false, 0, nullptr, wide, wide};
    case Stored::q5_k: return {5, StoredScales::small, false, 0, nullptr, wide, wide};
    case Stored::q6_k: return {6, StoredScales::small, true, 32, nullptr, halves, halves};
    case Stored::iq4_nl: return {4, StoredScales::half, false, 128, kIq4Values, Packing::n8_zero, Packing::n8_zero};
    case Stored::iq4_xs: return {4, StoredScales::small, false, 128, kIq4Values, Packing::n8_float, Packing::n8_float};
    case Stored::mxfp4: return {4, StoredScales::power, false, 12, kE2m1Values, wide, wide};
    case Stored::nvfp4: return {4, StoredScales::e4m3, true, 16, kE2m1From4, halves, halves};
  }
  return {};
}
// Whether it is multiplied as that.
constexpr bool expands_to(Stored s, Packing form) {
  const StoredInfo info = stored_info(s);
  return s != Stored::none && (form == info.form || form == info.exact);
}

// f.operator()<S>()
template <class F>
inline void with_stored(Stored stored, const F& f) {
  switch (stored) {
#define KVASIR_STORED(S) \
  case Stored::S: return f.template operator()<Stored::S>()
    case Stored::none:
      return;
      KVASIR_STORED(q2_k);
      KVASIR_STORED(q3_k);
      KVASIR_STORED(q4_k);
      KVASIR_STORED(q5_0);
      KVASIR_STORED(q5_1);
      KVASIR_STORED(q5_k);
      KVASIR_STORED(q6_k);
      KVASIR_STORED(iq4_nl);
      KVASIR_STORED(iq4_xs);
      KVASIR_STORED(mxfp4);
      KVASIR_STORED(nvfp4);
#undef KVASIR_STORED
  }
}

}  // namespace kvasir::model::cpu
