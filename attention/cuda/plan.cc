#include "attention/cuda/plan.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace kvasir::attention::cuda {
namespace {

int64_t tokens_of(const Step& step) { return step.batch > 0 ? step.seqstarts[step.batch] : 0; }

}  // namespace

uint64_t Launch::key() const {
  uint64_t k = 1469598103934665603ull;
  for (int64_t x : {tokens, sequences, plain, merges, tiles, gathers, int64_t(parts[0]), int64_t(parts[1]),
                    int64_t(parts[2]), int64_t(parts[3]), int64_t(blocks_per_head), int64_t(deferred),
                    int64_t(contiguous), int64_t(outside), int64_t(apart), int64_t(own), exact_tokens, prefix_runs})
    k = (k ^ uint64_t(x)) * 1099511628211ull;
  return k;
}

Planner::Planner(const Attributes& a, const Limits& limits, const Machine& machine)
    : a_(a), limits_(limits), machine_(machine) {
  group_ = a.num_heads / a.num_kv_heads;
  page_shift_ = a.index_mode == kvcache::IndexMode::page_table ? std::countr_zero(uint32_t(a.page_size)) : 0;
  const int64_t B = limits.max_batch, T = limits.max_tokens;
  int64_t list_parts[kAllLists], all_parts = 0;
  for (int i = 0; i < kAllLists; ++i)
    all_parts += list_parts[i] =
        machine.stream_warps[i] ? std::max<int64_t>(1, machine.stream_warps[i] / a.num_kv_heads) : 0;
  const bool latent = machine.stream_warps[kLatentList] > 0;
  const int64_t runs = a.batch_invariant && !latent ? (limits.max_kvlen + kInvariantRun - 1) / kInvariantRun + 1 : 1;
  switch (a.index_mode) {
    case kvcache::IndexMode::offset: table_cap_ = 0; break;
    case kvcache::IndexMode::page_table: table_cap_ = B * limits.max_pages; break;
    case kvcache::IndexMode::token_table: table_cap_ = B * limits.max_kvlen; break;
  }
  rows_cap_ = 3 * T;  // a tile of a shared prefix may be left half empty
  items_cap_ = B + 2 * T * group_ / 16 + T + 2;
  beam_cap_ = B * limits.max_kvlen;
  gather_cap_ = machine.prefill8  ? (limits.max_kvlen + T + 16 * B + 127) / 128 * 128
                : machine.prefill ? limits.max_kvlen + T
                                  : 0;
  // Two unfinished runs a part, a whole tile of queries each; a shared prefix and sinks add one run a query. Latent
  // attention's queries are many heads wide: only those that share a prefix have room for that.
  const int64_t tile_queries = std::max(1, tile_rows(latent ? kLatentList : kLatentList - 1) / group_);
  const int64_t prefix_blocks = machine.shared_prefix ? machine.multiprocessors / a.num_kv_heads + 1 : 0;
  slots_cap_ = 2 * all_parts * tile_queries + prefix_blocks * (kPrefixRows / group_) +
               (latent ? 2 * std::min(T, B * tile_queries) : 4 * T + (runs > 1 ? runs * T : 0));
  merges_cap_ = T;

  size_t offset = 0;
  auto take = [&](int64_t n, size_t size) {
    size_t here = offset;
    offset = (offset + size_t(n) * size + 255) / 256 * 256;
    return here;
  };
  counts_ = take(kCounts, 4);
  sequences_ = take(B, sizeof(DeviceSequence));
  for (int i = 0; i < kAllLists; ++i) heads_[i] = take(list_parts[i], sizeof(PartHead));
  for (int i = 0; i < kAllLists; ++i)
    segments_[i] = take(list_parts[i] ? (items_cap_ + list_parts[i]) * (runs + 1) : 0, sizeof(Segment));
  merges_ = take(merges_cap_, sizeof(Merge));
  merge_slots_ = take(slots_cap_ * 2, 4);
  tiles_ = take(T / 128 + B + 1, sizeof(PrefillTile));
  plain_ = take(T, sizeof(QueryRow));
  rows_ = take(rows_cap_, sizeof(QueryRow));
  tokens_ = take(T, sizeof(Token));
  beam_ = take(beam_cap_, 4);
  table_ = take(table_cap_, 4);
  prefix_runs_ = take(prefix_blocks > 0 ? prefix_blocks + T : 0, sizeof(Segment));
  bytes_ = offset;
  for (auto& list : items_) list.reserve(size_t(items_cap_));
  single_list_ = list_for(group_);
  for (int i = 0; i < kAllLists; ++i) per_tile_[i] = tile_rows(i) / group_;
  stream_rows_.reserve(size_t(rows_cap_));
}

