// The cuda back end's plan, without a GPU: every key of every query is read exactly once, parts are even,
// and what is cut is merged.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "attention/cases/random_case.h"
#include "attention/cuda/plan.h"

namespace kvasir::attention::cuda {
namespace {

constexpr Machine kMachine{{1056, 1056, 1056}, false};

struct Planned {
  Planned(const Attributes& a, const Limits& limits, const Step& step, Machine machine = kMachine)
      : planner(a, limits, machine), buffer(planner.bytes()), page_size(a.page_size) {
    planner.plan(step, buffer.data());
    view = planner.view(buffer.data());
  }
  Planner planner;
  std::vector<std::byte> buffer;
  StepView view;
  int32_t page_size;
};

struct Steps {
  std::vector<int64_t> seqstarts{0}, kvstarts{0}, start_pos, table;
  Step step;
  Steps(const std::vector<std::pair<int64_t, int64_t>>& sequences, int64_t page) {
    for (auto [old, n] : sequences) {
      seqstarts.push_back(seqstarts.back() + n);
      kvstarts.push_back(kvstarts.back() + old + n);
      start_pos.push_back(old);
      step.max_pages = std::max(step.max_pages, (old + n + page - 1) / page);
      step.max_seqlen = std::max(step.max_seqlen, n);
      step.max_kvlen = std::max(step.max_kvlen, old + n);
    }
    step.batch = int64_t(sequences.size());
    table.resize(size_t(step.batch * step.max_pages));
    for (size_t i = 0; i < table.size(); ++i) table[i] = int64_t(i) * page;
    step.seqstarts = seqstarts.data(), step.kvstarts = kvstarts.data(), step.start_pos = start_pos.data();
    step.cachestarts = table.data();
  }
  Limits limits() const {
    return {step.batch, seqstarts.back(), step.max_kvlen, step.max_pages, int64_t(table.size()) * 256};
  }
};

Attributes llama() {
  Attributes a;
  a.num_heads = 32, a.num_kv_heads = 8, a.head_dim = 128;
  a.io = a.out = DType::bf16;
  return a;
}

// Of a list; and its parts are neighbours that say where they begin.
int segment_count(const Planned& p, int list) {
  auto* base = const_cast<std::byte*>(p.buffer.data());
  const PartHead* heads = p.planner.heads(base, list);
  int count = 0;
  for (int i = 0; i < p.planner.launch().parts[list]; ++i) {
    EXPECT_EQ(heads[i].begin, count);
    EXPECT_GE(heads[i].end, count);
    count = heads[i].end;
    if (heads[i].begin == count) continue;
    const Segment& first = p.planner.segments(base, list)[heads[i].begin];
    EXPECT_EQ(std::memcmp(&heads[i].first, &first, sizeof(Segment)), 0);
    if (heads[i].places[0] < 0) continue;
    const int32_t page = p.page_size;  // one of 16 keys and more, or they would not be there
    for (int k = 0; k < kHeadPlaces; ++k) {
      const int32_t key = first.kv_begin + k * kPlaceKeys;
      EXPECT_EQ(heads[i].places[k], key < first.kv_end ? p.view.table[first.table + key / page] + key % page : -1);
    }
  }
  return count;
}

// (token -> key -> how often read), from the segments; and the slots every token was given.
void count_reads(const Planned& p, int group, std::map<int, std::map<int, int>>* reads,
                 std::map<int, std::set<int>>* slots, std::map<int, int>* direct) {
  auto* base = const_cast<std::byte*>(p.buffer.data());
  for (int list = 0; list < kAllLists; ++list)
    for (int i = 0; i < segment_count(p, list); ++i) {
      const Segment& s = p.planner.segments(base, list)[i];
      EXPECT_EQ(s.kv_begin % (list == 0 && p.planner.launch().blocks_per_head ? kSharedKeys : kKeyBlock), 0);
      EXPECT_LE(s.row_count, tile_rows(list));
      EXPECT_EQ(s.table, p.view.sequences[s.sequence].table);
      for (int r = 0; r < s.row_count; r += group) {
        const QueryRow& row = p.view.rows[s.tokens + r / group];
        for (int j = s.kv_begin; j < s.kv_end; ++j)
          if (j < row.end && j >= row.begin) ++(*reads)[row.token][j];
        if (s.merges > 0 && s.slot == s.first_slot) ++(*direct)[row.token];  // by the last of its runs
        if (s.merges > 0) {
          EXPECT_LT((s.slot - s.first_slot) / (s.row_count / group), s.merges);
          EXPECT_EQ((s.slot - s.first_slot) % (s.row_count / group), 0);
        }
        if (s.slot < 0)
          ++(*direct)[row.token];
        else
          EXPECT_TRUE((*slots)[row.token].insert(s.slot + r / group).second);
      }
    }
  for (int i = 0; i < p.view.counts[kCountPrefixRuns]; ++i) {
    const Segment& s = p.planner.prefix_runs(base)[i];
    EXPECT_EQ(s.kv_begin % kPrefixKeys, 0);
    EXPECT_EQ(s.kv_end % kPrefixKeys, 0);
    EXPECT_LT(s.kv_begin, s.kv_end);
    EXPECT_LE(s.row_count, kPrefixRows);
    EXPECT_EQ(s.table, p.view.sequences[s.sequence].table);
    for (int r = 0; r < s.row_count; r += group) {
      const QueryRow& row = p.view.rows[s.tokens + r / group];
      for (int j = s.kv_begin; j < s.kv_end; ++j) ++(*reads)[row.token][j];
      EXPECT_TRUE((*slots)[row.token].insert(s.slot + r / group).second);
    }
  }
}

void expect_complete(const Planned& p, int group, int64_t tokens) {
  std::map<int, std::map<int, int>> reads;
  std::map<int, std::set<int>> slots;
  std::map<int, int> direct;
  count_reads(p, group, &reads, &slots, &direct);
  std::set<int> merged;
  for (int i = 0; i < p.view.counts[kCountMerges]; ++i) {
    const Merge& m = p.view.merges[i];
    std::set<int> listed(p.view.merge_slots + m.begin, p.view.merge_slots + m.end);
    EXPECT_EQ(listed, slots[m.token]) << "token " << m.token;
    EXPECT_TRUE(merged.insert(m.token).second);
  }
  auto* base = const_cast<std::byte*>(p.buffer.data());
  std::map<int, int> runs;  // first slot -> runs of that item
  for (int list = 0; list < kAllLists; ++list)
    for (int i = 0; i < segment_count(p, list); ++i) {
      const Segment& s = p.planner.segments(base, list)[i];
      if (s.merges > 0 && ++runs[s.first_slot] == s.merges) runs.erase(s.first_slot);
    }
  EXPECT_TRUE(runs.empty()) << "a merge waits for runs that never come";
  for (int token = 0; token < tokens; ++token) {
    EXPECT_EQ(direct[token] + int(merged.count(token)), 1) << "token " << token << " has one result";
    for (auto [key, n] : reads[token]) EXPECT_EQ(n, 1) << "token " << token << " key " << key;
  }
  for (int i = 0; i < int(p.view.counts[kCountSequences]); ++i) {
    const DeviceSequence& s = p.view.sequences[i];
    for (int q = 0; q < s.q_len; ++q)
      EXPECT_EQ(int(reads[s.q_begin + q].size()), s.flags & kCausal ? s.kv_len - s.q_len + q + 1 : s.kv_len);
  }
}

TEST(CudaPlan, EveryKeyIsReadOnceAndCutsAreMerged) {
  Steps steps({{0, 1}, {1023, 1}, {8191, 1}, {70, 1}, {300, 4}, {63, 8}, {5000, 7}}, 16);
  steps.step.decoding_batches = 4;
  Planned p(llama(), steps.limits(), steps.step);
  expect_complete(p, 4, steps.seqstarts.back());
}

TEST(CudaPlan, ATileIsTheSmallestThatHoldsTheRows) {
  auto lists = [](Machine machine, int64_t queries) {
    Steps steps({{900, queries}}, 16);
    Planned p(llama(), steps.limits(), steps.step, machine);
    expect_complete(p, 4, queries);
    std::vector<int> used;
    for (int list = 0; list < kAllLists; ++list)
      if (p.planner.launch().parts[list]) used.push_back(list);
    return used;
  };
  using List = std::vector<int>;
  EXPECT_EQ(lists(kMachine, 1), List{0});
  EXPECT_EQ(lists(kMachine, 2), List{0});
  EXPECT_EQ(lists(kMachine, 3), List{1});
  EXPECT_EQ(lists(kMachine, 5), List{2});
  EXPECT_EQ(lists(kMachine, 50), List{2});
  const Machine no_few{{0, 1056, 1056}, false}, no_many{{1056, 1056, 0}, false};
  EXPECT_EQ(lists(no_few, 1), List{1}) << "groups under 32";
  EXPECT_EQ(lists(no_many, 50), List{1}) << "heads of 256";
}

TEST(CudaPlan, PartsAreEven) {
  std::vector<std::pair<int64_t, int64_t>> sequences;
  sequences.reserve(100);
  for (int b = 0; b < 100; ++b) sequences.push_back({100 + 97 * b, 1});
  Steps steps(sequences, 16);
  steps.step.decoding_batches = 100;
  Planned p(llama(), steps.limits(), steps.step);
  const int parts = p.planner.launch().parts[0];
  EXPECT_EQ(parts, 1056 / 8);
  const PartHead* heads = p.planner.heads(p.buffer.data(), 0);
  const Segment* segments = p.planner.segments(p.buffer.data(), 0);
  int64_t least = 1 << 30, most = 0;
  for (int i = 0; i < parts; ++i) {
    int64_t keys = 0;
    for (int s = heads[i].begin; s < heads[i].end; ++s) keys += segments[s].kv_end - segments[s].kv_begin;
    least = std::min(least, keys), most = std::max(most, keys);
  }
  EXPECT_LT(most - least, 16 * kKeyBlock) << least << " to " << most << " keys a part";
  expect_complete(p, 4, 100);
}

// As an H200 has it: 132 multiprocessors, blocks of 8 warps.
Machine joining_machine() {
  Machine m = kMachine;
  m.multiprocessors = 132, m.shared_warps = 8;
  return m;
}

TEST(CudaPlan, FewItemsOfOneLengthJoinTheirResults) {
  auto blocks_per_head = [](const std::vector<std::pair<int64_t, int64_t>>& sequences, Attributes a = llama()) {
    Steps steps(sequences, 16);
    Planned p(a, steps.limits(), steps.step, joining_machine());
    const Launch& n = p.planner.launch();
    if (n.blocks_per_head > 0) {
      EXPECT_EQ(n.parts[0], int(sequences.size()) * n.blocks_per_head * 8);
      EXPECT_EQ(n.merges, 0);
      EXPECT_EQ(segment_count(p, 0), n.parts[0]);
      int64_t part = 0, slot = 0;
      for (auto [old, fresh] : sequences) {  // its parts are all of an item's keys in order, a slot a block
        const int64_t first_slot = slot;
        int64_t at = 0;
        for (int i = 0; i < n.blocks_per_head * 8; ++i) {
          const Segment& s = p.planner.segments(p.buffer.data(), 0)[part++];
          EXPECT_EQ(s.kv_begin, at);
          at = s.kv_end;
          if (n.blocks_per_head == 1) {
            EXPECT_EQ(s.slot, -1);
          } else {
            EXPECT_EQ(s.first_slot, first_slot);
            EXPECT_EQ(s.slot, slot);
            if (i % 8 == 7) slot += fresh;
          }
        }
        EXPECT_EQ(at, old + fresh);
      }
    } else if (a.window == 0) {
      expect_complete(p, a.num_heads / a.num_kv_heads, steps.seqstarts.back());
    }
    return n.blocks_per_head;
  };
  using Sequences = std::vector<std::pair<int64_t, int64_t>>;
  EXPECT_EQ(blocks_per_head({{131071, 1}}), 16);
  EXPECT_EQ(blocks_per_head({{8191, 1}}), 16);
  EXPECT_EQ(blocks_per_head({{8191, 2}}), 16) << "two queries of four heads are a tile";
  EXPECT_EQ(blocks_per_head({{700, 1}}), 2) << "64 keys a warp, of the next power of two";
  EXPECT_EQ(blocks_per_head({{70, 1}}), 1) << "some warps have no keys";
  EXPECT_EQ(blocks_per_head(Sequences(16, {4095, 1})), 1);
  EXPECT_EQ(blocks_per_head(Sequences(8, {4095, 1})), 2);
  EXPECT_EQ(blocks_per_head(Sequences(4, {16383, 1})), 4);
  EXPECT_EQ(blocks_per_head(Sequences(12, {4095, 1})), 0) << "a quarter of the device would wait";
  EXPECT_EQ(blocks_per_head(Sequences(64, {2047, 1})), 0) << "more than the device holds at once";
  EXPECT_EQ(blocks_per_head({{60000, 1}, {500, 1}}), 0) << "the long one would be last by far";
  Attributes sinks = llama();
  sinks.window = 1000, sinks.sinks = 4;
  EXPECT_EQ(blocks_per_head({{8191, 1}}, sinks), 0) << "sinks are a run of their own";
  Attributes invariant = llama();
  invariant.batch_invariant = true;
  EXPECT_EQ(blocks_per_head({{8191, 1}}, invariant), 0);
}

TEST(CudaPlan, JoiningKeepsItsKeyWhileLengthsGrow) {
  auto key = [](int64_t kv) {
    Steps steps({{kv, 1}, {kv + 50, 1}}, 16);
    Planned p(llama(), steps.limits(), steps.step, joining_machine());
    EXPECT_GT(p.planner.launch().blocks_per_head, 0);
    return p.planner.launch().key();
  };
  EXPECT_EQ(key(2100), key(2500));
  EXPECT_EQ(key(2500), key(30000));
}

TEST(CudaPlan, ASharedPrefixIsReadOnce) {
  std::vector<std::pair<int64_t, int64_t>> sequences(64, {8192 + 99, 1});
  Steps steps(sequences, 16);
  steps.step.decoding_batches = 64;
  std::vector<int32_t> group(64, 0);
  const int64_t shared = 8192;
  steps.step.shared_group = group.data();
  steps.step.shared_len = &shared;
  Planned p(llama(), steps.limits(), steps.step);
  expect_complete(p, 4, 64);
  int64_t keys = 0;
  for (int list = 0; list < kAllLists; ++list)
    for (int i = 0; i < segment_count(p, list); ++i) {
      const Segment& s = p.planner.segments(p.buffer.data(), list)[i];
      keys += s.kv_end - s.kv_begin;
    }
  EXPECT_EQ(keys, 64 * 100 + 8 * 8192);  // 8 queries of 4 heads share a tile of 32 rows
}

Machine with_prefix_kernel() {
  Machine m = kMachine;
  m.multiprocessors = 132, m.shared_prefix = true;
  return m;
}

// By their own kernel: 32 queries of 4 heads a tile, and a run for each multiprocessor.
TEST(CudaPlan, ManyQueriesShareAPrefix) {
  std::vector<std::pair<int64_t, int64_t>> sequences(64, {8192 + 99, 1});
  Steps steps(sequences, 16);
  steps.step.decoding_batches = 64;
  std::vector<int32_t> group(64, 0);
  const int64_t shared = 8192 + 64;
  steps.step.shared_group = group.data(), steps.step.shared_len = &shared;
  Planned p(llama(), steps.limits(), steps.step, with_prefix_kernel());
  expect_complete(p, 4, 64);
  const int runs = p.view.counts[kCountPrefixRuns];
  EXPECT_EQ(runs, 16);  // for each of 8 kv heads: 128 blocks of 132 multiprocessors
  EXPECT_EQ(p.planner.launch().prefix_runs, 16);
  int64_t keys = 0;
  for (int i = 0; i < runs; ++i) {
    const Segment& s = p.planner.prefix_runs(p.buffer.data())[i];
    keys += s.kv_end - s.kv_begin;
  }
  EXPECT_EQ(keys, 2 * 8192) << "in whole tiles of keys";
}

// Groups of several sizes in turn, some of them small, queries of one sequence together (drafts), long ones apart.
TEST(CudaPlan, PrefixesOfManyGroups) {
  std::vector<std::pair<int64_t, int64_t>> sequences;
  std::vector<int32_t> group;
  for (int i = 0; i < 90; ++i) {
    sequences.push_back({2000 + 37 * i, i % 7 == 0 ? 3 : i == 40 ? 60 : 1});
    group.push_back(i % 5 == 4 ? -1 : i % 3 == 0 ? 2 : i < 4 ? 1 : 0);
  }
  const int64_t shared[] = {1200, 2000, 127};
  for (int64_t least : {1, 2000}) {
    Steps steps(sequences, 16);
    std::vector<int64_t> lengths(shared, shared + 3);
    for (int64_t& n : lengths) n = std::max(n, least);
    steps.step.shared_group = group.data(), steps.step.shared_len = lengths.data();
    Planned p(llama(), steps.limits(), steps.step, with_prefix_kernel());
    EXPECT_GT(p.view.counts[kCountPrefixRuns], 0);
    expect_complete(p, 4, steps.seqstarts.back());
  }
}

// Sequences of more queries than a tile of the lists holds: each part finds its own queries' prefix. Those for prefill
// have no part in it.
TEST(CudaPlan, SequencesOfSeveralTilesShareAPrefix) {
  Attributes wide = llama();
  wide.num_heads = 8 * wide.num_kv_heads;
  for (const int64_t queries : {5, 6, 8, 12}) {
    Steps steps(std::vector<std::pair<int64_t, int64_t>>(10, {2000, queries}), 16);
    std::vector<int32_t> group(10, 0);
    const int64_t shared = 2000;
    steps.step.shared_group = group.data(), steps.step.shared_len = &shared;
    Machine m = with_prefix_kernel();
    m.prefill = true;
    Planned p(wide, steps.limits(), steps.step, m);
    if (queries > 8) {
      EXPECT_EQ(p.view.counts[kCountPrefixRuns], 0);
      EXPECT_EQ(p.planner.launch().merges, 0);
    } else {
      EXPECT_GT(p.view.counts[kCountPrefixRuns], 0);
      expect_complete(p, 8, 10 * queries);
    }
  }
}

// A tile of the lists holds them: their kernel reads the prefix once, too.
TEST(CudaPlan, FewQueriesShareAPrefixWithoutAKernelOfTheirOwn) {
  Steps steps(std::vector<std::pair<int64_t, int64_t>>(8, {4000, 1}), 16);
  std::vector<int32_t> group(8, 0);
  const int64_t shared = 2048;
  steps.step.shared_group = group.data(), steps.step.shared_len = &shared;
  Planned p(llama(), steps.limits(), steps.step, with_prefix_kernel());
  EXPECT_EQ(p.view.counts[kCountPrefixRuns], 0);
  expect_complete(p, 4, 8);
}

// Latent attention: tiles of 64 rows, of which blocks of heads count as key heads.
Machine latent_machine() {
  Machine m;
  m.stream_warps[kLatentList] = m.multiprocessors = 132;
  return m;
}
Attributes latent(int heads, int blocks) {
  Attributes a;
  a.num_heads = heads, a.num_kv_heads = blocks, a.head_dim = 576;
  a.io = a.out = DType::bf16;
  return a;
}

TEST(CudaPlan, LatentAttentionsKeysAreReadOnceByEachBlockOfHeads) {
  for (auto [heads, blocks] : {std::pair{16, 1}, {20, 1}, {64, 1}, {128, 2}}) {
    Steps steps({{0, 1}, {1023, 1}, {30000, 1}, {70, 1}, {300, 4}, {63, 8}, {5000, 700}, {0, 65}}, 16);
    steps.step.decoding_batches = 4;
    const Planned p(latent(heads, blocks), steps.limits(), steps.step, latent_machine());
    EXPECT_EQ(p.planner.launch().parts[kLatentList], 132 / blocks);
    EXPECT_FALSE(p.planner.launch().own);
    expect_complete(p, heads / blocks, steps.seqstarts.back());
  }
}

// Room for results in parts is a matter of the device, not of the longest prompt.
TEST(CudaPlan, LatentAttentionHasFewParts) {
  Steps steps({{0, 8192}}, 16);
  const Planned p(latent(128, 2), steps.limits(), steps.step, latent_machine());
  EXPECT_LE(p.planner.slots(), 512);
  expect_complete(p, 64, 8192);
}

TEST(CudaPlan, LatentAttentionCutsNothingThatIsBatchInvariant) {
  Attributes a = latent(16, 1);
  a.batch_invariant = true;
  Steps steps({{9000, 1}, {3000, 40}}, 16);
  const Planned p(a, steps.limits(), steps.step, latent_machine());
  EXPECT_EQ(p.planner.launch().merges, 0);
  expect_complete(p, 16, 41);
}

TEST(CudaPlan, LatentAttentionSharesPrefixesWhereATileHoldsQueries) {
  auto keys_read = [](int heads, int blocks) {
    Steps steps(std::vector<std::pair<int64_t, int64_t>>(8, {1024 + 63, 1}), 16);
    steps.step.decoding_batches = 8;
    const std::vector<int32_t> group(8, 0);
    const int64_t shared = 1024;
    steps.step.shared_group = group.data(), steps.step.shared_len = &shared;
    const Planned p(latent(heads, blocks), steps.limits(), steps.step, latent_machine());
    expect_complete(p, heads / blocks, 8);
    int64_t keys = 0;
    for (int i = 0; i < segment_count(p, kLatentList); ++i) {
      const Segment& s = p.planner.segments(const_cast<std::byte*>(p.buffer.data()), kLatentList)[i];
      keys += s.kv_end - s.kv_begin;
    }
    return keys;
  };
  EXPECT_EQ(keys_read(16, 1), 8 * 64 + 2 * 1024) << "four queries a tile";
  EXPECT_EQ(keys_read(128, 2), 8 * (64 + 1024)) << "one query is more than a tile";
}

// StreamingLLM: each query meets its sinks and its window once, and ranks, counted from what its run says, are those of
// the contract: among all keys that it sees, in order.
TEST(CudaPlan, StreamingRanksAreThoseAmongTheKeysSeen) {
  Attributes a = llama();
  a.streaming_positions = true;
  a.rope.style = RopeStyle::neox, a.rope.rotary_dim = a.head_dim;
  Machine machine;
  machine.stream_warps[1] = 1056;
  struct Kind {
    int window, sinks;
    bool fp8;  // queries are rounded at their ranks, which are the contract's own then
  };
  for (const Kind& kind : {Kind{100, 4, false},
                           {100, 0, false},
                           {70, 69, false},
                           {1, 0, false},
                           {100, 4, true},
                           {70, 69, true},
                           {3, 2, true}}) {
    const int window = kind.window, sinks = kind.sinks;
    a.window = window, a.sinks = sinks, a.fp8_query = kind.fp8;
    Steps steps({{0, 1}, {2, 1}, {99, 1}, {700, 1}, {0, 130}, {60, 90}, {400, 120}, {3, 9}}, 16);
    steps.step.decoding_batches = 4;
    Planned p(a, steps.limits(), steps.step, machine);
    std::map<int, std::set<int>> owns;        // token -> ranks it is rotated at
    std::map<int, std::map<int, int>> ranks;  // token -> key -> how far it stands before the token's own
    for (int i = 0; i < segment_count(p, 1); ++i) {
      const Segment& s = p.planner.segments(p.buffer.data(), 1)[i];
      const bool alone = s.ranked_from == kSinkRun;
      for (int r = 0; r < s.row_count; r += 4) {
        const QueryRow& row = p.view.rows[s.tokens + r / 4];
        const int own = row.own - (alone ? std::max(row.begin - sinks, 0) : s.ranked_from);
        EXPECT_LT(own, window + int(steps.limits().max_tokens)) << "there are no angles for it";
        owns[row.token].insert(own);
        for (int j = s.kv_begin; j < std::min(s.kv_end, row.end); ++j) {
          if (!(j >= row.begin || (alone && j < sinks))) continue;
          const int rank = j - std::max(s.ranked_from, 0);
          EXPECT_GE(rank, 0);
          EXPECT_TRUE(ranks[row.token].emplace(j, own - rank).second) << "token " << row.token << " key " << j;
        }
      }
    }
    for (int b = 0; b < int(steps.step.batch); ++b) {
      const DeviceSequence& s = p.view.sequences[b];
      for (int q = 0; q < s.q_len; ++q) {
        const int own = s.start_pos + q;
        std::vector<int> seen;
        for (int j = 0; j <= own; ++j)
          if (j < sinks || j >= own - (window - sinks) + 1 || j >= s.start_pos) seen.push_back(j);
        std::map<int, int> want;
        for (size_t rank = 0; rank < seen.size(); ++rank) want[seen[rank]] = int(seen.size() - 1 - rank);
        EXPECT_EQ(ranks[s.q_begin + q], want)
            << "window " << window << " sinks " << sinks << " sequence " << b << " query " << q;
      }
    }
  }
}

TEST(CudaPlan, BatchInvariantCutsDependOnTheSequenceAlone) {
  Attributes a = llama();
  a.batch_invariant = true;
  auto cuts = [&](const std::vector<std::pair<int64_t, int64_t>>& sequences) {
    Steps steps(sequences, 16);
    steps.step.decoding_batches = steps.step.batch;
    Planned p(a, steps.limits(), steps.step);
    std::vector<std::pair<int, int>> runs;
    for (int i = 0; i < segment_count(p, 0); ++i) {
      const Segment& s = p.planner.segments(p.buffer.data(), 0)[i];
      if (s.sequence == 0) runs.push_back({s.kv_begin, s.kv_end});
    }
    return runs;
  };
  auto alone = cuts({{10000, 1}});
  EXPECT_EQ(alone, cuts({{10000, 1}, {70000, 1}, {3, 1}}));
  EXPECT_EQ(alone.size(), 10u);
}

// Prefill stores its own K/V while decodes read theirs, but not where a decode reads a page that a prompt writes.
TEST(CudaPlan, PagesThatPromptsWriteAreFoundAmongThoseOthersRead) {
  Machine hopper = kMachine;
  hopper.prefill = true;
  Steps steps({{900, 1}, {40, 1}, {0, 300}, {0, 129}}, 16);
  steps.step.decoding_batches = 2;
  Planned p(llama(), steps.limits(), steps.step, hopper);
  EXPECT_EQ(p.view.counts[kCountTiles], 3 + 2);
  EXPECT_TRUE(p.planner.launch().apart);
  const uint64_t key = p.planner.launch().key();
  const size_t row = size_t(steps.step.max_pages);
  const int64_t own =
      std::exchange(steps.table[56], steps.table[2 * row + 18]);  // the decode's last page, the prompt's
  p.planner.plan(steps.step, p.buffer.data());
  EXPECT_FALSE(p.planner.launch().apart);
  EXPECT_NE(p.planner.launch().key(), key);
  steps.table[56] = own;
  p.planner.plan(steps.step, p.buffer.data());
  EXPECT_TRUE(p.planner.launch().apart) << "what a step marked is gone after it";
}

// Who attends a decode appends it where decodes are all of the step and nobody else reads what they append.
TEST(CudaPlan, OnlyDecodesWithPagesOfTheirOwnAppendWhereTheyAttend) {
  auto own = [](const std::vector<std::pair<int64_t, int64_t>>& sequences, Attributes a = llama(),
                std::pair<size_t, size_t> same = {0, 0}) {
    Steps steps(sequences, 16);
    steps.table[same.first] = steps.table[same.second];
    steps.step.decoding_batches = steps.step.batch;
    Planned p(a, steps.limits(), steps.step, joining_machine());
    const Launch& n = p.planner.launch();
    if (n.own) {  // each new token is the last key of just one part
      std::vector<int> ends(sequences.size());
      for (int i = 0; i < segment_count(p, 0); ++i) {
        const Segment& s = p.planner.segments(p.buffer.data(), 0)[i];
        EXPECT_EQ(s.row_begin, 0);
        EXPECT_EQ(s.row_count, a.num_heads / a.num_kv_heads);
        if (s.kv_begin < s.kv_end && s.kv_end == p.view.rows[s.tokens].own + 1) ++ends[size_t(s.sequence)];
      }
      EXPECT_EQ(ends, std::vector<int>(sequences.size(), 1));
    }
    const uint64_t key = p.planner.launch().key();
    p.planner.plan(steps.step, p.buffer.data());
    EXPECT_EQ(p.planner.launch().key(), key) << "what a step marked is gone after it";
    return n.own;
  };
  EXPECT_TRUE(own({{0, 1}}));
  EXPECT_TRUE(own({{15, 1}}));
  EXPECT_TRUE(own({{16, 1}}));
  EXPECT_TRUE(own({{8191, 1}}));
  EXPECT_TRUE(own({{4000, 1}, {4005, 1}, {3990, 1}}));
  EXPECT_FALSE(own({{4000, 1}, {4000, 1}}, llama(), {250, 501})) << "both write one page";
  EXPECT_FALSE(own({{4000, 1}, {4010, 1}}, llama(), {100, 501})) << "the first reads the second's last page";
  EXPECT_TRUE(own({{4000, 1}, {4010, 1}}, llama(), {100, 351})) << "an old page may be shared";
  EXPECT_FALSE(own({{4000, 2}})) << "two tokens";
  EXPECT_FALSE(own({{4000, 1}, {4000, 2}}));
  EXPECT_TRUE(own(std::vector<std::pair<int64_t, int64_t>>(100, {1000, 1}))) << "blocks share no head";
  EXPECT_TRUE(own({{4000, 1}, {5, 1}, {0, 1}})) << "nor here";
  EXPECT_FALSE(own(std::vector<std::pair<int64_t, int64_t>>(257, {1, 1}))) << "too many to look into";
  EXPECT_FALSE(own(std::vector<std::pair<int64_t, int64_t>>(40, {8000, 1}))) << "too many pages to look into";
  Attributes reads = llama();
  reads.append = false;
  EXPECT_FALSE(own({{8191, 1}}, reads));
  Attributes ring = llama();
  ring.window = ring.cyclic_capacity = 1024;
  EXPECT_FALSE(own({{8191, 1}}, ring));
  Attributes sinks = llama();
  sinks.window = 1024, sinks.sinks = 4;
  EXPECT_FALSE(own({{8191, 1}}, sinks)) << "two runs of keys";
}

TEST(CudaPlan, EqualKeysForGrowingLengths) {
  Steps before({{100, 1}, {200, 1}}, 16), after({{101, 1}, {201, 1}}, 16);
  Planned p(llama(), before.limits(), before.step), q(llama(), after.limits(), after.step);
  EXPECT_EQ(p.planner.launch().key(), q.planner.launch().key());
}

// The bar: 1,024 sequences in under 50 us of one core, page tables aside (they are copied here as well).
TEST(CudaPlan, AThousandSequencesPlanQuickly) {
  Steps steps(std::vector<std::pair<int64_t, int64_t>>(1024, {511, 1}), 128);
  steps.step.decoding_batches = 1024;
  Planned p(llama(), steps.limits(), steps.step);
  double best = 1e9;
  for (int i = 0; i < 50; ++i) {
    auto begin = std::chrono::steady_clock::now();
    p.planner.plan(steps.step, p.buffer.data());
    best = std::min(best, std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
  }
  RecordProperty("best_us", int(best));
  printf("1,024 sequences planned in %.1f us\n", best);
#if defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LT(best, 500) << "ten times the bar: something is wrong, not just slow";
#endif
}

}  // namespace
}  // namespace kvasir::attention::cuda
