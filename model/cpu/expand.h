// Blocks of stored rows are expanded into what kernels multiply, a few at a time, in a buffer that stays in the
// first-level cache. Written once over Blocks: every instruction set expands to the same bytes.
#pragma once

#include "model/cpu/blocks.h"
#include "model/cpu/packed.h"

// NOLINTBEGIN(misc-definitions-in-headers): each unit is to have its own.
namespace kvasir::model::cpu {
namespace {

constexpr int kParts = kGroup / simd::W;

template <int by>
inline Blocks::I shifted(Blocks::I v) {
  if constexpr (by > 0)
    return Blocks::template left<by>(v);
  else if constexpr (by < 0)
    return Blocks::template right<-by>(v);
  else
    return v;
}
// Bits [bit, bit + n) of each byte, at `to`.
template <int bit, int n, int to>
inline Blocks::I bits_of_bytes(Blocks::I v) {
  return Blocks::and_i(shifted<to - bit>(v), int32_t(0x01010101u * (((1u << n) - 1) << to)));
}

// Chunk c of a part: four inputs of each row, from either half of a block. Integers of fewer bits than 4 lie around 8
// where they are nibbles.
template <Stored S, int c>
inline void chunk_of(const uint8_t* from, Blocks::I* first, Blocks::I* second) {
  constexpr StoredInfo info = stored_info(S);
  auto plane = [&](int i) { return Blocks::load_i(reinterpret_cast<const int32_t*>(from + 64 * i)); };
  if constexpr (info.bits >= 4) {
    const Blocks::I both = plane(c);
    *first = bits_of_bytes<0, 4, 0>(both), *second = bits_of_bytes<4, 4, 0>(both);
  } else {
    *first = bits_of_bytes<2 * c, 2, 0>(plane(0)), *second = bits_of_bytes<2 * c, 2, 0>(plane(1));
  }
  constexpr int low = info.bits >= 4 ? 4 : 2;
  if constexpr (info.bits - low == 1) {
    const Blocks::I more = plane(low);
    *first = Blocks::add_i(*first, bits_of_bytes<c, 1, low>(more));
    *second = Blocks::add_i(*second, bits_of_bytes<c + 4, 1, low>(more));
  } else if constexpr (info.bits - low == 2) {
    *first = Blocks::add_i(*first, bits_of_bytes<2 * c, 2, low>(plane(low)));
    *second = Blocks::add_i(*second, bits_of_bytes<2 * c, 2, low>(plane(low + 1)));
  }
  if constexpr (info.values != nullptr)
    *first = Blocks::look_up(info.values, *first), *second = Blocks::look_up(info.values, *second);
}

template <Stored S, Packing P, int c = 0>
inline void expand_integers(const uint8_t* from, uint8_t* to) {
  Blocks::I first, second;
  chunk_of<S, c>(from, &first, &second);
  if constexpr (packing_info(P).quant_bytes == 256) {
    constexpr uint32_t middle = 8 - (1 << (stored_info(S).bits - 1));
    Blocks::I both = Blocks::add_i(first, Blocks::template left<4>(second));
    if constexpr (middle != 0) both = Blocks::add_i(both, Blocks::all(int32_t(0x11111111u * middle)));
    Blocks::store_i(to + 64 * c, both);
  } else {
    Blocks::store_i(to + 64 * c, first);
    Blocks::store_i(to + 64 * (c + 4), second);
  }
  if constexpr (c < 3) expand_integers<S, P, c + 1>(from, to);
}

// What the small scales of 8 blocks are multiplied by, and all others of a row.
struct SuperScales {
  simd::V d{}, m{}, factor = simd::set1(1.0f);