StepView Planner::view(std::byte* base) const {
  StepView v;
  v.counts = at<int32_t>(base, counts_);
  v.sequences = at<DeviceSequence>(base, sequences_);
  v.merges = at<Merge>(base, merges_);
  v.merge_slots = at<int32_t>(base, merge_slots_);
  v.rows = at<QueryRow>(base, rows_);
  v.tokens = at<Token>(base, tokens_);
  v.beam = at<int32_t>(base, beam_);
  v.table = at<int32_t>(base, table_);
  v.beam_width = beam_width_;
  v.beam_stride = beam_stride_;
  return v;
}

int32_t Planner::place_of(const DeviceSequence& s, int32_t t, const int32_t* table) const {
  int32_t slot = t;
  if (a_.cyclic_capacity > 0 && t >= a_.sinks) {
    const int32_t ring = a_.cyclic_capacity - a_.sinks;
    if (t + ring < s.kv_len) return -1;
    slot = a_.sinks + (t - a_.sinks) % ring;
  }
  switch (a_.index_mode) {
    case kvcache::IndexMode::offset: return int32_t(s.table + slot);
    case kvcache::IndexMode::page_table: return table[s.table + (slot >> page_shift_)] + (slot & (a_.page_size - 1));
    default: return table[s.table + slot];
  }
}

// The pages of a sequence from its first-th on; an entry that no key needs may be any number, and is passed over.
template <class F>
void Planner::pages_of(const DeviceSequence& s, int64_t first, const int32_t* table, F&& see) const {
  for (int64_t p = first; p < (int64_t(s.kv_len) + a_.page_size - 1) >> page_shift_; ++p)
    if (const uint32_t page = uint32_t(table[s.table + p]) >> page_shift_; page < written_.size() * 64) see(page);
}

// Whether what prefill writes into the cache is read by its own sequences alone: a step's writes come before its reads.
bool Planner::pages_apart(const DeviceSequence* sequences, int64_t count, const int32_t* table) {
  if (a_.index_mode != kvcache::IndexMode::page_table || a_.cyclic_capacity > 0) return false;
  written_.resize(size_t(limits_.cache_tokens >> page_shift_) / 64 + 1);
  const auto written = [&](auto&& see) {
    for (int64_t b = 0; b < count; ++b)
      if (sequences[b].flags & kContiguous) pages_of(sequences[b], sequences[b].start_pos >> page_shift_, table, see);
  };
  written([&](uint32_t page) { written_[page / 64] |= uint64_t(1) << page % 64; });
  uint64_t met = 0;
  for (int64_t b = 0; b < count; ++b)
    if (!(sequences[b].flags & kContiguous) && sequences[b].q_len > 0)
      pages_of(sequences[b], 0, table, [&](uint32_t page) { met |= written_[page / 64] >> page % 64; });
  written([&](uint32_t page) { written_[page / 64] = 0; });
  return (met & 1) == 0;
}

