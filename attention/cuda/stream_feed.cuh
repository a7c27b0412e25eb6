// How a warp of the stream kernels gets its keys and values: its own ring of shared-memory stages, filled by cp.async
// some tiles ahead of where it computes, running on into the next run of keys of its part.
//   bytes in flight for head 128, bf16: 8 warps x 2 stages x 8 KB = 128 KB a multiprocessor
#pragma once

#include "attention/cuda/launch.h"
#include "attention/cuda/stream_kind.cuh"

namespace kvasir::attention::cuda {

constexpr int kStreamWarps = 4;

template <class K, int kD>
struct StreamSize {
  static constexpr int kRow = K::template kRowBytes<kD>;
  static constexpr int kTile = K::kTile;  // keys
  static constexpr int kTileBytes = 2 * kTile * kRow;
  static constexpr int kFit = 24576 / kTileBytes;
  static constexpr int kStages = kFit > 6 ? 6 : kFit < 3 ? 3 : kFit;
  static constexpr int kBlocks = kStages * kTileBytes <= 28672 ? 2 : 1;
  static constexpr int kAhead = 8192 / kRow > 64 ? 64 : 8192 / kRow;  // keys prefetched before the kernel may begin
  __host__ __device__ static int stage_bytes(int scale_bytes) {
    return kTileBytes + (K::kGroup ? 2 * kTile * scale_bytes : 0);
  }
  static int bytes(int scale_bytes) { return kStreamWarps * kStages * stage_bytes(scale_bytes); }
};

// kOnce: nobody else reads these keys.
template <class K, int kD, class Size, bool kOnce>
class StreamFeed {
 public:
  static constexpr int kTile = Size::kTile, kStages = Size::kStages, kRow = Size::kRow, kChunks = kRow / 16;

  __device__ __forceinline__ StreamFeed(const Shape& s, const StepView& v, const CacheLayer& c, const StreamList& list,
                                        const PartHead& head, uint8_t* ring, int stage_bytes, int scale_bytes,
                                        int kv_head, int lane)
      : s_(s),
        v_(v),
        c_(c),
        list_(list),
        ring_(ring),
        key_base_(c.key + kv_head * c.head),
        to_value_(c.value - c.key),
        stage_bytes_(stage_bytes),
        scale_bytes_(scale_bytes),
        kv_head_(kv_head),
        lane_(lane),
        segment_(head.begin),
        last_(head.end) {
    if constexpr (kOnce) policy_ = read_once();
    if (head.places[0] >= 0) known_segment_ = segment_, known_begin_ = head.first.kv_begin;
#pragma unroll
    for (int i = 0; i < 2; ++i) known_[i] = (lane < 16 ? head.places[i * 2] : head.places[i * 2 + 1]) + (lane & 15);
    if (segment_ < last_) {
      take(head.first);
      if (key_ >= end_) {
        ++segment_;
        enter();
      }
    }
    next_place_ = place();
  }

