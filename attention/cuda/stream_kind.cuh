// How one kind of cache becomes operands of the matrix units, 16 keys at a time; lane = 4 * g + tid.
// Narrow types are widened in registers. So that widening needs no shuffles, the order of the contracted
// index is chosen freely: query_dim() says which element of q meets which position of an operand, and
// value_dim() which output column a result lands in.
#pragma once

#include "attention/cuda/device.cuh"
#include "attention/cuda/mma.cuh"

namespace kvasir::attention::cuda {

// Scales of one tile in shared memory: its rows of K, then those of V, `row_bytes` each.
struct TileScales {
  const uint8_t* at;
  int row_bytes, group_shift;
  bool half;
  __device__ float plain(int row, int d) const {
    const int byte = row * row_bytes + (d >> group_shift) * (half ? 2 : 4);
    const uint32_t w = *reinterpret_cast<const uint32_t*>(at + (byte & ~3));  // one load, no branch
    const uint16_t h = uint16_t(w >> (byte & 2) * 8);
    return half ? __half2float(reinterpret_cast<const __half&>(h)) : __uint_as_float(w);
  }
  // Those of rows first, first + 8, ... for one group: one branch for all.
  template <int kN>
  __device__ void rows(int first, int d, float (&x)[kN]) const {
    const uint8_t* p = at + first * row_bytes;
    const int i = d >> group_shift;
    if (half) {
#pragma unroll
      for (int n = 0; n < kN; ++n) x[n] = __half2float(reinterpret_cast<const __half*>(p + n * 8 * row_bytes)[i]);
    } else {
#pragma unroll
      for (int n = 0; n < kN; ++n) x[n] = reinterpret_cast<const float*>(p + n * 8 * row_bytes)[i];
    }
  }
  __device__ float get(int row, int d) const { return fminf(plain(row, d) * 8.0f, 515.0f); }  // carried
};

// The scales of two keys side by side, as one operand.
__device__ inline uint32_t scale_pair(const TileScales& scales, int row, int d) {
  if (!scales.half) return Half::pack(scales.get(row, d), scales.get(row + 1, d));
  const int i = d >> scales.group_shift;
  const uint32_t even = reinterpret_cast<const uint16_t*>(scales.at + row * scales.row_bytes)[i];
  const uint32_t odd = reinterpret_cast<const uint16_t*>(scales.at + (row + 1) * scales.row_bytes)[i];
  uint32_t pair = even | odd << 16;
  const __half2 x =
      __hmin2(__hmul2(reinterpret_cast<__half2&>(pair), __float2half2_rn(8.0f)), __float2half2_rn(515.0f));
  return reinterpret_cast<const uint32_t&>(x);
}

enum class Narrow { none, i8, f8, i4 };

// kShift_ > 0: groups of 1 << kShift_ with float16 scales, known when compiled.
template <class T_, Narrow kNarrow_, bool kGroup_, int kShift_ = 0>
struct Kind {
  using T = T_;
  static constexpr Narrow kNarrow = kNarrow_;
  static constexpr bool kGroup = kGroup_;
  static constexpr int kShift = kShift_;
  static constexpr int kBits = kNarrow == Narrow::none ? 16 : kNarrow == Narrow::i4 ? 4 : 8;
  static constexpr int kTile = kBits == 16 ? 16 : 32;
  // float16 cannot hold the smallest scales well: they are carried 8 times larger (and saturate where an
  // element would leave float16, above 8,188).
  static constexpr float kCarry = kGroup ? 8.0f : 1.0f;

  template <int kD>
  static constexpr int kRowBytes = kD* kBits / 8;

  // Where 16-byte chunk c of row r is kept, so that the reads below spread over the banks.
  template <int kD>
  __device__ static int key_chunk(int r, int c) {
    if constexpr (kBits == 16) return c ^ (kD == 96 ? (r >> 1) & 3 : r & 7);
    if constexpr (kBits == 8) return kD == 96 ? c : kD == 64 ? c ^ (((r >> 1) & 1) << 1) : c ^ ((r & 3) << 1);
    return c ^ (kD == 64 ? (r >> 2) & 1 : kD == 128 ? (r >> 1) & 3 : r & 7);
  }
  template <int kD>
  __device__ static int value_chunk(int r, int c) {
    if constexpr (kBits == 8 && kD >= 128) return c ^ (r & 6);
    return key_chunk<kD>(r, c);
  }

