// Which keys an item looks at next, and where they lie in the cache.
#include <algorithm>
#include <bit>

#include "attention/cpu/attend.h"
#include "kvcache/form.h"
#include "kvcache/quant.h"

namespace kvasir::attention::cpu {
namespace {

alignas(64) constexpr uint8_t kZeros[kMaxHeadDim * 4] = {};

void describe(const LayerCall& call, bool value, KvRows* rows) {
  const kvcache::CacheView& c = call.tensors->cache;
  rows->dtype = c.dtype;
  rows->grouped = c.quant == kvcache::QuantKind::group;
  rows->scale_dtype = c.scale_dtype;
  rows->group = c.quant_group;
  rows->group_shift = c.quant_group > 0 ? std::countr_zero(uint32_t(c.quant_group)) : 0;
  rows->scale = value ? c.v_scale : c.k_scale;
  rows->head_dim = call.a->head_dim;
}

// Cyclic: this call's tokens are not in the cache yet; they stand in `fresh`, dequantized. A tile that
// holds both is made float32 throughout.
void point_at_fresh(const LayerCall& call, const AttendItem& item, const Tile& tile, bool value, float* old,
                    KvRows* rows) {
  const Attributes& a = *call.a;
  const int64_t start = call.held->step.start_pos[item.sequence], padded = padded_dim(a.head_dim);
  const int64_t token0 = call.held->step.seqstarts[item.sequence] - start;
  for (int j = tile.begin; j < tile.end; ++j) {
    const int64_t t = tile.first + j;
    if (!tile.wanted(j)) continue;
    const float* row = old + j * padded;
    if (t >= start)
      row = call.fresh + (((token0 + t) * 2 + value) * a.num_kv_heads + item.kv_head) * padded;
    else
      kvcache::load_row(call.tensors->cache, call.held->physical(item.sequence, cache_slot(a, t)), call.tensors->layer,
                        item.kv_head, value, old + j * padded);
    rows->row[j] = reinterpret_cast<const uint8_t*>(row);
  }
  rows->dtype = DType::f32;
  rows->grouped = false;
}

// Keys [begin, end) of the tile that are neighbours in the cache too, from token `at` on.
struct Run {
  int begin, end;
  int64_t at;
};

// The tile's wanted keys as runs; at most kTile of them.
int find_runs(const LayerCall& call, const AttendItem& item, const Tile& tile, Run* runs) {
  const Attributes& a = *call.a;
  const HeldStep& held = *call.held;
  // Neighbours in the sequence are neighbours in the cache until a page ends.
  const bool paged =
      held.index.mode != kvcache::IndexMode::token_table && a.cyclic_capacity == 0 && !held.step.cache_indirection;
  const bool endless = paged && held.index.mode == kvcache::IndexMode::offset;
  int n = 0;
  for (int j = tile.begin; j < tile.end;) {
    if (!tile.wanted(j)) {
      j = tile.lo;
      continue;
    }
    const int64_t t = tile.first + j, at = held.physical(held.owner(item.sequence, t), cache_slot(a, t));
    const int64_t stop = j < tile.sink_end ? tile.sink_end : tile.end;
    const int64_t left = endless ? stop : paged ? held.index.page.left(t) : 1;
    const int end = int(std::min(stop, j + left));
    if (n > 0 && runs[n - 1].end == j && runs[n - 1].at + j - runs[n - 1].begin == at)
      runs[n - 1].end = end;
    else
      runs[n++] = {j, end, at};
    j = end;
  }
  return n;
}

// n rows of `bytes`, one every `step`, as a piece; returns its cache lines, about.
int64_t add_piece(const uint8_t* at, int64_t n, int64_t bytes, int64_t step, Piece** to) {
  if (step == bytes) bytes *= n, n = 1;
  *(*to)++ = {at, step, n, bytes};
  return n * ((bytes + kLine - 1) / kLine);
}

void point_at(const LayerCall& call, const AttendItem& item, Scratch& s, Tile* tile) {
  const kvcache::CacheView& c = call.tensors->cache;
  Run runs[kTile];
  const int count = find_runs(call, item, *tile, runs);
  Piece* end = tile->memory.data();
  int64_t lines = 0;
  for (bool value : {false, true}) {
    KvRows& rows = value ? tile->values : tile->keys;
    const bool known = value && kvcache::keys_alone(c);  // the same memory
    describe(call, value, &rows);
    rows.begin = tile->begin;
    rows.end = tile->end;
    // Kernels read whole blocks of 32 keys; of those that nobody wants they may read anything finite.
    auto nothing = [&](int from, int to) {
      for (int j = from; j < to; ++j) rows.row[j] = rows.scales[j] = kZeros;
    };
    nothing(tile->begin / 32 * 32, tile->begin);
    nothing(std::max(tile->begin, tile->sink_end), tile->lo);
    nothing(tile->end, (tile->end + 31) / 32 * 32);

    const int64_t row0 = kvcache::row_element(c.strides, 0, call.tensors->layer, item.kv_head, value);
    const uint8_t* data = static_cast<const uint8_t*>(c.data) + dtype_bytes(c.dtype, row0);
    const int64_t step = dtype_bytes(c.dtype, c.strides.token), row_bytes = dtype_bytes(c.dtype, c.head_dim);
    if (rows.grouped) {
      const int64_t scale0 = kvcache::row_element(c.scale_strides, 0, call.tensors->layer, item.kv_head, value);
      const uint8_t* scale = static_cast<const uint8_t*>(c.scale) + dtype_bytes(c.scale_dtype, scale0);
      const int64_t scale_step = dtype_bytes(c.scale_dtype, c.scale_strides.token);
      for (const Run* r = runs; r < runs + count; ++r) {
        const uint8_t* at = scale + r->at * scale_step;
        if (!known)
          lines += add_piece(at, r->end - r->begin, dtype_bytes(c.scale_dtype, c.head_dim / c.quant_group), scale_step,
                             &end);
        call.kernels->point(rows.scales + r->begin, r->end - r->begin, at, scale_step);
      }
    }
    for (const Run* r = runs; r < runs + count; ++r) {
      const uint8_t* at = data + r->at * step;
      if (!known) lines += add_piece(at, r->end - r->begin, row_bytes, step, &end);
      call.kernels->point(rows.row + r->begin, r->end - r->begin, at, step);
    }
  }
  tile->lines = int(lines);
  tile->pieces = int(end - tile->memory.data());
  if (call.fresh && tile->first + tile->end > call.held->step.start_pos[item.sequence]) {
    point_at_fresh(call, item, *tile, false, s.old[0].get(), &tile->keys);
    point_at_fresh(call, item, *tile, true, s.old[1].get(), &tile->values);
  }
}

}  // namespace

bool next_tile(const LayerCall& call, const AttendItem& item, int64_t from, Scratch& s, Tile* tile) {
  const int64_t tokens = item.token_end - item.token_begin;
  const int64_t end = std::min(int64_t(item.split_end) * kSplit, s.visible[size_t(tokens - 1)].hi);
  for (int64_t at = from; at < end; at += kTile) {
    // Rows that see any of it are neighbours: both ends of a row's range only grow.
    auto sees = [&](const Visible& v) { return v.hi > at && (v.lo < at + kTile || v.sink_end > at); };
    int64_t i0 = 0, i1 = tokens;
    while (i0 < i1 && !sees(s.visible[size_t(i0)])) ++i0;
    while (i1 > i0 && !sees(s.visible[size_t(i1 - 1)])) --i1;
    if (i0 == i1) continue;
    const Visible &low = s.visible[size_t(i0)], &high = s.visible[size_t(i1 - 1)];
    tile->first = at;
    tile->end = int(std::min<int64_t>(kTile, high.hi - at));
    tile->lo = int(std::clamp<int64_t>(low.lo - at, 0, tile->end));
    tile->sink_end = int(std::clamp<int64_t>(std::max(low.sink_end, high.sink_end) - at, 0, tile->end));
    tile->begin = tile->sink_end > 0 ? 0 : tile->lo;
    tile->token_begin = item.token_begin + i0;
    tile->token_end = item.token_begin + i1;
    point_at(call, item, s, tile);
    return true;
  }
  return false;
}

}  // namespace kvasir::attention::cpu
