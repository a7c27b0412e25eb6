// A thread's memory, and what fills it: keys and values as parts.
#pragma once

#include "attention/cpu/amx_convert.h"
#include "attention/cpu/amx_tile.h"
#include "attention/cpu/prefetch.h"
#include "simd/transpose16.h"

namespace kvasir::attention::cpu {
namespace {

using simd::transpose;

constexpr int kQueryParts = 3;  // of a float32
constexpr int kWeightParts = 2;

// One thread's memory, cut up. Little of it is in use at once, so that it stays in the first-level cache beside what
// streams through.
struct AmxScratch {
  int32_t chunks, query_parts;
  bool many;                      // tiles of rows share the parts of a half of the keys; one tile needs two stages only
  bool keys_ready, values_ready;  // the first stage of the next scores, the first block of the next accumulate
  int32_t key_stage;              // of what the next scores begins with: which room it is in
  uint8_t* queries;               // [tile of 16 rows][chunk of 32 elements][part]
  uint8_t* keys;                  // [stage][chunk][part][32 keys]
  uint8_t* values;                // [stage][32 keys][16 elements][part], 32 elements of 64 keys
  uint8_t* weights;               // [tile of rows][32 keys][part]
  float* sums;                    // [stage][2][16][16]
};
constexpr int kMostParts = 3, kWidest = 2;
constexpr int kValueBlock = 2 * 2 * kMostParts * kUnit;

constexpr int64_t key_bytes(int chunks) { return 2 * (chunks > kWidest ? chunks : kWidest) * kMostParts * 2 * kUnit; }

int64_t bytes(int rows, int head_dim) {
  const int64_t tiles = (rows + 15) / 16, chunks = head_dim / 32;
  return (sizeof(AmxScratch) + 63) / 64 * 64 + kUnit * (tiles * chunks * kQueryParts + tiles * 2 * kWeightParts + 4) +
         key_bytes(int(chunks)) + 2 * kValueBlock;
}

inline AmxScratch& cut(uint8_t* memory) { return *reinterpret_cast<AmxScratch*>(memory); }

// Vectors make parts of what comes next while the matrix unit multiplies what came before: in the products of the last
// keys are the first values, in those of the last values the first keys of the next tile.

// Half the keys of a tile and about a cache line of each are a stage.
template <DType T>
struct KeyFeed {
  static constexpr int kParts = parts_of(T), kWide = bits_of(T) == 8 ? 2 : 1;
  static constexpr int kRows = T == DType::bf16 ? 8 : 4;  // at a time
  const uint8_t* const* rows;
  uint8_t* keys;
  int from, to, chunks;
  bool many;
  int stage = 0, chunk = 0, count = 0, row = 0, begin = 0, end = 0;

  KeyFeed(const KvRows& k, const AmxScratch& m)
      : rows(k.row),
        keys(m.keys),
        from(k.begin / 16 * 16),
        to((k.end + 15) / 16 * 16),
        chunks(m.chunks),
        many(m.many) {}
  static int after(int stage, bool many, bool half_done) { return many ? stage + half_done : stage + 1; }
  static uint8_t* room(uint8_t* keys, int stage, bool many, int chunks, int c) {
    return keys + (many ? stage % 2 * chunks + c : stage % 2 * kWide + c % kWide) * kParts * 2 * kUnit;
  }

  void start(int key, int c) {
    row = begin = key, chunk = c;
    end = (key | 31) + 1 < to ? (key | 31) + 1 : to;
    if (row >= to) row = end = to;
    count = kWide == 1 || c + kWide <= chunks ? kWide : chunks - c;
  }
  void first(int first_stage) {
    stage = first_stage;
    start(from, 0);
  }
  void next() {
    const bool half_done = chunk + kWide >= chunks;
    stage = after(stage, many, half_done);
    if (half_done)
      start(end, 0);
    else
      start(begin, chunk + kWide);
  }
  bool busy() const { return row < end; }
  [[gnu::always_inline]] void some(Prefetcher& ahead) {
    if (row >= end) return;
    for (int i = 0; i < (kWide == 1 ? 1 : count); ++i) {
      uint8_t* out = room(keys, stage, many, chunks, chunk + i) + row % 32 * 64;
      prefetch(ahead);
      if constexpr (kRows == 8) prefetch(ahead);
      __m512i x[kRows][kParts];
      for (int r = 0; r < kRows; ++r) key_parts<T>(rows[row + r], chunk + i, x[r]);
      for (int r = 0; r < kRows; ++r)
        for (int p = 0; p < kParts; ++p) _mm512_store_si512(out + p * 2 * kUnit + r * 64, x[r][p]);
    }
    row += kRows;
  }
  [[gnu::always_inline]] void rest(Prefetcher& ahead) {
    while (row < end) some(ahead);
    fence();
  }
};

// Values of keys j and j + 16 are a pair.
template <DType T>
struct ValueFeed {
  static constexpr int kParts = parts_of(T), kPairs = kParts > 1 ? 2 : 4;  // at a time
  const uint8_t* const* rows;
  uint8_t* values;
  int begin, end;  // pairs, of 16 to 32 keys
  int pair = 0, chunk = 0;
  uint8_t* to = nullptr;

  ValueFeed(const KvRows& v, const AmxScratch& m)
      : rows(v.row), values(m.values), begin(v.begin / 32 * 16), end((v.end + 31) / 32 * 16) {}
  void start(int c) { pair = begin, chunk = c, to = values + c % 2 * kValueBlock; }
  [[gnu::always_inline]] void some(Prefetcher& ahead) {
    if (pair >= end) return;
    prefetch(ahead);
    if constexpr (kPairs == 4) prefetch(ahead);
    const uint8_t* const* two = rows + pair + (pair & 16);
    uint8_t* out = to + (pair & 16) / 8 * kParts * kUnit + (pair & 15) * 64;
    for (int i = 0; i < kPairs; ++i)
      for (int d = 0; d < 2; ++d) {
        __m512i x[kParts];
        value_parts<T>(two[i], two[i + 16], chunk * 2 + d, x);
        for (int p = 0; p < kParts; ++p) _mm512_store_si512(out + (d * kParts + p) * kUnit + i * 64, x[p]);
      }
    pair += kPairs;
  }
  [[gnu::always_inline]] void rest(Prefetcher& ahead) {
    while (pair < end) some(ahead);
    fence();
  }
};

}  // namespace
}  // namespace kvasir::attention::cpu