  // A few rows of q are multiplied with int8 keys as the bytes they are.
  static constexpr bool kBytes = kNarrow == Narrow::i8;
  // A lane reads V a chunk at a time; scales by group stand in the way, since a chunk's groups are not a product's.
  template <int kD>
  static constexpr bool kWide = kBits == 8 && !kGroup && kD == 128;

  // Bytes of keys first_row + g and first_row + g + 8, elements 32*kk .. 32*kk+31, as the tall side of a product.
  template <int kD>
  __device__ static void key_bytes(const uint8_t* tile, int first_row, int lane, int kk, uint32_t (&a)[4]) {
    const int g = lane >> 2, d = kk * 32 + (lane & 3) * 8;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int row = first_row + n * 8 + g;
      const uint2 w =
          *reinterpret_cast<const uint2*>(tile + row * kRowBytes<kD> + key_chunk<kD>(row, d / 16) * 16 + d % 16);
      a[n] = w.x, a[n + 2] = w.y;
    }
  }

  // b[n][k][register] for keys first_row + 8n.. and two contraction steps: elements 32*kk .. 32*kk+31. Scales of small
  // groups meet elements (kExact), with kAll those of all.
  template <int kD, bool kExact = true, bool kAll = false>
  __device__ static void keys(const uint8_t* tile, int first_row, int lane, int kk, const TileScales& scales,
                              uint32_t (&b)[2][2][2]) {
    const int g = lane >> 2, tid = lane & 3;
    if constexpr (kBits == 16) {
      const int row = first_row + ((lane >> 4) & 1) * 8 + (lane & 7);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int chunk = kk * 4 + k * 2 + ((lane >> 3) & 1);
        uint32_t r[4];
        load_matrices(r, shared_address(tile + row * kRowBytes<kD> + key_chunk<kD>(row, chunk) * 16));
        b[0][k][0] = r[0], b[0][k][1] = r[1], b[1][k][0] = r[2], b[1][k][1] = r[3];
      }
    } else {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int row = first_row + n * 8 + g, d = kk * 32 + tid * 8;
        if constexpr (kBits == 8) {
          const uint2 w =
              *reinterpret_cast<const uint2*>(tile + row * kRowBytes<kD> + key_chunk<kD>(row, d / 16) * 16 + d % 16);
          widen4(w.x, b[n][0][0], b[n][0][1]);
          widen4(w.y, b[n][1][0], b[n][1][1]);
        } else {
          const uint32_t w =
              *reinterpret_cast<const uint32_t*>(tile + row * kRowBytes<kD> + key_chunk<kD>(row, kk) * 16 + tid * 4);
          nibbles4(w, b[n][0][0], b[n][0][1], b[n][1][0], b[n][1][1]);
        }
        if constexpr (kGroup && kExact)
          if (kAll || scales.group_shift < 5) {  // larger groups scale the sums instead, which is exact
            const float s = scales.get(row, d);
            const uint32_t pair = T::pack(s, s);
            for (int i = 0; i < 4; ++i) b[n][i / 2][i % 2] = pair_mul<T>(b[n][i / 2][i % 2], pair);
          }
      }
    }
  }
  __device__ static int query_dim(int kk, int k, int reg, int half, int tid) {
    if constexpr (kBits == 16) return kk * 32 + k * 16 + reg * 8 + tid * 2 + half;
    if constexpr (kBits == 8) return kk * 32 + tid * 8 + k * 4 + reg * 2 + half;
    return kk * 32 + tid * 8 + k * 2 + reg + half * 4;
  }

  // b[i][register] for output columns value_dim(first + i, 0..7), i < 8 (4 where kD is 96).
  template <int kD, int kCount>
  __device__ static void values(const uint8_t* tile, int first_row, int lane, int first, const TileScales& scales,
                                uint32_t (&b)[kCount][2]) {
    const int g = lane >> 2, tid = lane & 3;
    if constexpr (kBits == 16) {
      const int row = first_row + ((lane >> 3) & 1) * 8 + (lane & 7);
#pragma unroll
      for (int i = 0; i < kCount; i += 2) {
        const int chunk = first + i + (lane >> 4);
        uint32_t r[4];
        load_matrices_transposed(r, shared_address(tile + row * kRowBytes<kD> + value_chunk<kD>(row, chunk) * 16));
        b[i][0] = r[0], b[i][1] = r[1], b[i + 1][0] = r[2], b[i + 1][1] = r[3];
      }
    } else {
      const int d = value_dim<kD>(first, g);  // the next kCount elements are this lane's
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int row = first_row + tid * 2 + pair * 8;
#pragma unroll
        for (int w = 0; w < kCount * kBits / 32; ++w) {
          const int byte = d * kBits / 8 + w * 4;
          const uint32_t lo = *reinterpret_cast<const uint32_t*>(tile + row * kRowBytes<kD> +
                                                                 value_chunk<kD>(row, byte / 16) * 16 + byte % 16);
          const uint32_t hi = *reinterpret_cast<const uint32_t*>(tile + (row + 1) * kRowBytes<kD> +
                                                                 value_chunk<kD>(row + 1, byte / 16) * 16 + byte % 16);
          if constexpr (kBits == 8) {
            widen4(__byte_perm(lo, hi, 0x5140), b[w * 4][pair], b[w * 4 + 1][pair]);
            widen4(__byte_perm(lo, hi, 0x7362), b[w * 4 + 2][pair], b[w * 4 + 3][pair]);
          } else {
            const uint32_t low = __byte_perm(lo, hi, 0x5410), high = __byte_perm(lo, hi, 0x7632);
            for (int i = 0; i < 4; ++i) {
              b[w * 8 + i][pair] = nibbles(low >> (4 * i));
              b[w * 8 + 4 + i][pair] = nibbles(high >> (4 * i));
            }
          }
        }
        if constexpr (kGroup) {
          const uint32_t s = scale_pair(scales, kTile + row, d);
          for (int i = 0; i < kCount; ++i) b[i][pair] = pair_mul<T>(b[i][pair], s);
        }
      }
    }
  }
  template <int kD>
  __device__ static int value_dim(int n, int column) {
    if constexpr (kBits == 16) return n * 8 + column;
    if constexpr (kBits == 8 && kD == 256) return (n / 16) * 128 + column * 16 + n % 16;
    return column * (kD / 8) + n;
  }

  // The same for 32 elements of V by themselves, unscaled: b[i][register] are the keys of element
  // column_dim(block, i, g). Four lanes read two rows each, eight words side by side, without bank conflicts.
  template <int kD>
  __device__ static void columns(const uint8_t* tile, int first_row, int lane, int block, uint32_t (&b)[4][2]) {
    if constexpr (kBits == 16) {
      values<kD, 4>(tile, first_row, lane, block * 4, TileScales{}, b);
    } else {
      const int g = lane >> 2, tid = lane & 3, byte = kBits == 8 ? block * 32 + g * 4 : block * 16 + (g / 2) * 4;
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int row = first_row + tid * 2 + pair * 8;
        uint32_t w[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
          w[i] = *reinterpret_cast<const uint32_t*>(tile + (row + i) * kRowBytes<kD> +
                                                    value_chunk<kD>(row + i, byte / 16) * 16 + byte % 16);
        if constexpr (kBits == 8) {
          pairs_of_rows(w[0], w[1], pair, b);
        } else {
          const uint32_t mine = __byte_perm(w[0], w[1], g % 2 ? 0x7632 : 0x5410);
          nibbles4(mine, b[0][pair], b[1][pair], b[2][pair], b[3][pair]);
        }
      }
    }
  }
  template <int kD>
  __device__ static int column_dim(int block, int i, int g) {
    if constexpr (kWide<kD>) return g * 16 + block * 4 + i;
    return block * 32 + (kBits == 16 ? i * 8 + g : g * 4 + i);
  }
  // Where kWide: the same for all of V's elements, a lane those of one chunk. rows[pair * 2 + i] are what it reads.
  template <int kD>
  __device__ static void wide_rows(const uint8_t* tile, int first_row, int lane, uint4 (&rows)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row + (lane & 3) * 2 + i / 2 * 8 + i % 2;
      rows[i] = *reinterpret_cast<const uint4*>(tile + row * kRowBytes<kD> + value_chunk<kD>(row, lane >> 2) * 16);
    }
  }
  __device__ static uint32_t word(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }
  __device__ static void wide_columns(const uint4 (&rows)[4], int block, uint32_t (&b)[4][2]) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair)
      pairs_of_rows(word(rows[pair * 2], block), word(rows[pair * 2 + 1], block), pair, b);
  }
  // Four elements of two rows as four pairs.
  __device__ static void pairs_of_rows(uint32_t even, uint32_t odd, int pair, uint32_t (&b)[4][2]) {
    widen4(__byte_perm(even, odd, 0x5140), b[0][pair], b[1][pair]);
    widen4(__byte_perm(even, odd, 0x7362), b[2][pair], b[3][pair]);
  }

 private:
  // Four bytes to two pairs.
  __device__ static void widen4(uint32_t w, uint32_t& first, uint32_t& second) {
    if constexpr (kNarrow == Narrow::f8) {
#if __CUDA_ARCH__ >= 890
      asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.rn.f16x2.e4m3x2 %0, lo; cvt.rn.f16x2.e4m3x2 %1, hi; }"
          : "=r"(first), "=r"(second)
          : "r"(w));