// Whether every sequence is a decode whose last page, which it writes, is in no other place of the step's tables.
bool Planner::decodes_apart(const DeviceSequence* sequences, int64_t count, const int32_t* table) {
  if (a_.index_mode != kvcache::IndexMode::page_table || a_.cyclic_capacity > 0 || beam_width_ > 0) return false;
  written_.resize(size_t(limits_.cache_tokens >> page_shift_) / 64 + 1);
  for (int64_t b = 0; b < count; ++b)
    if (sequences[b].q_len != 1 || sequences[b].start_pos + 1 != sequences[b].kv_len) return false;
  const auto written = [&](auto&& see) {
    for (int64_t b = 0; b < count; ++b) pages_of(sequences[b], sequences[b].start_pos >> page_shift_, table, see);
  };
  written([&](uint32_t page) { written_[page / 64] |= uint64_t(1) << page % 64; });
  int64_t met = 0, places = 0;
  for (int64_t b = 0; b < count; ++b)
    pages_of(sequences[b], 0, table, [&](uint32_t page) { met += int64_t(written_[page / 64] >> page % 64 & 1); });
  written([&](uint32_t page) {  // each once: a page written twice is no longer marked when its turn comes again
    places += int64_t(written_[page / 64] >> page % 64 & 1);
    written_[page / 64] &= ~(uint64_t(1) << page % 64);
  });
  return met == count && places == count;
}

// Written where it lies: copies of what was just stored in pieces wait for the store.
void Planner::set_row(const DeviceSequence& s, int32_t index, int32_t i, QueryRow& r) const {
  r.token = s.q_begin + i;
  r.sequence = index;
  r.own = s.kv_len - s.q_len + i;
  r.column = s.kv_begin;
  const bool cut = s.flags & kCausal || a_.window > 0 || a_.is_alibi;
  r.end = cut ? std::clamp(r.own + 1, 0, s.kv_len) : s.kv_len;
  r.begin = a_.window > 0 ? std::max(a_.sinks, r.own - (a_.window - a_.sinks) + 1) : 0;
  if (a_.streaming_positions) r.begin = std::min(r.begin, s.start_pos);  // dense inside one call
  r.begin = std::clamp(r.begin, 0, r.end);
}

// The smallest tile that holds so many rows, else the largest there is.
int Planner::list_for(int64_t rows) const {
  int best = -1;
  for (int i = 0; i < kAllLists; ++i) {
    if (machine_.stream_warps[i] == 0 || tile_rows(i) < group_) continue;
    best = i;
    if (tile_rows(i) >= rows) break;
  }
  return best;
}

// StreamingLLM: what ranks in the runs of a tile are counted from. Gives where its window begins.
int64_t Planner::count_ranks(size_t first_row, Item& item) {
  if (stream_rows_.back().begin <= a_.sinks) {  // all that comes before each row: ranks are positions
    for (size_t r = first_row; r < stream_rows_.size(); ++r) stream_rows_[r].begin = 0;
    return 0;
  }
  const int32_t begin = stream_rows_[first_row].begin;
  item.sink_end = a_.sinks;
  item.tile.ranked_from = std::max(0, begin - a_.sinks);
  return begin;
}

// Queries of one sequence as tiles; keys before `skip` are read by the sequence's shared item.
void Planner::add_stream(const DeviceSequence& s, int32_t index, int64_t skip) {
  const int list = s.q_len == 1 ? single_list_ : list_for(int64_t(s.q_len) * group_);
  const int32_t per_tile = per_tile_[list];
  // StreamingLLM's queries become E4M3 at ranks of their own, not at those that rows of a tile share: one begins its
  // window where all do.
  const auto begins = [&](const QueryRow& r) { return std::max(r.begin, a_.sinks); };
  const bool alike = a_.streaming_positions && a_.fp8_query;
  for (int32_t first = 0, queries = 0; first < s.q_len; first += queries) {
    const size_t first_row = stream_rows_.size();
    for (queries = 0; queries < std::min(per_tile, s.q_len - first); ++queries) {
      set_row(s, index, first + queries, stream_rows_.emplace_back());
      if (alike && begins(stream_rows_.back()) != begins(stream_rows_[first_row])) {
        stream_rows_.pop_back();
        break;
      }
    }
    Item& item = items_[list].emplace_back();
    item.queries = queries;
    item.tile.sequence = index;
    item.tile.table = s.table;
    item.tile.tokens = int32_t(first_row);
    item.tile.row_count = queries * group_;
    // Together they see what begins with the first and ends with the last.
    int64_t begin = stream_rows_[first_row].begin;
    const int64_t end = stream_rows_.back().end;
    if (a_.streaming_positions) {
      begin = count_ranks(first_row, item);
      item.tile.seen_begin = int32_t(begin);
      begin = down(begin);
    } else {
      int64_t sink_end = a_.window > 0 ? std::min<int64_t>(a_.sinks, begin) : 0;
      item.tile.seen_begin = int32_t(begin);
      begin = std::max(down(begin), skip);
      if (sink_end > begin) sink_end = begin;  // the runs meet
      if (begin <= blocks_of(sink_end) * kKeyBlock && skip == 0) begin = sink_end = 0;
      item.sink_end = sink_end;
    }
    item.tile.kv_begin = int32_t(begin);
    item.tile.kv_end = int32_t(std::max(begin, end));
    item.partial = item.sink_end > 0;
    if (skip > 0) {
      item.prefix = prefix_item_[size_t(index)];
      item.prefix_offset = prefix_offset_[size_t(index)] + first;
      item.partial = true;
    }
  }
}

