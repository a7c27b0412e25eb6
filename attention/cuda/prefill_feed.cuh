// What lies in shared memory while prefill runs, and who fills it: one thread sends for queries, keys and values ahead
// of the warpgroups that multiply them; a few lanes carry new K/V into the cache meanwhile.
#pragma once

#include "attention/cuda/bulk.cuh"
#include "attention/cuda/device.cuh"

namespace kvasir::attention::cuda {

constexpr int kTileQueries = 128, kTileKeys = 128, kHalfTile = 128 * 128;  // bytes of 128 columns of 128 bytes
constexpr int kPieceBytes = 2048, kPieces = 8;  // of new K/V on their way into the cache, two sets in turn

template <class M>
struct PrefillShared {
  // Results leave through the place of their queries, 16 bits an element.
  // Rows come 128 bytes wide at least: what short ones lack is zeros, or nothing where they lie the other way round.
  static constexpr int kRow = M::kD * M::kBytes < 128 ? 128 : M::kD * M::kBytes;
  static constexpr int kQueryBytes = kTileQueries * M::kD * 2, kQueryLoad = kTileQueries * kRow,
                       kKeyBytes = kTileKeys * kRow, kValueLoad = kTileKeys * M::kD * M::kBytes,
                       kValueBytes = kValueLoad + M::kOnes;
  static_assert(kQueryLoad <= kQueryBytes && kValueBytes % 1024 == 0);
  alignas(1024) uint8_t q[2][kQueryBytes];
  uint8_t k[M::kStages][kKeyBytes], v[M::kStages][kValueBytes];
  uint8_t pieces[M::kStores ? 2 : 1][M::kStores ? kPieces : 1][M::kStores ? kPieceBytes : 16];
  PrefillTile work[4];
  int taken[4];  // which tile and head each of them is; below zero: none is left
  uint64_t q_full[2], q_empty[2], k_full[M::kStages], k_empty[M::kStages], v_full[M::kStages], v_empty[M::kStages],
      piece_full[2], tile_asked, tile_told;
};

// Which tiles of keys a tile of queries reads: new ones [new_first, new_end), then old ones [old_first, old_end).
// Never none: a query sees its own key.
struct TileWalk {
  int new_first, new_end, old_first, old_end;
  __device__ int count() const { return new_end - new_first + old_end - old_first; }
  // The i-th, from the last backwards: true if new.
  __device__ bool at(int i, int* tile) const {
    const int n = new_end - new_first;
    *tile = i < n ? new_end - 1 - i : old_end - 1 - (i - n);
    return i < n;
  }
};
// `gathered`: new keys are read back with the old ones.
template <bool kGathered>
__device__ inline TileWalk walk_of(const Shape& s, const PrefillTile& tile) {
  const DeviceSequence& q = tile.of;
  const int last = min(tile.row + kTileQueries, q.q_len) - 1;
  const Range lo = visible(s, q, q.start_pos + tile.row), hi = visible(s, q, q.start_pos + last);
  const int begin = s.sinks > 0 ? 0 : lo.begin, old = kGathered ? q.kv_len : q.start_pos;
  TileWalk w;
  w.old_first = begin / kTileKeys;
  w.old_end = (min(old, hi.end) + kTileKeys - 1) / kTileKeys;
  w.new_first = kGathered ? 0 : max(0, begin - old) / kTileKeys;
  w.new_end = kGathered ? 0 : (max(0, hi.end - old) + kTileKeys - 1) / kTileKeys;
  if (w.old_first >= w.old_end) w.old_first = w.old_end = 0;
  if (w.new_first > w.new_end) w.new_first = w.new_end;
  return w;
}

// One thread finds tiles for its block, each when the one before it is nearly fed. Longest come first, so whoever is
// done sooner, or began sooner, has more of them.
template <class M>
__device__ inline void take_tiles(PrefillShared<M>& sh, const Shape& s, const PrefillTile* tiles,
                                  const TileQueue& queue, int total) {
  for (int n = 0;; ++n) {
    // A block's first is its own where all begin at the same time.
    const int w = n == 0 && !queue.beside ? blockIdx.x : (queue.beside ? 0 : gridDim.x) + atomicAdd(queue.taken, 1);
    if (w < total) {
      const uint4* from = reinterpret_cast<const uint4*>(tiles + w / s.heads);
      uint4* to = reinterpret_cast<uint4*>(&sh.work[n & 3]);
#pragma unroll
      for (int i = 0; i < int(sizeof(PrefillTile) / 16); ++i) to[i] = from[i];
    }
    sh.taken[n & 3] = w < total ? w : -1;
    barrier_arrive(&sh.tile_told);
    if (w >= total) break;
    barrier_wait(&sh.tile_asked, n & 1);
  }
}

// Whoever is the last to find none leaves the queue as it was found.
__device__ inline void leave_queue(const TileQueue& queue) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(queue.taken + 1) : "memory");
  if (before + 1 == int(gridDim.x)) queue.taken[0] = queue.taken[1] = 0;
}

