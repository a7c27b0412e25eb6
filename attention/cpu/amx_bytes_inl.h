// What the matrix unit multiplies for int8 and int4 caches: bytes as they lie, digits of queries and of weights.
// Included by amx_bytes.cc only.

inline __m512i load64(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline __mmask64 first_bytes(int n) { return n >= 64 ? ~__mmask64(0) : (__mmask64(1) << n) - 1; }

// ---- queries and weights as digits ----------------------------------------------------------------
// Numbers of 24 bits, by the largest of them: no further off than float32's own sums are.

constexpr int kDigits = 3;                // bytes with a sign, the lowest first
constexpr float kMostUnits = 8355000.0f;  // three times 127 is a little more: products may round up
constexpr float kSmallestMost = 1e-30f;   // whose reciprocal is finite; what is less than that counts for nothing

// The largest of what was seen, a NaN above all.
struct Largest {
  __m512i bits = _mm512_castps_si512(_mm512_set1_ps(kSmallestMost));
  void see(__m512 x) { bits = _mm512_max_epu32(bits, _mm512_castps_si512(_mm512_abs_ps(x))); }
  float value() const { return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(int(_mm512_reduce_max_epu32(bits))))); }
};

// Lanes whose lowest three bytes are the digits.
inline __m512i digits_of(__m512 x, __m512 units) {
  const __m512i half = _mm512_set1_epi32(0x808080);
  return _mm512_xor_si512(_mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(x, units)), half), half);
}

// Elements [0, n) of a row as digits, to[digit * stride + d]; gives what one unit is worth, NaN where the row has one.
inline float query_digits(const float* q, int n, int8_t* to, int stride) {
  Largest largest;
  for (int d = 0; d < n; d += 16) largest.see(_mm512_loadu_ps(q + d));
  const float most = largest.value();
  const __m512 units = _mm512_set1_ps(kMostUnits / most);
  for (int d = 0; d < n; d += 16) {
    const __m512i x = digits_of(_mm512_loadu_ps(q + d), units);
    for (int p = 0; p < kDigits; ++p)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + p * stride + d),
                       _mm512_cvtepi32_epi8(_mm512_srli_epi32(x, uint32_t(8 * p))));
  }
  return most / kMostUnits;
}

// The weights of the tile's 64 keys times their scales as digits, 64 bytes each; gives what one unit is worth.
// Keys stand as value_bytes leaves them: byte 16 l + 4 i + b is key 16 i + 4 l + b.
inline float weight_digits(const float* p, const float* scales, uint8_t* to) {
  __m512 x[4];
  Largest largest;
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm512_mul_ps(_mm512_loadu_ps(p + 16 * i), _mm512_load_ps(scales + 16 * i));
    largest.see(x[i]);
  }
  const float most = largest.value();
  const __m512 units = _mm512_set1_ps(kMostUnits / most);
  const __m512i apart = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  __m512i w[4];
  for (int i = 0; i < 4; ++i) w[i] = _mm512_shuffle_epi8(digits_of(x[i], units), apart);
  const __m512i low0 = _mm512_unpacklo_epi32(w[0], w[1]), low1 = _mm512_unpacklo_epi32(w[2], w[3]);
  const __m512i high0 = _mm512_unpackhi_epi32(w[0], w[1]), high1 = _mm512_unpackhi_epi32(w[2], w[3]);
  _mm512_store_si512(to, _mm512_unpacklo_epi64(low0, low1));
  _mm512_store_si512(to + 64, _mm512_unpackhi_epi64(low0, low1));
  _mm512_store_si512(to + 128, _mm512_unpacklo_epi64(high0, high1));
  return most / kMostUnits;
}

// ---- the cache ------------------------------------------------------------------------------------

// 64 elements of int4 as bytes, the even ones, then the odd ones: in the upper half, sixteen times what they are.
inline __m512i bytes_of_nibbles(__m256i packed) {
  const __m512i both = _mm512_broadcast_i64x4(packed);
  const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 0);
  return _mm512_and_si512(_mm512_sllv_epi16(both, shifts), _mm512_set1_epi8(char(0xf0)));
}

// Where element d of 64 stands in a key's bytes.
template <DType T>
inline __m512i element_at_place() {
  alignas(64) uint8_t at[64];
  for (int i = 0; i < 64; ++i) at[i] = uint8_t(T == DType::i8 ? i : i < 32 ? 2 * i : 2 * (i - 32) + 1);
  return _mm512_load_si512(at);
}