// Sequences as kernels read them, with their tables; gives how many entries those have.
int64_t Planner::copy_sequences(const Step& step, std::byte* buffer) {
  DeviceSequence* sequences = at<DeviceSequence>(buffer, sequences_);
  int32_t* table = at<int32_t>(buffer, table_);
  int64_t entries = 0;
  for (int64_t b = 0; b < step.batch; ++b) {
    DeviceSequence& s = sequences[b];
    s.q_begin = int32_t(step.seqstarts[b]);
    s.q_len = int32_t(step.seqstarts[b + 1] - step.seqstarts[b]);
    s.kv_begin = step.kvstarts[b];
    s.kv_len = int32_t(step.kvstarts[b + 1] - step.kvstarts[b]);
    s.start_pos = int32_t(step.start_pos[b]);
    s.flags = a_.is_causal && s.q_len > 1 && b >= step.decoding_batches ? kCausal : 0;
    s.gathered = -1;
    s.table = entries;
    switch (a_.index_mode) {
      case kvcache::IndexMode::offset: s.table = step.cachestarts[b]; break;
      case kvcache::IndexMode::page_table: {
        int64_t slots = a_.cyclic_capacity > 0 ? std::min<int64_t>(s.kv_len, a_.cyclic_capacity) : s.kv_len;
        const int64_t pages = std::min(step.max_pages, (slots + a_.page_size - 1) >> page_shift_);
        const int64_t* from = step.cachestarts + b * step.max_pages;
        int32_t* to = table + entries;
        for (int64_t p = 0; p < pages; ++p) to[p] = int32_t(from[p]);
        entries += pages;
        break;
      }
      case kvcache::IndexMode::token_table: {
        const int64_t* from = step.cachestarts + s.kv_begin;
        for (int32_t t = 0; t < s.kv_len; ++t) table[entries + t] = int32_t(from[t]);
        entries += s.kv_len;
        break;
      }
    }
  }
  used_.push_back({sequences_, size_t(step.batch) * sizeof(DeviceSequence)});
  if (entries) used_.push_back({table_, size_t(entries) * 4});
  if (step.cache_indirection) {
    const size_t n = size_t(step.batch * step.max_kvlen) * 4;
    std::memcpy(buffer + beam_, step.cache_indirection, n);
    used_.push_back({beam_, n});
  }
  return entries;
}

