// One step's work lists, made on the host as plain data: which kernel takes which queries, where runs of keys
// are cut so that every block reads the same number of bytes, and which partial results are merged. Nothing
// here needs CUDA; tests check it on any machine.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <vector>

#include "attention/backend.h"
#include "attention/cuda/types.h"

namespace kvasir::attention::cuda {

// The lists of the stream kernels, and that of latent attention.
constexpr int kLatentList = kLists, kAllLists = kLists + 1;
constexpr int32_t tile_rows(int list) { return list == kLatentList ? 64 : kTileRows[list]; }

// What the planner must know of the device and of the kernels compiled for this cache.
struct Machine {
  int32_t stream_warps[kAllLists] = {};           // resident on the whole device, by list; 0: no such kernel
  int32_t multiprocessors = 0, shared_warps = 0;  // of a block of the first list that has one to itself; 0: none
  bool prefill = false;                           // the Hopper kernel takes this shape
  bool prefill8 = false;                          // or the one that multiplies FP8
  bool shared_prefix = false;                     // the Hopper kernel for shared prefixes takes this cache
};

// Grids are functions of these, rounded up to buckets, so that equal keys replay one graph.
struct Launch {
  int64_t tokens = 0, sequences = 0, plain = 0, merges = 0, tiles = 0, gathers = 0;
  int64_t prefix_runs = 0;  // of shared prefixes, for their own kernel
  int32_t parts[kAllLists] = {};
  int32_t blocks_per_head = 0;  // blocks that share a kv head of an item of the first list; 0: parts of equal cost
  int64_t exact_tokens = 0;     // where prefill tiles read the query as a tensor of so many rows; else 0
  bool deferred = false, contiguous = false;
  bool outside = true;  // some tokens are of sequences that have no prefill tiles
  bool apart = false;   // and no such sequence reads a page that one with tiles writes
  // Every query is a decode of the first list, whole, and none reads what another appends: the kernel that reads their
  // keys may append, if it can where blocks share a kv head, or where none do.
  bool own = false;
  uint64_t key() const;  // 0 bits differ <=> the same launches
};

class Planner {
 public:
  Planner(const Attributes&, const Limits&, const Machine&);

  size_t bytes() const { return bytes_; }  // of one buffer
  int64_t slots() const { return slots_cap_; }
  int64_t gather_tokens() const { return gather_cap_; }

  // Writes the arrays of a valid step into `buffer` (bytes() long).
  void plan(const Step&, std::byte* buffer);

  const Launch& launch() const { return launch_; }
  StepView view(std::byte* base) const;
  const Segment* segments(std::byte* base, int list) const { return at<Segment>(base, segments_[list]); }
  const PartHead* heads(std::byte* base, int list) const { return at<PartHead>(base, heads_[list]); }
  const QueryRow* plain_rows(std::byte* base) const { return at<QueryRow>(base, plain_); }
  const PrefillTile* tiles(std::byte* base) const { return at<PrefillTile>(base, tiles_); }
  const Segment* prefix_runs(std::byte* base) const { return at<Segment>(base, prefix_runs_); }

  // The pieces of a buffer that this step filled: [offset, offset + length).
  struct Piece {
    size_t offset, length;
  };
  const std::vector<Piece>& used() const { return used_; }

 private:
  // A tile of query rows and the keys it reads.
  struct Item {
    Segment tile;          // kv_begin, kv_end: its main run
    int64_t sink_end = 0;  // > 0: a run [0, sink_end) of its own before it
    int32_t queries = 0;
    int32_t prefix = -1;  // the item that read its shared prefix
    int32_t prefix_offset = 0;
    bool shared = false;  // is such an item: its queries are merged by their own items
    bool partial = false;
    bool merged = false;  // by the stream kernel itself
    int32_t first_cut = 0, cuts = 0;
  };
  struct Cut {
    int32_t slot;
  };

