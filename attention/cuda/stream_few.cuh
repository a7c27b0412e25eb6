// The stream kernel for tiles of up to 8 query rows of one kv head, which is what decoding with grouped heads has. Keys
// are the matrix units' tall side and the rows of q their narrow one: scores come out as [keys x rows], results as
// [elements of V x rows], with half the instructions and half the registers of the other way round. A scale a group
// multiplies K's sums and V's weights, never an element, so groups are of 32 and more.
#pragma once

#include "attention/cuda/stream_append.cuh"
#include "attention/cuda/stream_feed.cuh"
#include "attention/cuda/stream_few_tile.cuh"
#include "attention/cuda/stream_merge.cuh"

namespace kvasir::attention::cuda {

// Narrow kinds wait for arithmetic as much as for memory: three blocks of two or more stages where registers allow.
template <class K, int kD>
struct FewSize : StreamSize<K, kD> {
  using All = StreamSize<K, kD>;
  static constexpr bool kThree = K::kBits < 16 && kD <= 128;
  static constexpr int kStages = !kThree ? All::kStages : 17408 / All::kTileBytes > 4 ? 4 : 17408 / All::kTileBytes;
  static constexpr int kBlocks = kThree ? 3 : All::kBlocks;
  static int bytes(int scale_bytes) { return All::stage_bytes(scale_bytes) * kStages * kStreamWarps; }
  static constexpr int kSharedWarps = kBlocks * kStreamWarps;  // of a block that has a multiprocessor to itself
  static_assert(kStages * All::kTileBytes >= int(sizeof(WarpResult<kD>)));
};
// kOwn: the warps append what their runs of keys end with, and rotate their queries in registers (Layer::appended_here,
// where no blocks share an item). A kernel of its own, so that the others keep their registers.
template <class K, int kD, bool kOwn = false>
__global__ void __launch_bounds__(FewSize<K, kD>::kSharedWarps * 32, 1)
    few_rows_kernel(const __grid_constant__ Shape s, const __grid_constant__ StepView v,
                    const __grid_constant__ Layer l, const __grid_constant__ StreamList list, int given_scale_bytes) {
  using Size = FewSize<K, kD>;
  using Tile = FewTile<K, kD>;
  constexpr int kTile = Size::kTile, kStages = Size::kStages;
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, tid = lane & 3;
  const int scale_bytes = K::kShift > 0 ? (kD >> K::kShift) * 2 : given_scale_bytes;
  const int stage_bytes = Size::stage_bytes(scale_bytes);
  uint8_t* ring = shared + warp * kStages * stage_bytes;

  const int warps = blockDim.x / 32, index = blockIdx.x * warps + warp;
  int kv_head = index % s.kv_heads, part = index / s.kv_heads;
  if (list.blocks_per_head > 0) {  // so many blocks have one kv head of an item
    const int pair = blockIdx.x / list.blocks_per_head;
    kv_head = pair % s.kv_heads;
    part = (pair / s.kv_heads * list.blocks_per_head + blockIdx.x % list.blocks_per_head) * warps + warp;
  }
  // The plan lies in memory since before the previous kernel: it is read while that one still runs.
  const PartHead head = part < list.count ? list.heads[part] : PartHead{};
  const CacheLayer& c = l.cache;
  StreamFeed<K, kD, Size, true> feed(s, v, c, list, head, ring, stage_bytes, scale_bytes, kv_head, lane);
  feed.prefetch();
  Segment seg = head.first;
  QueryRow rows[2];  // 2 * tid and 2 * tid + 1
  int q_token = 0;   // of row g
  auto find_rows = [&] {
    q_token = v.rows[seg.tokens + (seg.row_begin + (g < seg.row_count ? g : 0)) / s.group].token;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      rows[h] = v.rows[seg.tokens + (seg.row_begin + (tid * 2 + h < seg.row_count ? tid * 2 + h : 0)) / s.group];
  };
  if (head.begin < head.end) find_rows();
  wait_for_previous_kernel();
  let_next_kernel_start();
  if constexpr (kOwn) append_runs<kD>(s, v, l, list, head, kv_head, lane);
  // Into the stage that the first copies leave free.
  constexpr bool kAppends = !kOwn && kD % 64 == 0;
  uint8_t* queries = shared + (kStages - 1) * stage_bytes;
  static_assert(Size::kTileBytes >= 16 * kD);
  if constexpr (kAppends)
    if (l.appended_here) {
      append_here<kD>(s, v, l, seg, q_token, kv_head, seg.kv_begin < seg.kv_end && seg.kv_end == rows[0].own + 1, warp,
                      lane, queries);
      __syncthreads();
    }
  if (head.begin == head.end) return;

  const bool extra = transforms_scores(s, l);
  Tile tile;
  tile.g = g, tile.tid = tid, tile.lane = lane;
  int use = 0;
  for (int segment = head.begin; segment < head.end; ++segment) {
    if (segment > head.begin) {
      seg = list.segments[segment];
      find_rows();
    }
    const bool live = g < seg.row_count, here = kAppends && l.appended_here;
    const int flat = seg.row_begin + (live ? g : 0), q_head = kv_head * s.group + flat % s.group;
    const uint16_t* from = here   ? reinterpret_cast<const uint16_t*>(queries) + flat * kD
                           : kOwn ? given_row(s, l, 0, q_head, q_token, kD)
                                  : static_cast<const uint16_t*>(l.q) + (int64_t(q_token) * s.heads + q_head) * kD;
    load_query<K>(from, live, tid, tile.q);
    if constexpr (kOwn) rotate_query<kD>(s, l, q_token, q_head, tid, tile.q);
    if (here) __syncthreads();  // the stage is everybody's again
    if (segment == head.begin)  // behind the queries on the way to memory, so that they do not wait for all keys
      for (int i = 0; i < kStages - 1; ++i) feed.issue();
    tile.begin_rows(s, l, seg, rows, kv_head, tile.widen_query(s));

    for (int key = seg.kv_begin; key < seg.kv_end; key += kTile) {
      copies_wait<kStages - 2>();
      __syncwarp();
      feed.issue();
      const uint8_t* stage = ring + use * stage_bytes;
      use = use + 1 == kStages ? 0 : use + 1;
      const TileScales scales{stage + Size::kTileBytes, scale_bytes, K::kShift > 0 ? K::kShift : c.group_shift,
                              K::kShift > 0 || c.scale_dtype == DType::f16};
      float x[2][kTile / 8];
      tile.multiply_keys(stage, scales, x);
      tile.transform(s, l, extra, key, seg.kv_end, x);
      tile.softmax(x);
      tile.multiply_values(stage + kTile * Size::kRow, scales, x);
    }

    if (list.blocks_per_head > 0) {
      copies_wait<0>();
      __syncwarp();
      tile.leave(*reinterpret_cast<WarpResult<kD>*>(ring), rows);
      merge_warps<kD, Size::kSharedWarps>(s, l, seg, shared, kStages * stage_bytes, kv_head, list.blocks_per_head,
                                          Tile::kShift);
      return;
    }
    tile.store(s, v, l, seg, kv_head);
    if (seg.merges > 0) merge_if_last<kD>(s, v, l, seg, kv_head, lane);
  }
}

}  // namespace kvasir::attention::cuda