  template <Stored S>
  void load(const uint8_t* p, int part) {
    d = simd::mul(simd::load_f16(p + 2 * simd::W * part), factor);
    if constexpr (stored_info(S).zero == 0)
      m = simd::mul(simd::load_f16(p + 32 + 2 * simd::W * part), simd::mul(factor, simd::set1(-1.0f)));
  }
};

template <Stored S, int kind>
inline simd::V scale_of(const uint8_t* p, int part, const SuperScales& super) {
  constexpr StoredInfo info = stored_info(S);
  const int row = part * simd::W;
  if constexpr (info.scaling == StoredScales::half) return simd::mul(simd::load_f16(p + 2 * row), super.factor);
  if constexpr (info.scaling == StoredScales::power)
    return simd::mul(Blocks::as_float(Blocks::template left<23>(Blocks::bytes(p + row))), simd::set1(0.5f));
  if constexpr (info.scaling == StoredScales::e4m3) return simd::mul(simd::load_e4m3(p + row), super.factor);
  const simd::V by = kind == 0 ? super.d : super.m;
  if constexpr (info.scaling == StoredScales::small) return simd::mul(simd::load_i8(p + row), by);
  if constexpr (info.scaling == StoredScales::nibble)
    return simd::mul(simd::add(simd::load_i4(p + row / 2), simd::set1(8.0f)), by);
}

// Of a half of a block.
template <Stored S>
inline void scales_of(const uint8_t* from, int half, int part, const SuperScales& super, simd::V* d, simd::V* m) {
  constexpr StoredInfo info = stored_info(S);
  const uint8_t* p = from + half * info.kinds() * info.scale_width();
  *d = scale_of<S, 0>(p, part, super);
  if constexpr (info.zero == 0)
    *m = scale_of<S, 1>(p + info.scale_width(), part, super);
  else
    *m = simd::mul(*d, simd::set1(-float(info.zero)));
}

template <Stored S, Packing P>
inline void expand_scales(const uint8_t* from, int part, const SuperScales& super, uint8_t* to) {
  constexpr StoredInfo info = stored_info(S);
  constexpr PackingInfo form = packing_info(P);
  uint8_t* at = to + 4 * simd::W * part;
#pragma GCC unroll 2
  for (int h = 0; h < (info.halves ? 2 : 1); ++h) {
    simd::V d, m;
    scales_of<S>(from, h, part, super, &d, &m);
    if constexpr (form.of_rows) {
      const simd::V middle = simd::fused(d, simd::set1(float(1 << (info.bits - 1))), m);
      Blocks::store_i(at + 64 * h, Blocks::add_i(Blocks::and_i(Blocks::rounded(d), 0xffff),
                                                 Blocks::template left<16>(Blocks::rounded(middle))));
    } else if constexpr (form.f16_scales()) {
      simd::store_f16(to + 2 * simd::W * part, d);
    } else {
      simd::store(reinterpret_cast<float*>(at + 128 * h), d);
      if constexpr (form.zero == 0) simd::store(reinterpret_cast<float*>(at + 128 * h + 64), m);
    }
  }
}

// Where kernels read the blocks of a group; those of the next group are a stride further on.
struct BlockView {
  const uint8_t *quants, *scales;
  int64_t quant_stride, scale_stride;
  // Of stored rows: a later group's bytes, to be prefetched block by block; null otherwise.
  const uint8_t* next = nullptr;
  int64_t next_bytes = 0;

  // With the block'th of these: all of them at once would stall.
  void fetch(int64_t block) const {
    const uint8_t* at = next + block * next_bytes;
    for (int64_t i = 0; i < next_bytes; i += 64) __builtin_prefetch(at + i, 0, Blocks::kLocality);
  }
};

template <Stored S, Packing P>
inline void expand_blocks(const uint8_t* group, int64_t group_bytes, int64_t blocks, int64_t begin, int64_t end,
                          int64_t fetch, uint8_t* quants, uint8_t* scales) {
  constexpr StoredInfo info = stored_info(S);
  constexpr PackingInfo form = packing_info(P);
  const uint8_t *from = group + begin * info.quant_bytes(),
                *scale = group + info.scales_at(blocks) + begin * info.scale_bytes(),
                *above = group + info.supers_at(blocks) + begin / kSuper * info.super_bytes(),
                *end_of_group = group + group_bytes;
  [[maybe_unused]] const float* row_scales = reinterpret_cast<const float*>(end_of_group) - kGroup;
  const int64_t ahead = fetch * group_bytes;
  SuperScales super[kParts];
#pragma GCC unroll 4
  for (int part = 0; part < kParts; ++part) {
    if constexpr (form.of_rows) {  // of rows of zeros, or of what is no number, nothing is to be left
      const simd::V s = simd::load(row_scales + part * simd::W);
      super[part].factor = simd::select_ge(s, simd::set1(1e-37f), simd::div_v(simd::set1(1.0f), s), simd::zero());
    }
    if constexpr (info.scaling == StoredScales::e4m3) super[part].factor = simd::load(row_scales + part * simd::W);
  }
  for (int64_t b = begin; b < end; ++b) {
    if (info.super_bytes() > 0 && (b == begin || b % kSuper == 0)) {
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) super[part].template load<S>(above, part);
      above += info.super_bytes();
    }
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      expand_integers<S, P>(from + 4 * simd::W * part, quants + 4 * simd::W * part);
      expand_scales<S, P>(scale, part, super[part], scales);
    }
    if (fetch != 0) {
      constexpr int bytes = info.quant_bytes();
#pragma GCC unroll 6
      for (int i = 0; i < bytes; i += 64) __builtin_prefetch(from + ahead + i, 0, Blocks::kLocality);
      __builtin_prefetch(scale + ahead, 0, Blocks::kLocality);
    }
    from += info.quant_bytes(), scale += info.scale_bytes();
    quants += form.quant_bytes, scales += form.scale_bytes;
  }
}