// Shared prefixes before all else: one item reads them for all of a group's queries.
void Planner::add_shared_prefixes(const Step& step, const DeviceSequence* sequences) {
  prefix_item_.assign(size_t(step.batch), -1);
  prefix_offset_.assign(size_t(step.batch), 0);
  many_share_ = false;
  if (!streams() || !step.shared_group || !step.shared_len || a_.window > 0 || beam_width_ > 0 || a_.batch_invariant ||
      a_.cyclic_capacity > 0)
    return;
  std::vector<int32_t> left;  // by group: queries that have no item yet
  for (int64_t b = 0; b < step.batch; ++b) {
    const int32_t g = step.shared_group[b];
    if (g < 0 || is_long(sequences[b])) continue;
    if (size_t(g) >= left.size()) left.resize(size_t(g) + 1, 0);
    left[size_t(g)] += sequences[b].q_len;
  }
  // A group whose rows fit one tile of the stream kernels is read once there, too.
  many_share_ = machine_.shared_prefix && std::any_of(left.begin(), left.end(), [&](int32_t queries) {
                  return queries * group_ > kTileRows[kLists - 1];
                });
  std::vector<Item>& items = prefixes();
  const int32_t per_tile = many_share_ ? kPrefixRows / group_ : per_tile_[shared_list()];
  if (per_tile < 2) return;
  const int64_t multiple = many_share_ ? kPrefixKeys : kKeyBlock;
  std::vector<int32_t> open(left.size(), -1);  // by group: item with room
  for (int64_t b = 0; b < step.batch; ++b) {
    const int32_t g = step.shared_group[b];
    const DeviceSequence& s = sequences[b];
    const int64_t shared = g < 0 ? 0 : step.shared_len[g] / multiple * multiple;
    if (shared == 0 || s.q_len == 0 || s.q_len > per_tile || is_long(s) || shared > s.kv_len - s.q_len) continue;
    int32_t& slot = open[size_t(g)];
    if (slot < 0 || items[size_t(slot)].queries + s.q_len > per_tile) {
      slot = int32_t(items.size());
      Item item;
      item.tile.sequence = int32_t(b);
      item.tile.table = s.table;
      item.tile.kv_end = int32_t(shared);
      item.shared = item.partial = true;
      item.tile.tokens = int32_t(stream_rows_.size());
      stream_rows_.resize(stream_rows_.size() + size_t(std::min(per_tile, left[size_t(g)])));
      items.push_back(item);
    }
    Item& item = items[size_t(slot)];
    prefix_item_[size_t(b)] = slot;
    prefix_offset_[size_t(b)] = item.queries;
    for (int32_t i = 0; i < s.q_len; ++i)
      set_row(s, int32_t(b), i, stream_rows_[size_t(item.tile.tokens) + size_t(item.queries++)]);
    item.tile.row_count = item.queries * group_;
    left[size_t(g)] -= s.q_len;
  }
}

// Every query to a kernel: many of one sequence to prefill, others to the stream kernels, the rest to the plain one.
Planner::Assigned Planner::assign_queries(const Step& step, std::byte* buffer) {
  DeviceSequence* sequences = at<DeviceSequence>(buffer, sequences_);
  QueryRow* plain = at<QueryRow>(buffer, plain_);
  PrefillTile* tiles = at<PrefillTile>(buffer, tiles_);
  Assigned to;
  int64_t gathered = 0, inside = 0;  // rows of the gather buffer; tokens whose K/V prefill reads as they are given
  for (int64_t b = 0; b < step.batch; ++b) {
    DeviceSequence& s = sequences[b];
    if (s.q_len == 0) continue;
    const bool ring = a_.append && a_.cyclic_capacity > 0 && s.q_len > 1;  // reads come before its writes
    if (ring) s.flags |= kDeferred, launch_.deferred = true;
    // FP8 reads all of a sequence back, from multiples of sixteen on.
    const int64_t old = machine_.prefill8 ? (int64_t(s.kv_len) + 15) / 16 * 16 : s.start_pos;
    if ((machine_.prefill || machine_.prefill8) && is_long(s) && a_.append && beam_width_ == 0 &&
        gathered + old <= gather_cap_) {
      if (!machine_.prefill8) {
        s.flags |= kContiguous;
        launch_.contiguous = true;
        inside += s.q_len;
      } else {
        s.flags |= kEight;
      }
      if (old > 0) {
        s.gathered = int32_t(gathered);
        gathered += old;
        launch_.gathers = 1;
      }
      for (int32_t row = 0; row < s.q_len; row += 128) tiles[to.tiles++] = {s, int32_t(b), row};
    } else if (streams() && !ring) {
      const int32_t prefix = prefix_item_[size_t(b)];
      add_stream(s, int32_t(b), prefix >= 0 ? prefixes()[size_t(prefix)].tile.kv_end : 0);
    } else {
      for (int32_t i = 0; i < s.q_len; ++i) set_row(s, int32_t(b), i, plain[to.plain++]);
    }
  }
  launch_.outside = inside < tokens_of(step);
  return to;
}

