// How a step's keys are cut into parts of equal cost, and which partial results that leaves to be merged.
#include <algorithm>

#include "attention/cuda/plan.h"
#include "core/check.h"

namespace kvasir::attention::cuda {

// Few items of much the same length: as many blocks each as there are multiprocessors for, so that little is left to
// merge. Gives how many, or 0 where parts of equal cost are done sooner.
int32_t Planner::blocks_to_join(const std::vector<Item>& items) const {
  const int64_t warps = machine_.shared_warps, n = int64_t(items.size());
  if (warps == 0 || n == 0 || a_.batch_invariant) return 0;
  int64_t longest = 1, total = 0;
  for (const Item& i : items) {
    if (i.partial || i.shared) return 0;
    const int64_t keys = i.tile.kv_end - i.tile.kv_begin;
    longest = std::max(longest, keys), total += keys;
  }
  // A key block a warp is enough. By a bucket of the length, so that a graph lives on while sequences grow.
  const int64_t useful = (blocks_of(bucket(longest)) + warps - 1) / warps;
  const int64_t blocks = std::min({int64_t(kMergedInPlace), useful, machine_.multiprocessors / (n * a_.num_kv_heads)});
  const int64_t parts = machine_.stream_warps[0] / a_.num_kv_heads;
  if (blocks == 0 || n * blocks * warps > parts) return 0;
  // What is saved (results stored and read again) is worth some keys of every warp; other parts have a block at least.
  return longest * parts <= (std::max(total, parts * kKeyBlock) + parts * kSharedKeys) * blocks * warps
             ? int32_t(blocks)
             : 0;
}

int32_t Planner::shared_head_parts(std::vector<Item>& items, int32_t blocks, std::byte* buffer) {
  Segment* segments = at<Segment>(buffer, segments_[0]);
  PartHead* heads = at<PartHead>(buffer, heads_[0]);
  const int64_t warps = machine_.shared_warps, all = blocks * warps;
  int32_t count = 0;
  for (Item& item : items) {
    const int64_t begin = item.tile.kv_begin, end = item.tile.kv_end,
                  units = (end - begin + kSharedKeys - 1) / kSharedKeys;
    for (int64_t w = 0; w < all; ++w, ++count) {
      Segment& s = segments[count] = item.tile;
      s.kv_begin = int32_t(std::min(end, begin + units * w / all * kSharedKeys));
      s.kv_end = int32_t(std::min(end, begin + units * (w + 1) / all * kSharedKeys));
      if (blocks > 1) s.first_slot = next_slot_, s.slot = next_slot_ + int32_t(w / warps) * item.queries;
      heads[count].begin = count, heads[count].end = count + 1;
    }
    if (blocks > 1) next_slot_ += blocks * item.queries;
  }
  return count;
}

// Parts of equal cost, in order; a run is cut where a part is full.
void Planner::partition(int list, std::byte* buffer) {
  Segment* segments = at<Segment>(buffer, segments_[list]);
  PartHead* heads = at<PartHead>(buffer, heads_[list]);
  std::vector<Item>& items = items_[list];
  if (const int32_t blocks = list == 0 ? blocks_to_join(items) : 0) {
    const int32_t parts = shared_head_parts(items, blocks, buffer);
    launch_.blocks_per_head = blocks;
    return finish_heads(0, parts, parts, buffer);
  }
  const int64_t want = std::max(1, machine_.stream_warps[list] / a_.num_kv_heads);
  int64_t left = 0;  // in key blocks; an item costs one more for its beginning and end
  for (const Item& i : items) left += blocks_of(i.tile.kv_end - i.tile.kv_begin) + blocks_of(i.sink_end) + 1;
  // Below this a run costs more than it reads; where there is little to read for all, every warp is worth it.
  const int64_t smallest = left < 2 * want ? kKeyBlock : 2 * kKeyBlock;
  int32_t count = 0, part = 0;
  int64_t room = (left + want - 1) / want;
  heads[0].begin = 0;
  auto close = [&] {
    if (part + 1 < want) {
      heads[part].end = count;
      heads[++part].begin = count;
      room = (left + want - part - 1) / (want - part);
    }
  };
  auto emit = [&](Item& item, int64_t begin, int64_t end, bool whole) {
    Segment& s = segments[count++];
    s = item.tile;
    s.kv_begin = int32_t(begin);
    s.kv_end = int32_t(end);
    if (!whole) {
      s.slot = next_slot_;
      next_slot_ += item.queries;
      cuts_.push_back({s.slot});
      ++item.cuts;
    }
    const int64_t cost = blocks_of(end - begin);
    room -= cost;
    left -= cost;
  };
  for (Item& item : items) {
    item.first_cut = int32_t(cuts_.size());
    const int32_t first_segment = count;
    --left, --room;
    if (item.sink_end > 0) {
      emit(item, 0, item.sink_end, false);
      segments[count - 1].ranked_from = kSinkRun;
    }
    const int64_t end = item.tile.kv_end;
    int64_t at_key = item.tile.kv_begin;
    if (a_.batch_invariant) {
      do {
        const int64_t next = list == kLatentList ? end : std::min(end, (at_key / kInvariantRun + 1) * kInvariantRun);
        if (room <= 0) close();
        emit(item, at_key, next, !item.partial && at_key == item.tile.kv_begin && next == end);
        at_key = next;
      } while (at_key < end);
    } else {
      bool first = true;
      do {
        const int64_t keys = end - at_key;
        if (part + 1 < want && room * kKeyBlock < std::min(keys, smallest)) close();
        int64_t take = std::max(room * kKeyBlock, smallest);
        if (part + 1 >= want || keys - take < smallest) take = keys;
        emit(item, at_key, at_key + take, !item.partial && first && take == keys);
        first = false;
        at_key += take;
      } while (at_key < end);
    }
    // Few runs: the last to finish has them merged sooner than another kernel starts.
    item.merged =
        list != kLatentList && !item.shared && item.prefix < 0 && item.cuts > 0 && item.cuts <= kMergedInPlace;
    for (int32_t i = first_segment; item.merged && i < count; ++i)
      segments[i].first_slot = cuts_[size_t(item.first_cut)].slot, segments[i].merges = item.cuts;
  }
  heads[part].end = count;
  while (++part < want) heads[part].begin = heads[part].end = count;
  finish_heads(list, items.empty() ? 0 : want, count, buffer);
}

// What a part begins with, beside it.
void Planner::finish_heads(int list, int64_t parts, int32_t count, std::byte* buffer) {
  const Segment* segments = at<Segment>(buffer, segments_[list]);
  PartHead* heads = at<PartHead>(buffer, heads_[list]);
  const bool paged = a_.index_mode == kvcache::IndexMode::page_table && a_.page_size >= kPlaceKeys &&
                     a_.cyclic_capacity == 0 && beam_width_ == 0;
  const int32_t* table = at<int32_t>(buffer, table_);
  for (int64_t i = 0; i < parts; ++i) {
    PartHead& head = heads[i];
    if (head.begin >= head.end) continue;
    const Segment& s = head.first = segments[head.begin];
    for (int32_t& place : head.places) {
      const int32_t key = s.kv_begin + int32_t(&place - head.places) * kPlaceKeys;
      place = paged && key < s.kv_end ? table[s.table + (key >> page_shift_)] + (key & (a_.page_size - 1)) : -1;
    }
  }
  launch_.parts[list] = int32_t(parts);
  if (parts == 0) return;
  used_.push_back({heads_[list], size_t(parts) * sizeof(PartHead)});
  used_.push_back({segments_[list], size_t(count) * sizeof(Segment)});
}

// Prefixes with a kernel of their own: as many runs as its blocks, one a multiprocessor, by how long they are.
void Planner::cut_prefixes(std::byte* buffer) {
  Segment* runs = at<Segment>(buffer, prefix_runs_);
  int64_t all = 0;
  for (const Item& i : prefixes_) all += i.tile.kv_end;
  int32_t count = 0;
  for (Item& item : prefixes_) {
    const int64_t units = item.tile.kv_end / kPrefixKeys;
    const int64_t blocks = machine_.multiprocessors / a_.num_kv_heads;
    const int64_t parts = std::clamp<int64_t>(blocks * item.tile.kv_end / std::max<int64_t>(all, 1), 1, units);
    item.first_cut = int32_t(cuts_.size());
    for (int64_t p = 0; p < parts; ++p) {
      Segment& run = runs[count++] = item.tile;
      run.kv_begin = int32_t(units * p / parts * kPrefixKeys);
      run.kv_end = int32_t(units * (p + 1) / parts * kPrefixKeys);
      run.slot = next_slot_;
      next_slot_ += item.queries;
      cuts_.push_back({run.slot});
      ++item.cuts;
    }
  }
  launch_.prefix_runs = bucket(count);
  at<int32_t>(buffer, counts_)[kCountPrefixRuns] = count;
  used_.push_back({prefix_runs_, size_t(count) * sizeof(Segment)});
}

void Planner::write_merges(std::byte* buffer) {
  Merge* merges = at<Merge>(buffer, merges_);
  int32_t* slots = at<int32_t>(buffer, merge_slots_);
  int32_t count = 0, used = 0;
  const std::vector<Item>& shared = prefixes();
  for (auto& list : items_)
    for (const Item& item : list) {
      if (item.shared || item.merged || item.cuts == 0) continue;
      for (int32_t q = 0; q < item.queries; ++q) {
        Merge m{stream_rows_[size_t(item.tile.tokens) + size_t(q)].token, used, 0};
        if (item.prefix >= 0) {
          const Item& p = shared[size_t(item.prefix)];
          for (int32_t i = 0; i < p.cuts; ++i)
            slots[used++] = cuts_[size_t(p.first_cut) + size_t(i)].slot + item.prefix_offset + q;
        }
        for (int32_t i = 0; i < item.cuts; ++i) slots[used++] = cuts_[size_t(item.first_cut) + size_t(i)].slot + q;
        m.end = used;
        merges[count++] = m;
      }
    }
  KVASIR_CHECK(next_slot_ <= slots_cap_ && used <= slots_cap_ * 2 && count <= merges_cap_, "slots ", next_slot_, " of ",
               slots_cap_);
  launch_.merges = bucket(count);
  at<int32_t>(buffer, counts_)[kCountMerges] = count;
  used_.push_back({merges_, size_t(count) * sizeof(Merge)});
  used_.push_back({merge_slots_, size_t(used) * 4});
}

}  // namespace kvasir::attention::cuda