// Sixteen keys for the matrix unit: where their rows begin, and one every how many bytes.
struct KeyBlock {
  const uint8_t* at;
  int64_t step;
};

// Whether the rows stand one every `step`.
inline bool in_step(const uint8_t* const* rows, int64_t step) {
  const __m512i first = _mm512_set1_epi64(reinterpret_cast<int64_t>(rows[0]));
  const __m512i each = _mm512_mullo_epi64(_mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7), _mm512_set1_epi64(step));
  const __m512i low = _mm512_add_epi64(first, each), high = _mm512_add_epi64(low, _mm512_set1_epi64(8 * step));
  return (_mm512_cmpneq_epi64_mask(low, _mm512_loadu_si512(rows)) |
          _mm512_cmpneq_epi64_mask(high, _mm512_loadu_si512(rows + 8))) == 0;
}

// Keys [j, j + 16): where they lie if they can be read there, else copied to `room`, 64 bytes for each 64 elements.
template <DType T>
inline KeyBlock key_block(const KvRows& k, int j, uint8_t* room) {
  const int head_dim = k.head_dim;
  if constexpr (T == DType::i8) {
    const int64_t step = k.row[j + 1] - k.row[j];
    if (head_dim >= 64 && in_step(k.row + j, step)) return {k.row[j], step};
  }
  const int64_t step = (head_dim + 63) / 64 * 64;
  for (int d = 0; d < head_dim; d += 64) {
    const __mmask64 there = first_bytes(head_dim - d);
    const __mmask8 there4 = __mmask8(head_dim - d < 64 ? 0x0f : 0xff);
    for (int i = 0; i < 16; ++i) {
      const uint8_t* row = k.row[j + i];
      __m512i x;
      if constexpr (T == DType::i8)
        x = _mm512_maskz_loadu_epi8(there, row + d);
      else
        x = bytes_of_nibbles(_mm256_maskz_loadu_epi32(there4, row + d / 2));
      _mm512_store_si512(room + i * step + d, x);
    }
  }
  return {room, step};
}

// 64 elements of a value, or those 32 that are left; every sixteen of them as one dword of each 128 bits.
template <DType T>
inline __m512i value_row(const uint8_t* row, int d, bool half) {
  if constexpr (T == DType::i8) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, half ? _mm512_maskz_loadu_epi8(first_bytes(32), row + d) : load64(row + d));
  } else {
    alignas(64) static constexpr auto kOrder = [] {
      struct {
        uint8_t at[64];
      } order = {};
      for (int i = 0; i < 64; ++i) {
        const int element = i / 4 % 4 * 16 + i / 16 * 4 + i % 4;
        order.at[i] = uint8_t(element / 2 + element % 2 * 32);
      }
      return order;
    }();
    const uint8_t* at = row + d / 2;
    const __m256i packed = _mm256_maskz_loadu_epi32(half ? 0x0f : 0xff, at);
    return _mm512_permutexvar_epi8(_mm512_load_si512(kOrder.at), bytes_of_nibbles(packed));
  }
}

// Values of four keys together, as the matrix unit wants them: sixteen elements a register, four keys a row of it. The
// keys' order is that of weight_digits.
template <DType T>
inline void value_bytes(const KvRows& v, uint8_t* to, Ahead& ahead) {
  for (int quad = v.begin / 4; quad < (v.end + 3) / 4; ++quad) {
    const uint8_t* const* rows = v.row + 4 * quad;
    uint8_t* out = to + (quad % 4 * 4 + quad / 4) * 64;
    for (int d = 0; d < v.head_dim; d += 64) {
      fetch(ahead);
      const bool half = v.head_dim - d < 64;
      __m512i x[4];
      for (int i = 0; i < 4; ++i) x[i] = value_row<T>(rows[i], d, half);
      const __m512i low0 = _mm512_unpacklo_epi8(x[0], x[1]), low1 = _mm512_unpacklo_epi8(x[2], x[3]);
      const __m512i high0 = _mm512_unpackhi_epi8(x[0], x[1]), high1 = _mm512_unpackhi_epi8(x[2], x[3]);
      uint8_t* at = out + d / 16 * kUnit;
      _mm512_store_si512(at, _mm512_unpacklo_epi16(low0, low1));
      _mm512_store_si512(at + kUnit, _mm512_unpackhi_epi16(low0, low1));
      if (half) continue;
      _mm512_store_si512(at + 2 * kUnit, _mm512_unpacklo_epi16(high0, high1));
      _mm512_store_si512(at + 3 * kUnit, _mm512_unpackhi_epi16(high0, high1));
    }
  }
}
