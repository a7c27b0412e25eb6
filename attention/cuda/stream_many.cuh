// The stream kernel for tiles of up to 16 or 32 query rows of one kv head: rows of q are the matrix units' tall side.
// kRotated: StreamingLLM, whose keys and queries are rotated as they are read (stream_rotated.cuh).
#pragma once

#include "attention/cuda/stream_feed.cuh"
#include "attention/cuda/stream_many_tile.cuh"

namespace kvasir::attention::cuda {

template <class K, int kD, int kRowTiles, bool kRotated = false>
__global__ void __launch_bounds__(kStreamWarps * 32, StreamSize<K, kD>::kBlocks)
    many_rows_kernel(const __grid_constant__ Shape s, const __grid_constant__ StepView v,
                     const __grid_constant__ Layer l, const __grid_constant__ StreamList list, int scale_bytes) {
  using Size = StreamSize<K, kD>;
  using Tile = ManyTile<K, kD, kRowTiles, kRotated>;
  constexpr int kTile = Size::kTile, kStages = Size::kStages;
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, tid = lane & 3;
  const int stage_bytes = Size::stage_bytes(scale_bytes);
  uint8_t* ring = shared + warp * kStages * stage_bytes;

  const int index = blockIdx.x * kStreamWarps + warp, kv_head = index % s.kv_heads, part = index / s.kv_heads;
  // The plan lies in memory since before the previous kernel: it is read while that one still runs.
  const PartHead head = part < list.count ? list.heads[part] : PartHead{};
  const CacheLayer& c = l.cache;
  StreamFeed<K, kD, Size, false> feed(s, v, c, list, head, ring, stage_bytes, scale_bytes, kv_head, lane);
  feed.prefetch();
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (head.begin == head.end) return;
  for (int i = 0; i < kStages - 1; ++i) feed.issue();

  const bool extra = transforms_scores(s, l);
  Tile tile;
  tile.g = g, tile.tid = tid, tile.lane = lane;
  int use = 0;
  for (int segment = head.begin; segment < head.end; ++segment) {
    const Segment seg = segment == head.begin ? head.first : list.segments[segment];
    tile.begin_rows(s, v, l, seg, kv_head);
    for (int key = seg.kv_begin; key < seg.kv_end; key += kTile) {
      copies_wait<kStages - 2>();
      __syncwarp();
      feed.issue();
      const uint8_t* stage = ring + use * stage_bytes;
      use = use + 1 == kStages ? 0 : use + 1;
      const TileScales scales{stage + Size::kTileBytes, scale_bytes, c.group_shift, c.scale_dtype == DType::f16};
      float score[kRowTiles][Tile::kN][4] = {};
      uint32_t weights[kRowTiles][Tile::kN / 2][4];
      if constexpr (kRotated)
        tile.multiply_rotated_keys(s, stage, scales, key - max(seg.ranked_from, 0), score);
      else
        tile.multiply_keys(stage, scales, score);
      tile.softmax(s, l, extra, key, seg.kv_end, score, weights);
      tile.multiply_values(stage + kTile * Size::kRow, scales, weights);
    }
    tile.store(s, v, l, seg, kv_head);
    if (seg.merges > 0) merge_if_last<kD>(s, v, l, seg, kv_head, lane);
  }
}

}  // namespace kvasir::attention::cuda