// By the one thread that feeds: what it read is made known to be the block's, not a thread's own, so that it may lie in
// the registers that copies are sent for from.
__device__ inline int block_wide(int x) { return __shfl_sync(1u, x, 0); }

// One thread sends for queries and keys, as far ahead as there is room.
template <class M>
__device__ inline void feed_tiles(PrefillShared<M>& sh, const typename M::Maps& maps, const Shape& s) {
  using Shared = PrefillShared<M>;
  int fill = 0, phase = 1, n = 0;
  for (;; ++n) {
    barrier_wait(&sh.tile_told, n & 1);
    const int w = block_wide(sh.taken[n & 3]), slot = n & 1;
    if (w < 0) break;
    const PrefillTile& tile = sh.work[n & 3];
    const int head = w % s.heads, kv_head = head / s.group;
    const int query_row = block_wide(tile.of.q_begin + tile.row), new_row = block_wide(tile.of.q_begin),
              old_row = block_wide(tile.of.gathered);
    TileWalk walk = walk_of<M::kGathered>(s, tile);
    for (int* x : {&walk.new_first, &walk.new_end, &walk.old_first, &walk.old_end}) *x = block_wide(*x);
    const int count = walk.count();
    for (int i = 0; i < count; ++i) {
      int t;
      const bool fresh = walk.at(i, &t);
      const int row = (fresh ? new_row : old_row) + t * kTileKeys;
      // Late, so that no tile waits long before one block while another has none.
      if (i == max(0, count - 2)) barrier_arrive(&sh.tile_asked);
      barrier_wait(&sh.k_empty[fill], phase);
      barrier_expect(&sh.k_full[fill], Shared::kKeyBytes);
      M::load_keys(sh.k[fill], M::keys(maps, fresh), kv_head, row, &sh.k_full[fill]);
      if (i == 0) {
        barrier_wait(&sh.q_empty[slot], ((n >> 1) & 1) ^ 1);
        barrier_expect(&sh.q_full[slot], Shared::kQueryLoad);
        M::load_queries(sh.q[slot], maps, head, query_row, &sh.q_full[slot]);
      }
      barrier_wait(&sh.v_empty[fill], phase);
      barrier_expect(&sh.v_full[fill], Shared::kValueLoad);
      M::load_values(sh.v[fill], M::values(maps, fresh), kv_head, row, &sh.v_full[fill]);
      if (++fill == M::kStages) fill = 0, phase ^= 1;
    }
  }
  barrier_wait(&sh.q_empty[n & 1], ((n >> 1) & 1) ^ 1);
  barrier_arrive(&sh.q_full[n & 1]);
}

// New K/V that the cache keeps just as they came: copied by kPieces lanes while the others compute, a piece each.
template <class M>
__device__ inline void store_new(PrefillShared<M>& sh, const Shape& s, const StepView& v, const Layer& l, int lane) {
  const int head_bytes = s.head_dim * 2, heads = min(s.kv_heads, kPieceBytes / head_bytes);
  const int parts = (s.kv_heads + heads - 1) / heads, total = v.counts[kCountTokens] * 2 * parts;
  const int step = gridDim.x * kPieces;
  uint8_t* to = nullptr;  // of the piece before
  int bytes = 0;
  for (int p = blockIdx.x + lane * gridDim.x, b = 0; p - lane * int(gridDim.x) < total + step; p += step, ++b) {
    bulk_stores_read<0>();  // what lay here two turns ago
    uint8_t* next_to = nullptr;
    int next_bytes = 0;
    if (p < total) {  // some heads of a token's K or V
      const int token = p / (2 * parts), part = p % parts;
      const bool value = p / parts % 2;
      const Token t = v.tokens[token];
      if (t.flags & kContiguous && t.place >= 0) {
        next_to = (value ? l.cache.value : l.cache.key) + t.place * l.cache.token + part * heads * l.cache.head;
        next_bytes = min(heads, s.kv_heads - part * heads) * head_bytes;
        barrier_expect(&sh.piece_full[b & 1], next_bytes);
        load_bulk(sh.pieces[b & 1][lane],
                  static_cast<const uint8_t*>(value ? l.value : l.key) + int64_t(token) * s.kv_heads * head_bytes +
                      part * heads * head_bytes,
                  next_bytes, &sh.piece_full[b & 1]);
      }
    }
    if (next_bytes == 0) barrier_arrive(&sh.piece_full[b & 1]);
    if (b > 0) {
      const int last = b - 1;
      barrier_wait(&sh.piece_full[last & 1], (last >> 1) & 1);
      if (l.cache.head == head_bytes) {
        if (bytes > 0) store_bulk(to, sh.pieces[last & 1][lane], bytes);
      } else {
        for (int h = 0; h * head_bytes < bytes; ++h)
          store_bulk(to + h * l.cache.head, sh.pieces[last & 1][lane] + h * head_bytes, head_bytes);
      }
      bulk_stores_commit();
    }
    to = next_to, bytes = next_bytes;
  }
  bulk_stores_done();
}

}  // namespace kvasir::attention::cuda