  // The first keys on their way into L2, while the previous kernel still runs. What it writes is seen all the same:
  // nothing comes nearer than L2, which is where its writes go.
  __device__ __forceinline__ void prefetch() const {
#if __CUDA_ARCH__ >= 900
    if (segment_ >= last_) return;
    // Where heads lie side by side, sixteen keys of all of them are one run of bytes. An ask costs much the same
    // whatever its length, so the warps that have the same keys of other heads ask for the others of these runs. Not in
    // a short part, whose first keys would come later so, nor for wide types (1 x 128k took 1 % longer).
    if (kOnce && K::kBits < 16 && list_.blocks_per_head > 0 && segment_ == known_segment_ &&
        end_ - key_ > 2 * kKeyBlock && key_ >= seen_begin_ && c_.head == kRow &&
        c_.token == int64_t(kRow) * s_.kv_heads) {
      for (int i = kv_head_; i < Size::kAhead / kPlaceKeys * 2; i += s_.kv_heads) {
        const int32_t place = __shfl_sync(0xffffffffu, i < 4 ? known_[0] : known_[1], i / 2 % 2 * kPlaceKeys);
        if (lane_ == 0)
          prefetch_l2(c_.key + place * c_.token + (i % 2 ? to_value_ : 0), uint32_t(kPlaceKeys * c_.token));
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < Size::kAhead; i += 32) {
      const int t = key_ + i + lane_;
      if (i + lane_ >= Size::kAhead || t >= end_ || !(t >= seen_begin_ || t < s_.sinks)) continue;
      const uint8_t* row = key_base_ + (segment_ == known_segment_ ? int64_t(known_[i / 32]) : place_of(t)) * c_.token;
      prefetch_l2(row, kRow);
      prefetch_l2(row + to_value_, kRow);
    }
#endif
  }

  // Sends for the next tile, or for nothing once the part has none left.
  __device__ __forceinline__ void issue() {
    if (K::kGroup && scale_bytes_ == 2 && held_to_) {  // loaded a turn ago: two bytes are too few for cp.async
      reinterpret_cast<uint16_t*>(held_to_)[0] = held_scales_[0];
      reinterpret_cast<uint16_t*>(held_to_)[kTile] = held_scales_[1];
      held_to_ = nullptr;
    }
    if (segment_ < last_) {
      const int live = min(end_ - key_, kTile);
      // Zeros for keys that no row sees: whatever lies there might not be a number.
      const uint32_t rows_live =
          __ballot_sync(0xffffffffu, lane_ < live && (key_ + lane_ >= seen_begin_ || key_ + lane_ < s_.sinks));
      uint8_t* stage = ring_ + fill_ * stage_bytes_;
      constexpr uint32_t kAll = kTile == 32 ? 0xffffffffu : (1u << kTile) - 1;
      if (rows_live == kAll)
        copy_rows<true>(shared_address(stage), rows_live);
      else
        copy_rows<false>(shared_address(stage), rows_live);
      if constexpr (K::kGroup) copy_scales(stage, rows_live >> lane_ & 1);
      key_ += kTile;
      if (key_ >= end_) {
        ++segment_;
        enter();
      }
      next_place_ = place();
    }
    copies_commit();
    fill_ = fill_ + 1 == kStages ? 0 : fill_ + 1;
  }

 private:
  __device__ __forceinline__ void take(const Segment& seg) {
    key_ = seg.kv_begin, end_ = seg.kv_end, sequence_ = seg.sequence, seen_begin_ = seg.seen_begin, table_ = seg.table;
  }
  __device__ __forceinline__ void enter() {  // the first run from segment_ on that has keys
    for (; segment_ < last_; ++segment_) {
      take(list_.segments[segment_]);
      if (key_ < end_) return;
    }
  }
  __device__ __forceinline__ int64_t place_of(int t) const {
    return v_.beam_width > 0 ? read_place(s_, v_, sequence_, t) : physical(s_, v_, table_, slot_of(s_, t));
  }
  // Of this lane's row of the tile at the cursor. Plans count tokens of a cache in 32 bits.
  __device__ __forceinline__ uint32_t place() const {
    if (segment_ >= last_) return 0;
    const int t = min(key_ + (lane_ & (kTile - 1)), end_ - 1), ahead = key_ - known_begin_;
    if (segment_ == known_segment_ && ahead < kHeadPlaces * kPlaceKeys)  // a tile never straddles 32 keys
      return __shfl_sync(0xffffffffu, ahead < 32 ? known_[0] : known_[1], t - known_begin_);
    return uint32_t(place_of(t));
  }
  // A tile's rows, 16 bytes a lane and turn. Where a turn is whole rows, a lane keeps to one column of chunks.
  __device__ __forceinline__ void copy(uint32_t to, const uint8_t* from, bool live) const {
    if constexpr (kOnce)
      copy16_once(to, from, live, policy_);
    else
      copy16(to, from, live);
  }
  template <bool kWhole>
  __device__ __forceinline__ void copy_rows(uint32_t stage, uint32_t rows_live) {
    constexpr bool kEven = 32 % kChunks == 0;
    constexpr int kRowsATurn = 32 / kChunks;
    const int my_row = lane_ / kChunks, my_chunk = lane_ % kChunks;
    const uint8_t* key = key_base_ + (kEven ? my_chunk * 16 : 0);
    const uint8_t* value = key + to_value_;
    const uint32_t token = uint32_t(c_.token);
#pragma unroll
    for (int i = 0; i < (kTile * kChunks + 31) / 32; ++i) {
      const int n = i * 32 + lane_, row = kEven ? i * kRowsATurn + my_row : n / kChunks;
      const int chunk = kEven ? my_chunk : n % kChunks;
      const uint64_t offset =
          uint64_t(__shfl_sync(0xffffffffu, next_place_, row & (kTile - 1))) * token + (kEven ? 0 : chunk * 16);
      if (kTile * kChunks % 32 == 0 || row < kTile) {
        const bool live = kWhole || (rows_live >> row & 1);
        copy(stage + row * kRow + K::template key_chunk<kD>(row, chunk) * 16, key + offset, live);
        copy(stage + (kTile + row) * kRow + K::template value_chunk<kD>(row, chunk) * 16, value + offset, live);
      }
    }
  }
  __device__ __forceinline__ void copy_scales(uint8_t* stage, bool here) {  // a lane brings those of its key, K and V
    if (lane_ >= kTile) return;
    const int64_t row = int64_t(uint64_t(next_place_) * uint32_t(c_.scale_token)) + kv_head_ * c_.scale_head;
#pragma unroll
    for (int kv = 0; kv < 2; ++kv) {
      const uint8_t* from = (kv ? c_.value_scale : c_.key_scale) + row;
      uint8_t* to = stage + Size::kTileBytes + (kv * kTile + lane_) * scale_bytes_;
      if (scale_bytes_ == 2) {
        held_scales_[kv] = here ? *reinterpret_cast<const uint16_t*>(from) : 0;
        held_to_ = to - kv * kTile * 2;
      } else if (scale_bytes_ % 16 == 0) {
        for (int i = 0; i < scale_bytes_; i += 16) copy16(shared_address(to + i), from + i, here);
      } else if (scale_bytes_ == 8) {
        copy8(shared_address(to), from, here);
      } else {
        for (int i = 0; i < scale_bytes_; i += 4) copy4(shared_address(to + i), from + i, here);
      }
    }
  }

  const Shape& s_;
  const StepView& v_;
  const CacheLayer& c_;
  const StreamList& list_;
  uint8_t* ring_;
  const uint8_t* key_base_;
  int64_t to_value_;
  int stage_bytes_, scale_bytes_, kv_head_, lane_;
  int segment_, last_;  // the run of keys it stands in
  int key_ = 0, end_ = 0, sequence_ = 0, seen_begin_ = 0;
  int64_t table_ = 0;
  uint32_t next_place_ = 0;
  int known_segment_ = -1, known_begin_ = 0, known_[2];  // where its first 64 keys are, one a lane, then the others
  uint64_t policy_ = 0;
  int fill_ = 0;  // stage
  uint16_t held_scales_[2] = {};
  uint8_t* held_to_ = nullptr;
};

}  // namespace kvasir::attention::cuda