template <Packing P>
constexpr bool kMayBeStored = P == Packing::i4_halves || P == Packing::n8_zero || P == Packing::n8_float ||
                              P == Packing::n8_wide || P == Packing::n8_halves;

// For Most blocks of G groups.
template <Packing P, int G, int64_t Most>
struct ExpandBuffer {
  static constexpr PackingInfo kInfo = packing_info(P);
  static constexpr int64_t kQuants = kMayBeStored<P> ? Most * kInfo.quant_bytes : 0,
                           kScales = kMayBeStored<P> ? Most * kInfo.scale_bytes : 0;
  alignas(64) uint8_t bytes[G * (kQuants + kScales) + 64];
};

// Blocks of a group while the `fetch`th group behind it comes nearer.
template <Packing P>
[[gnu::noinline]] void expand_narrow(const PackedMatrix& m, int64_t group, int64_t begin, int64_t end, int64_t fetch,
                                     uint8_t* quants, uint8_t* scales) {
  with_stored(m.stored, [&]<Stored S>() {
    if constexpr (expands_to(S, P))
      expand_blocks<S, P>(m.quants(group), m.group_bytes, m.blocks, begin, end, fetch, quants, scales);
  });
}

// Blocks [begin, end) of G groups: in place, or expanded into the buffer, whose size is their limit.
template <Packing P, int G, int64_t Most>
inline BlockView view_blocks(const PackedMatrix& m, int64_t group, int64_t begin, int64_t end,
                             ExpandBuffer<P, G, Most>& buffer, int64_t fetch = 0) {
  if constexpr (kMayBeStored<P>) {
    if (m.narrow()) {
      using R = ExpandBuffer<P, G, Most>;
      uint8_t* scales = buffer.bytes + G * R::kQuants;
#pragma GCC unroll 2
      for (int g = 0; g < G; ++g)
        expand_narrow<P>(m, group + g, begin, end, fetch, buffer.bytes + g * R::kQuants, scales + g * R::kScales);
      const int64_t of_block = m.group_bytes / m.blocks;
      return {buffer.bytes, scales, R::kQuants, R::kScales, m.quants(group + Blocks::kAhead) + begin * of_block,
              of_block};
    }
  }
  constexpr PackingInfo form = packing_info(P);
  return {m.quants(group) + begin * form.quant_bytes, m.scales(group) + begin * form.scale_bytes, m.group_bytes,
          m.group_bytes};
}

// Blocks that are expanded at once: more would leave the first-level cache before they are read.
constexpr int64_t kExpanded = kSuper;

inline int64_t expanded_at_once(const PackedMatrix& m) { return m.narrow() ? kExpanded : m.blocks; }

// A whole group, as one that is not stored would lie.
template <Packing P>
inline void expand_group(const PackedMatrix& m, int64_t group, uint8_t* to, int64_t group_bytes) {
  constexpr PackingInfo form = packing_info(P);
  const int64_t quants = m.blocks * form.quant_bytes;
  expand_narrow<P>(m, group, 0, m.blocks, 0, to, to + quants);
  if (form.of_rows) __builtin_memcpy(to + group_bytes - kGroup * 4, m.row_scales(group), kGroup * 4);
}

}  // namespace
}  // namespace kvasir::model::cpu
// NOLINTEND(misc-definitions-in-headers)
