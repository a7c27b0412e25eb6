// One item of the plan: a block of query rows of one kv head against a range of keys.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>

#include "attention/cpu/kernels.h"
#include "attention/cpu/plan.h"
#include "attention/held_step.h"

namespace kvasir::attention::cpu {

// Float arrays that are aligned and never zeroed.
class Floats {
 public:
  Floats() = default;
  explicit Floats(int64_t n) : data_(static_cast<float*>(std::aligned_alloc(64, size_t(n * 4 + 63) / 64 * 64))) {}
  float* get() const { return data_.get(); }
  float* operator+(int64_t i) const { return data_.get() + i; }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> data_;
};

// Of the widest instruction set that this process may use (core/cpu.h).
const Kernels& best_kernels();

constexpr int kLine = 64;       // bytes of a cache line
constexpr int kTilesKnown = 3;  // whose lines are prefetched

// Where one tile's keys or values lie. Only the keys that some row sees are looked up: index entries of
// others may be anything.
struct Tile {
  int64_t first = 0;                       // absolute position of the tile's first key
  int begin = 0, end = 0;                  // wanted keys
  int sink_end = 0, lo = 0;                // of those, [begin, sink_end) and [lo, end)
  int64_t token_begin = 0, token_end = 0;  // new tokens that see any of it
  int lines = 0;                           // of memory that they lie in
  std::vector<Piece> memory;               // as many as `pieces`
  int pieces = 0;
  KvRows keys, values;
  bool wanted(int j) const { return j < sink_end || j >= lo; }
};

// Attributes::relative_bias as tiles read it: of each head a row, with a tile more at both ends of what is further
// away.
class RelativeBias {
 public:
  explicit RelativeBias(const Attributes& a);
  // Of kTile keys from `distance` behind the query on; null: there is none.
  const float* tile(int64_t head, int64_t distance) const {
    if (each_ == 0) return nullptr;
    return values_.data() + head * each_ + std::clamp<int64_t>(distance + reach_ + kTile, 0, each_ - kTile);
  }

 private:
  int64_t reach_ = 0, each_ = 0;
  std::vector<float> values_;
};

// What one thread needs while it works on an item.
struct Scratch {
  Scratch(const Attributes& a, int rows, int64_t tile_scratch_bytes);
  Floats keys, values;     // one tile
  Floats old[2];           // cyclic only: dequantized keys and values of a tile that holds new tokens too
  Floats query, scores;    // [rows][padded_dim], [rows][kTile]
  Floats mask;             // [rows][kTile]
  Floats split, total;     // outputs of the current split, of all before it
  Floats m, l, M, L, fix;  // [rows]
  Floats row;              // one head's row, for the edges
  Floats tile_scratch;     // what tile kernels work on
  std::vector<Visible> visible;
  std::vector<SoftmaxRow> params;
  int rows = 0, stops = 1;  // of the tile before
  Tile tiles[kTilesKnown];  // in turn: the one at work and those after it
};

// Everything an item reads that is the same for all of them.
struct LayerCall {
  const Attributes* a;
  const Kernels* kernels;
  const TileKernel* tile_kernel;  // null: not for this cache
  CacheKind kind;
  const HeldStep* held;
  const Tensors* tensors;
  const float* angles;       // cos and sin of each new token, [T][rotary_dim]
  const float* rank_angles;  // of ranks, StreamingLLM only
  const float* fresh;        // cyclic only: new tokens as the cache will return them, [T][2][Hkv][padded_dim]
  float* partials;
  const RelativeBias* relative_bias;
};

// The first tile at `from` or later that any row of the item sees any of; false: there is none.
bool next_tile(const LayerCall& call, const AttendItem& item, int64_t from, Scratch& s, Tile* tile);

void rotate(const Rope& rope, const float* angles, float* row);

// Row `part` of (token, head) as float32, bias added; not rotated.
void read_part(const LayerCall& call, int part, int64_t token, int64_t head, float* out, float* spare);

void attend(const LayerCall& call, const AttendItem& item, Scratch& scratch);
void merge_splits(const LayerCall& call, const Merge& merge, Scratch& scratch);

}  // namespace kvasir::attention::cpu