#else
      const __half2_raw low = __nv_cvt_fp8x2_to_halfraw2(uint16_t(w), __NV_E4M3);
      const __half2_raw high = __nv_cvt_fp8x2_to_halfraw2(uint16_t(w >> 16), __NV_E4M3);
      first = low.x | uint32_t(low.y) << 16;
      second = high.x | uint32_t(high.y) << 16;
#endif
    } else if constexpr (__is_same(T, Half)) {
      w ^= 0x80808080u;  // 1024 + (x + 128), minus 1152
      first = __byte_perm(w, 0x64646464u, 0x4140);
      second = __byte_perm(w, 0x64646464u, 0x4342);
      first = pair_sub<T>(first, Half::kMagic8), second = pair_sub<T>(second, Half::kMagic8);
    } else {
      // 128 + (x & 127), minus 128 or 256 by the sign bit.
      const uint32_t a = __byte_perm(w, 0x43434343u, 0x4140), b = __byte_perm(w, 0x43434343u, 0x4342);
      first = pair_sub<T>(a & 0xff7fff7fu, a & 0xff80ff80u);
      second = pair_sub<T>(b & 0xff7fff7fu, b & 0xff80ff80u);
    }
  }
  __device__ static uint32_t nibbles(uint32_t w) {
    return pair_sub<T>(((w & 0x000f000fu) ^ 0x00080008u) | T::kMagic, T::kMagic4);
  }
  // Nibbles 0 to 3 of both halves as four pairs: those four bits up stand for 16 times as much.
  __device__ static void nibbles4(uint32_t w, uint32_t& x0, uint32_t& x1, uint32_t& x2, uint32_t& x3) {
    static_assert(__is_same(T, Half) || kBits > 4);
    const uint32_t up = w >> 8;
    x0 = pair_sub<T>((w & 0x000f000fu) ^ 0x64086408u, 0x64086408u);
    x1 = sixteenth_less_72((w & 0x00f000f0u) ^ 0x64806480u);
    x2 = pair_sub<T>((up & 0x000f000fu) ^ 0x64086408u, 0x64086408u);
    x3 = sixteenth_less_72((up & 0x00f000f0u) ^ 0x64806480u);
  }
  __device__ static uint32_t sixteenth_less_72(uint32_t x) {  // (1024 + 16 u) / 16 - 72 = u - 8, exactly
    const uint32_t sixteenth = 0x2c002c00u, less = 0xd480d480u;
    const __half2 y = __hfma2(reinterpret_cast<__half2&>(x), reinterpret_cast<const __half2&>(sixteenth),
                              reinterpret_cast<const __half2&>(less));
    return reinterpret_cast<const uint32_t&>(y);
  }
};

}  // namespace kvasir::attention::cuda