// Where each new token goes in the cache.
void Planner::place_tokens(const Step& step, std::byte* buffer) {
  const DeviceSequence* sequences = at<DeviceSequence>(buffer, sequences_);
  const int32_t* table = at<int32_t>(buffer, table_);
  Token* tokens = at<Token>(buffer, tokens_);
  for (int64_t b = 0; b < step.batch; ++b) {
    const DeviceSequence& s = sequences[b];
    for (int32_t i = 0; i < s.q_len; ++i)
      tokens[s.q_begin + i] = {int32_t(b), a_.append ? place_of(s, s.start_pos + i, table) : -1, s.flags, 0};
  }
  used_.push_back({tokens_, size_t(tokens_of(step)) * sizeof(Token)});
}

// Longest first, so that the last blocks to finish are short ones.
void Planner::order_tiles(PrefillTile* tiles, int64_t count) const {
  std::sort(tiles, tiles + count, [&](const PrefillTile& x, const PrefillTile& y) {
    auto keys = [&](const PrefillTile& t) {
      return t.of.flags & kCausal ? t.of.kv_len - t.of.q_len + t.row : t.of.kv_len;
    };
    const int64_t kx = keys(x), ky = keys(y);
    return kx != ky ? kx > ky : x.sequence != y.sequence ? x.sequence < y.sequence : x.row < y.row;
  });
}

// Numbers that kernels read, and those that their grids are made of.
void Planner::count_launch(const Step& step, const Assigned& to, int64_t entries, std::byte* buffer) {
  const DeviceSequence* sequences = at<DeviceSequence>(buffer, sequences_);
  const int32_t* table = at<int32_t>(buffer, table_);
  int32_t* counts = at<int32_t>(buffer, counts_);
  const int64_t B = step.batch, T = tokens_of(step);
  std::memcpy(buffer + rows_, stream_rows_.data(), stream_rows_.size() * sizeof(QueryRow));
  used_.push_back({rows_, stream_rows_.size() * sizeof(QueryRow)});
  used_.push_back({plain_, size_t(to.plain) * sizeof(QueryRow)});
  used_.push_back({tiles_, size_t(to.tiles) * sizeof(PrefillTile)});
  counts[kCountTokens] = int32_t(T);
  counts[kCountSequences] = int32_t(B);
  counts[kCountTiles] = int32_t(to.tiles);
  counts[kCountPlain] = int32_t(to.plain);
  used_.push_back({counts_, kCounts * 4});
  launch_.tokens = bucket(T);
  launch_.sequences = bucket(B);
  launch_.plain = bucket(to.plain);
  launch_.tiles = bucket(to.tiles);
  launch_.exact_tokens = to.tiles > 0 ? T : 0;
  launch_.own = a_.append && T > 0 && T == int64_t(items_[0].size()) &&
                (launch_.blocks_per_head > 0 || (B <= kOwnDecodes && entries <= kOwnPages)) &&
                std::none_of(items_[0].begin(), items_[0].end(), [](const Item& i) { return i.partial || i.shared; }) &&
                decodes_apart(sequences, B, table);
  launch_.apart = launch_.contiguous && launch_.outside && !launch_.gathers && pages_apart(sequences, B, table);
}

void Planner::plan(const Step& step, std::byte* buffer) {
  launch_ = {};
  used_.clear();
  cuts_.clear();
  stream_rows_.clear();
  for (auto& list : items_) list.clear();
  prefixes_.clear();
  next_slot_ = 0;
  std::memset(buffer + counts_, 0, kCounts * 4);
  beam_width_ = step.cache_indirection ? step.beam_width : 0;
  beam_stride_ = step.max_kvlen;
  const int64_t entries = copy_sequences(step, buffer);
  add_shared_prefixes(step, at<DeviceSequence>(buffer, sequences_));
  const Assigned to = assign_queries(step, buffer);
  place_tokens(step, buffer);
  for (int list = 0; list < kAllLists; ++list)
    if (machine_.stream_warps[list]) partition(list, buffer);
  cut_prefixes(buffer);
  write_merges(buffer);
  order_tiles(at<PrefillTile>(buffer, tiles_), to.tiles);
  count_launch(step, to, entries, buffer);
}

}  // namespace kvasir::attention::cuda
