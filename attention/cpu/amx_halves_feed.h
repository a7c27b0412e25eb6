// A thread's memory, and what fills the stages of its ring buffers.
#pragma once

#include "attention/cpu/amx_halves_parts.h"
#include "attention/cpu/prefetch.h"
#include "simd/transpose16.h"

namespace kvasir::attention::cpu {
namespace {

using simd::transpose;

constexpr int kTogether = 8;     // rows whose parts share a register
constexpr int kQueryUnits = 4;   // of 32 elements: two parts by high ones, the same by low ones, third parts by each
constexpr int kWeightUnits = 4;  // of 64 keys: two halves by high ones, by low ones
constexpr int kMostChunks = 8, kFewBlocks = 2, kValueBlocks = 4;

// One thread's memory, cut up.
struct AmxHalvesScratch {
  int32_t chunks;
  bool thirds;  // some row has third parts
  // Groups of rows share blocks of keys, for 32 and the 32 after them, and blocks of values, for 32 elements and those
  // after them. A single group needs two blocks only, that stay in the first-level cache beside what streams through.
  bool many;
  bool key_ready, value_ready;      // the first block of the next scores, of the next accumulate
  uint32_t key_stage, value_stage;  // which those are; a single group has one count for both
  bool has_apart[2 * kMostChunks + kValueBlocks];
  float* worth;      // [row]: of the query's unit
  uint8_t* queries;  // [group of rows][chunk of 32 elements][unit]
  uint8_t* blocks;
  uint8_t* weights;  // [group of rows][32 keys][by which part]
  float* sums;       // [stage][4][16][16]

  Block block(int i) { return {blocks + i * kBlockBytes, has_apart + i}; }
  Block of_keys(uint32_t stage) { return block(int(stage % uint32_t(many ? 2 * chunks : kFewBlocks))); }
  Block of_values(uint32_t stage) {
    return block(many ? 2 * chunks + int(stage % kValueBlocks) : int(stage % kFewBlocks));
  }
};

int groups_of(int rows) { return (rows + kTogether - 1) / kTogether; }

int64_t bytes(int rows, int head_dim) {
  const int64_t groups = groups_of(rows), chunks = head_dim / 32;
  return int64_t(sizeof(AmxHalvesScratch) + 63) / 64 * 64 + (groups * kTogether * 4 + 63) / 64 * 64 +
         kUnit * groups * (chunks * kQueryUnits + kWeightUnits) + (2 * chunks + kValueBlocks) * kBlockBytes + 8 * kUnit;
}

inline AmxHalvesScratch& cut(uint8_t* memory) { return *reinterpret_cast<AmxHalvesScratch*>(memory); }

// The parts of keys, 32 elements of 32 keys after another.
template <DType T>
struct KeyFeed {
  const uint8_t* const* rows;
  AmxHalvesScratch& m;
  int half, end, chunk = 0;
  uint32_t stage;
  BlockAtWork<T, false> at_work;

  KeyFeed(const KvRows& k, AmxHalvesScratch& memory)
      : rows(k.row), m(memory), half(k.begin / 32), end((k.end + 31) / 32), stage(memory.key_stage) {}
  bool busy() const { return half < end; }
  void pass() {
    ++stage;
    if (++chunk == m.chunks) chunk = 0, ++half;
  }
  void start() {
    at_work.start(rows + half * 32, chunk, m.of_keys(stage));
    pass();
  }
};

// The parts of values, 32 keys' 32 elements after the 32 keys' before them.
template <DType T>
struct ValueFeed {
  const uint8_t* const* rows;
  AmxHalvesScratch& m;
  int from, to, half, chunk = 0;
  uint32_t stage;
  BlockAtWork<T, true> at_work;

  ValueFeed(const KvRows& v, AmxHalvesScratch& memory)
      : rows(v.row), m(memory), from(v.begin / 32), to((v.end + 31) / 32), half(from), stage(memory.value_stage) {}
  bool busy() const { return chunk < m.chunks; }
  void pass() {
    ++stage;
    if (++half == to) half = from, ++chunk;
  }
  void start() {
    at_work.start(rows + half * 32, chunk, m.of_values(stage));
    pass();
  }
};

constexpr int kSteps = 4;  // of a block, and at least so many products are beside it

template <class Feed>
[[gnu::always_inline]] inline void make_whole(Feed& feed, Prefetcher& ahead) {
  feed.start();
  for (int i = 0; i < kSteps; ++i) feed.at_work.some(ahead);
}

}  // namespace
}  // namespace kvasir::attention::cpu
