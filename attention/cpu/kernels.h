// What differs by instruction set: the loops inside one tile of keys. Plain pointers only, and no
// inline function from elsewhere: a translation unit built for AVX-512 must not leave copies of shared
// code behind that the linker could hand to a processor without it.
//
// The arithmetic of one row is fixed, so that it cannot matter which rows share a call:
//   score[j]  = for each lane l of a vector, fma over d = l, l + width, .., from 0; then the tree of the lanes' sums
//   tile      = kTile keys that start at a multiple of kTile: maximum, exp, sum in lane order
//   out[d]    = out[d] * correction, then fma over the tile's keys in order
// amx.cc and amx_bytes.cc say what the sums are where matrix units take them.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace kvasir::attention::cpu {

constexpr int kTile = 64;    // keys
constexpr int kSplit = 512;  // keys with an online softmax of their own, merged in order
constexpr int kMaxHeadDim = 576;
constexpr int kFewRows = 8;         // that read the cache themselves: more of them share a packed tile
constexpr int kLeastReadGroup = 8;  // of a scale: tiles of smaller ones are packed for few rows too (small_groups.h)

// A number that the compiler knows, as an argument.
template <int N>
struct Count {
  static constexpr int value = N;
};

// One head's K or V of the keys of one tile, where they lie.
struct KvRows {
  DType dtype = DType::f32;
  bool grouped = false;  // int8 or int4 with a scale per `group`
  DType scale_dtype = DType::f32;
  int group = 0, group_shift = 0;  // a power of two
  float scale = 1.0f;              // per tensor, int8 and FP8
  int head_dim = 0;
  int begin = 0, end = 0;  // only these keys of the tile are wanted by anyone
  const uint8_t* row[kTile];
  const uint8_t* scales[kTile];
};

// Memory of a tile: `rows` pieces of `bytes`, one every `step`.
struct Piece {
  const uint8_t* at;
  int64_t step;
  int64_t rows, bytes;
};

constexpr int kBurst = 4;  // cache lines that are prefetched at once

// A walk over the cache lines of pieces, those of one tile and then those of another.
struct LineWalk {
  const Piece* next = nullptr;
  const Piece* last = nullptr;  // one past it
  const Piece* then = nullptr;
  const Piece* then_last = nullptr;
  Piece row = {};  // what is left of the piece it is in
  const uint8_t* line = nullptr;
  const uint8_t* end = nullptr;
};

// What is prefetched besides the next tile: every fourth line of the one after it, from where the processor guesses the
// rest of a page; and lines of this one, into L1, a little before they are read. Reading waits for places for
// lines on their way into L1: a line that was guessed holds its place for less long, and work whose lines are there
// already goes on while no place is free.
enum class Reach { next, later, all };

// Lines are prefetched between pieces of work, evenly, so that memory is never idle and never waited for. (Pages lie
// anywhere: the processor cannot guess the next one.)
struct Prefetcher {
  LineWalk soon, next, later;
  Reach reach = Reach::next;
  int bursts = 0, stops = 1;  // so many bursts at so many stops
  int due = -1;               // not below 0: one is
};

struct SoftmaxRow {
  int sink_end, lo, hi;  // visible keys of the tile: [0, sink_end) and [lo, hi)
  float slope;           // ALiBi
  float offset;          // first key of the tile minus the query's position
  const float* mask;     // kTile additive values, or null
};

// What the cache holds, as far as it decides who works on it.
struct CacheKind {
  DType dtype = DType::f32;
  bool grouped = false;
  int group = 0, head_dim = 0, query_heads = 0;  // of a kv head
};

