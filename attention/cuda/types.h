// What host and kernels share, as plain data: one step's sequences and work lists, one layer's pointers.
// No CUDA header is needed here, so the plan is built and tested on machines without a toolkit.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "kvcache/view.h"

namespace kvasir::attention::cuda {

enum SequenceFlag : int32_t {
  kCausal = 1,      // bottom-right aligned mask
  kContiguous = 2,  // append leaves its new K/V contiguous as well
  kDeferred = 4,    // cyclic: stored only after everything has been read
  kEight = 8,       // FP8 prefill reads its queries, as E4M3
};

struct DeviceSequence {
  int32_t q_begin = 0, q_len = 0;     // rows of query
  int32_t kv_len = 0, start_pos = 0;  // logical
  int64_t kv_begin = 0;               // column of attn_mask, row of KVC output
  int64_t table = 0;                  // offset mode: its first token; else where its entries start in `table`
  int32_t flags = 0;
  int32_t gathered = -1;  // first row of its old K/V in the gather buffer, or -1
};

// A run of keys one block walks for one tile of query rows and one kv head. Row r of the tile is
// query (row_base + r) / group of `tokens`, head (row_base + r) % group of the kv head.
struct Segment {
  int32_t sequence = 0;              // whose table leads to the keys
  int32_t kv_begin = 0, kv_end = 0;  // kv_begin is a multiple of kKeyBlock
  int32_t tokens = 0;                // first of its queries in StepView::rows
  int32_t row_begin = 0, row_count = 0;
  int32_t seen_begin = 0;  // no row sees keys before it, but for the sinks
  int32_t slot = -1;       // partial result of its first query, or -1: straight to the output
  int64_t table = 0;       // of its sequence, here as well: one load less before the first key
  // Where the last run to finish merges its item at once: the item's first slot (also its counter), and how many
  // runs it was cut into; 0: merged by the kernel after.
  int32_t first_slot = 0, merges = 0;
  // StreamingLLM: key j has rank j - ranked_from among what its rows see; kSinkRun: the run is the sinks, which have
  // their own number, and rows have others among them than among the rest.
  int32_t ranked_from = 0;
};
constexpr int32_t kSinkRun = -1;

// Where a part of the plan begins: its first run of keys, and which of the list are its own. With the places of its
// first keys, sixteen apiece, the way to them is one read of the plan: behind everybody's keys another takes long.
constexpr int kHeadPlaces = 4, kPlaceKeys = 16;
struct alignas(16) PartHead {
  Segment first;
  int32_t begin = 0, end = 0;
  int32_t places[kHeadPlaces] = {-1, -1, -1, -1};  // the first below zero: by the table
};
static_assert(sizeof(PartHead) == 80);

constexpr int32_t kTileRows[] = {8, 16, 32};  // query rows of a tile, by list of the stream kernels
constexpr int kLists = 3;
// Of a tile of the kernel for prefixes that many queries share, and keys that its runs are cut at multiples of.
constexpr int kPrefixRows = 128, kPrefixKeys = 128;

// A new token on its way into the cache: where it goes (-1: a later one of this step takes its slot).
struct Token {
  int32_t sequence = 0, place = 0, flags = 0, unused = 0;
};

// One query: keys [0, sinks) and [begin, end) are visible to it; it stands at position `own`.
struct QueryRow {
  int32_t token = 0, sequence = 0;
  int32_t own = 0, begin = 0, end = 0, unused = 0;
  int64_t column = 0;  // of attn_mask
};

// A query whose parts are merged: partial slots [begin, end) of `merge_slots`, in this order.
struct Merge {
  int32_t token = 0, begin = 0, end = 0;
};

// 128 queries of one sequence for the prefill kernels, with all they need to know of it.
struct alignas(16) PrefillTile {
  DeviceSequence of;
  int32_t sequence = 0, row = 0;
};
static_assert(sizeof(PrefillTile) == 48);

// Where the blocks of a prefill kernel take their tiles.
struct TileQueue {
  int32_t* taken = nullptr;  // how many, and how many blocks found none; both 0 between launches
  // Nothing is read that the previous kernel writes, and all before that one has ended when it lets this one start:
  // tiles are computed wherever a multiprocessor is done with it, and only the end waits.
  bool beside = false;
};

struct StepView {
  const DeviceSequence* sequences = nullptr;
  const int32_t* table = nullptr;  // physical tokens
  const Token* tokens = nullptr;   // [T]
  const int32_t* beam = nullptr;   // [groups, beam_width, max_kvlen]
  const QueryRow* rows = nullptr;
  const Merge* merges = nullptr;
  const int32_t* merge_slots = nullptr;
  const int32_t* counts = nullptr;  // see StepCount
  int32_t beam_width = 0;
  int64_t beam_stride = 0;
};

// Numbers a replayed graph must find in device memory, because they change from step to step.
enum StepCount : int32_t {
  kCountTokens,
  kCountSequences,
  kCountMerges,
  kCountTiles,
  kCountPlain,
  kCountPrefixRuns,
  kCounts = 8
};

struct Shape {
  int32_t heads = 0, kv_heads = 0, group = 0, head_dim = 0;
  int32_t mode = 0, page_shift = 0;  // kvcache::IndexMode
  int32_t window = 0, sinks = 0, cyclic = 0, streaming = 0;
  int32_t rope_style = 0, rotary_dim = 0;
  int32_t packed = 0;
  int32_t fp8_query = 0;  // queries become E4M3 (Layer::q_inverse)
  float scale = 1.0f;     // 1 / (q_scaling * sqrt(head_dim))
  float softcap = 0.0f;
  float out_inv_scale = 1.0f;
  DType io = DType::f32, out = DType::f32;
  DType work = DType::f32;            // of q, k_new, v_new, k_old, v_old: io, or bfloat16 where io is FP8
  const float* slopes = nullptr;      // [heads], ALiBi; null: none
  const float* rope = nullptr;        // [T, rotary_dim/2, 4] cosine, sine of the new tokens' positions, and their rests
  const float* rope_ranks = nullptr;  // streaming: [ranks, rotary_dim/2, 2] cosine, sine by rank
};

// The cache of one layer: `key` is where (token 0, head 0) of this layer begins.
struct CacheLayer {
  uint8_t* key = nullptr;
  uint8_t* value = nullptr;
  uint8_t* key_scale = nullptr;
  uint8_t* value_scale = nullptr;
  int64_t token = 0, head = 0;              // strides in bytes (int4 too: two elements a byte)
  int64_t scale_token = 0, scale_head = 0;  // bytes
  DType dtype = DType::f32, scale_dtype = DType::f32;
  int32_t quant = 0;  // kvcache::QuantKind
  int32_t quant_group = 0, group_shift = 0;
  float k_scale = 1.0f, v_scale = 1.0f;
};

struct Layer {
  const void* query = nullptr;  // as given
  const void* key = nullptr;
  const void* value = nullptr;
  const void* bias = nullptr;
  void* q = nullptr;      // [T, heads, D] of io: the rows attention reads (== query when nothing is done to it)
  void* q8 = nullptr;     // the same as E4M3, of sequences that FP8 prefill takes
  float q_inverse = 0;    // queries become E4M3 in units of its inverse; 0: they do not
  void* k_new = nullptr;  // [T, kv_heads, D] of io: new tokens as the cache returns them
  void* v_new = nullptr;
  int32_t given = 0;              // k_new, v_new are key and value themselves
  int32_t appended_here = 0;      // the stream kernel appends, and turns its queries itself (Launch::own)
  int32_t stored_by_prefill = 0;  // which writes the new K/V of its own sequences into the cache
  void* k_old = nullptr;          // gathered prefixes, the same shape
  void* v_old = nullptr;
  const void* mask = nullptr;
  int64_t mask_head = 0, mask_row = 0;
  const float* sink_logits = nullptr;
  void* out = nullptr;
  float* lse = nullptr;
  float* partial = nullptr;      // [slots, heads, D]
  float* partial_lse = nullptr;  // [slots, heads], natural log
  int32_t* arrived = nullptr;    // [slots, kv_heads]: runs of an item that are done; all 0 between launches
  CacheLayer cache;
};

constexpr int kKeyBlock = 64;  // keys: what segments start at, absolutely

// Runs that a warp (or a block of those that share a kv head) merges where it finds itself the last; more are left to a
// kernel with a block a query.
constexpr int32_t kMergedInPlace = 16;

}  // namespace kvasir::attention::cuda