  template <class T>
  static T* at(std::byte* base, size_t offset) {
    return reinterpret_cast<T*>(base + offset);
  }
  // What a step gives to the plain kernel (queries) and to prefill (tiles).
  struct Assigned {
    int64_t plain = 0, tiles = 0;
  };
  int64_t copy_sequences(const Step&, std::byte* buffer);
  void add_shared_prefixes(const Step&, const DeviceSequence*);
  Assigned assign_queries(const Step&, std::byte* buffer);
  void place_tokens(const Step&, std::byte* buffer);
  void order_tiles(PrefillTile*, int64_t count) const;
  void count_launch(const Step&, const Assigned&, int64_t entries, std::byte* buffer);

  bool streams() const { return list_for(1) >= 0; }  // some kernel does
  size_t shared_list() const { return size_t(std::max(0, list_for(tile_rows(kLatentList)))); }
  // Items that read a shared prefix: with a kernel of their own, or before the others of a list.
  std::vector<Item>& prefixes() { return many_share_ ? prefixes_ : items_[shared_list()]; }
  int list_for(int64_t rows) const;
  void add_stream(const DeviceSequence&, int32_t index, int64_t skip);
  int64_t count_ranks(size_t first_row, Item&);
  void partition(int list, std::byte* buffer);
  void cut_prefixes(std::byte* buffer);
  int32_t blocks_to_join(const std::vector<Item>&) const;
  int32_t shared_head_parts(std::vector<Item>&, int32_t blocks, std::byte* buffer);
  void finish_heads(int list, int64_t parts, int32_t segments, std::byte* buffer);
  void write_merges(std::byte* buffer);
  int32_t place_of(const DeviceSequence&, int32_t t, const int32_t* table) const;
  template <class F>
  void pages_of(const DeviceSequence&, int64_t first, const int32_t* table, F&& see) const;
  bool pages_apart(const DeviceSequence*, int64_t count, const int32_t* table);
  bool decodes_apart(const DeviceSequence*, int64_t count, const int32_t* table);
  void set_row(const DeviceSequence&, int32_t index, int32_t i, QueryRow&) const;
  // For prefill, where there is room.
  bool is_long(const DeviceSequence& s) const { return int64_t(s.q_len) * group_ > 32 && s.q_len > 8; }

  Attributes a_;
  Limits limits_;
  Machine machine_;
  int32_t group_, page_shift_;
  int single_list_;              // of one query a sequence
  int32_t per_tile_[kAllLists];  // queries
  int64_t table_cap_, rows_cap_, items_cap_, slots_cap_, gather_cap_, beam_cap_, merges_cap_;
  size_t counts_, sequences_, segments_[kAllLists], heads_[kAllLists], merges_, merge_slots_, tiles_, plain_, rows_,
      tokens_, beam_, table_, prefix_runs_, bytes_;

  Launch launch_;
  int32_t beam_width_ = 0;
  int64_t beam_stride_ = 0;
  std::vector<Piece> used_;
  std::vector<Item> items_[kAllLists];
  std::vector<Item> prefixes_;
  bool many_share_ = false;  // a prefix, more than a tile of the lists holds
  std::vector<Cut> cuts_;
  std::vector<int32_t> prefix_item_, prefix_offset_;  // by sequence, for this step
  std::vector<QueryRow> stream_rows_;
  std::vector<uint64_t> written_;  // a bit a page; all 0 between steps
  int32_t next_slot_ = 0;
};

inline int64_t bucket(int64_t n) { return n <= 0 ? 0 : int64_t(std::bit_ceil(uint64_t(n))); }
inline int64_t down(int64_t x) { return x / kKeyBlock * kKeyBlock; }
inline int64_t blocks_of(int64_t keys) { return (keys + kKeyBlock - 1) / kKeyBlock; }

// Items whose blocks merge their results are cut at multiples of this.
constexpr int64_t kSharedKeys = 32;

// With more decodes than this, or more pages between them, and no kv head shared by blocks, whether they may append
// where they attend is not looked into: it takes the host a nanosecond a page, and they take long anyway.
constexpr int64_t kOwnDecodes = 256, kOwnPages = 16384;

// Batch-invariant mode cuts here and nowhere else; latent attention not even here, whose parts are large.
constexpr int64_t kInvariantRun = 1024;

}  // namespace kvasir::attention::cuda