// Works on the tiles of caches of some types in a way of its own: by matrix units (products of sixteen rows at once,
// however few there are), or by vectors of the cache's own elements. All rows of an operator take the same way, so that
// it cannot matter how many share a call.
struct TileKernel {
  bool (*takes)(const CacheKind& kind);
  bool (*pays)(const CacheKind& kind);  // so that it is chosen unless KVASIR_ISA names it
  // Bytes that a thread needs for items of up to so many rows.
  int64_t (*bytes)(int rows, int head_dim);
  // Before the tiles of an item, and after the last one.
  void (*begin)(const float* q, int rows, int q_stride, const CacheKind& kind, uint8_t* memory);
  void (*end)();
  // s[r - row][j] of the item's rows [row, row + rows) for the tile's wanted keys (rounded out to blocks of 16).
  // The accumulate after it is over `values`, and the scores after that over `next_keys`, null where that is not known.
  void (*scores)(int row, int rows, const KvRows& keys, const KvRows& values, float* s, uint8_t* memory,
                 Prefetcher* ahead);
  void (*accumulate)(const float* p, int rows, const KvRows& values, const KvRows* next_keys, const float* correction,
                     float* o, int o_stride, uint8_t* memory, Prefetcher* ahead);
  int (*stops)(int head_dim);                    // as Kernels::stops
  Reach (*reach)(const KvRows& keys) = nullptr;  // as Kernels::reach; null: Reach::next
  // What gives the same bits to an item of at most `few` rows, sooner.
  const TileKernel* of_few = nullptr;
  int few = 0;
};

struct Kernels {
  const char* name;
  int width;  // floats a vector; row strides of scratch are multiples of 16

  // K of a tile as [head_dim][kTile], so that a vector holds one d of many keys.
  void (*pack_keys)(const KvRows& rows, float* kt, Prefetcher* ahead);
  // V of a tile as [kTile][stride].
  void (*pack_values)(const KvRows& rows, float* v, int stride, Prefetcher* ahead);
  // s[r][j] for the tile's keys [begin, end) (rounded out to whole vectors).
  void (*scores)(const float* q, int rows, int q_stride, int head_dim, const float* kt, int begin, int end, float* s,
                 Prefetcher* ahead);
  // The same for at most kFewRows rows, straight from the cache: packing would not pay. q is 0 from head_dim to
  // q_stride.
  void (*scores_rows)(const float* q, int rows, int q_stride, const KvRows& keys, float* s, Prefetcher* ahead);
  // In place from scores to weights; updates the row maxima m and sums l, gives the correction.
  void (*softmax)(float* s, int rows, const SoftmaxRow* params, float scale, float softcap, float* m, float* l,
                  float* correction);
  void (*accumulate)(const float* p, int rows, const float* v, int v_stride, int begin, int end,
                     const float* correction, float* o, int o_stride, Prefetcher* ahead);
  // The same for at most kFewRows rows, straight from the cache.
  void (*accumulate_rows)(const float* p, int rows, const KvRows& v, const float* correction, float* o, int o_stride,
                          Prefetcher* ahead);

  // to[j] = at + j * step, for a tile's rows.
  void (*point)(const uint8_t** to, int n, const uint8_t* at, int64_t step);
  // How often these loops stop to prefetch while they work on one tile for so many rows, and what.
  int (*stops)(int rows, int head_dim);
  Reach (*reach)(int rows, const KvRows& keys);
  // (M, L, O) becomes its merge with (m, l, o), n a multiple of 16.
  void (*merge)(float* M, float* L, float* O, float m, float l, const float* o, int n);
  void (*to_f32)(const void* in, DType type, int64_t n, float* out);    // float32, float16, bfloat16
  void (*from_f32)(const float* in, DType type, int64_t n, void* out);  // likewise
  const TileKernel* tile_kernels[3] = {};  // the first that takes a cache, and pays, has it
};

// Null when the processor or the build lacks it.
const Kernels* kernels_amx();
const Kernels* kernels_avx512_vbmi();
const Kernels* kernels_avx512();
const Kernels* kernels_avx2();
const Kernels* kernels_neon();
const Kernels* kernels_portable();

}  // namespace kvasir::attention::cpu
