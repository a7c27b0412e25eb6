// A device that remembers, for each slot of each page and of each state, which prefix was written there; so a plan that
// reads a page with somebody else's tokens in it, or too early, or not yet moved, is caught at once.
// What it samples is a function of the prefix (and the choice) alone: no output may depend on scheduling.
#pragma once

#include <map>
#include <set>
#include <vector>

#include "core/check.h"
#include "kvcache/cache_starts.h"
#include "scheduler/scheduler.h"

namespace kvasir::scheduler {

class FakeDevice {
 public:
  FakeDevice(const Settings& options, int32_t vocabulary) : options_(options), vocabulary_(vocabulary) {
    for (const PageGroup& g : options.groups) {
      slots_.emplace_back(g.pages * options.page_size, 0);
      starts_.push_back({kvcache::CacheStarts(options.index_mode, options.page_size), {}});
    }
    host_.assign(options.host_pages * options.page_size, 0);
    states_.assign(options.recurrent ? size_t(options.max_running + options.kept_states) : 0, 0);
  }

  static uint64_t chain(uint64_t h, int32_t token) {
    h = (h ^ static_cast<uint64_t>(token + 1)) * 0x9e3779b97f4a7c15ull;
    return h ^ (h >> 29);
  }
  int32_t next(uint64_t prefix, int32_t choice) const {
    return static_cast<int32_t>(chain(prefix, 1000 + choice) % vocabulary_);
  }
  // What follows a prompt, for as many tokens as asked.
  std::vector<int32_t> continuation(std::vector<int32_t> tokens, int32_t choice, int64_t n) const {
    uint64_t h = 0;
    for (int32_t t : tokens) h = chain(h, t);
    std::vector<int32_t> out;
    for (; n > 0; --n) {
      out.push_back(next(h, choice));
      h = chain(h, out.back());
    }
    return out;
  }

  struct Run {
    std::vector<SeqResult> results;
    std::vector<std::vector<int32_t>> storage;
    void link() {
      for (size_t i = 0; i < results.size(); ++i) results[i].tokens = storage[i];
    }
  };

  Run launch(const Scheduler& scheduler, const StepPlan& plan) {
    const int64_t size = options_.page_size;
    for (const PageMove& m : plan.moves)
      for (int64_t i = 0; i < size; ++i) {
        uint64_t &d = slots_[0][m.device * size + i], &h = host_[m.host * size + i];
        (m.to_host ? h : d) = m.to_host ? d : h;
      }
    for (const PageCopy& c : plan.copies) {
      if (c.group == kvcache::kStateGroup) {
        states_[c.to] = states_[c.from];
        continue;
      }
      for (int64_t i = 0; i < size; ++i)
        slots_[c.group][c.to * size + i] = i < c.tokens ? slots_[c.group][c.from * size + i] : 0;
    }

    // All writes before all reads, as the operator has it.
    std::vector<std::vector<uint64_t>> chains;
    std::set<std::pair<size_t, int64_t>> written;
    std::set<int32_t> stated;
    check_starts(plan);
    for (const PlanItem& item : plan.items) {
      auto known = scheduler.tokens(item.seq);
      std::vector<int32_t> tokens(known.begin(), known.end());
      if (item.awaits_token) {
        KVASIR_CHECK(sampled_.contains(item.seq), "sequence ", item.seq, " awaits what the last plan did not sample");
        tokens.push_back(sampled_[item.seq]);
      }
      if (item.phase == Phase::verify) {
        KVASIR_CHECK(item.tokens[0] == tokens.back(), "a verification starts with the last known token");
        tokens.insert(tokens.end(), item.tokens.begin() + 1, item.tokens.end());
      }
      KVASIR_CHECK(item.begin + item.count <= int64_t(tokens.size()), "sequence ", item.seq, " is ahead of its tokens");
      KVASIR_CHECK(!item.samples || item.begin + item.count == int64_t(tokens.size()), "samples in the middle");
      for (size_t i = 0; i < item.tokens.size(); ++i)
        KVASIR_CHECK(item.tokens[i] == tokens[item.begin + i], "sequence ", item.seq, " is fed a wrong token");
      std::vector<uint64_t>& h = chains.emplace_back();
      for (int64_t t = 0; t < item.begin + item.count; ++t) h.push_back(chain(t > 0 ? h.back() : 0, tokens[t]));
      for (size_t g = 0; g < slots_.size(); ++g)
        for (int64_t t = item.begin; t < item.begin + item.count; ++t) {
          int64_t slot = slot_of(item, g, t);
          KVASIR_CHECK(written.emplace(g, slot).second, "two sequences write slot ", slot);
          slots_[g][slot] = h[t];
        }
      KVASIR_CHECK((item.state >= 0) == options_.recurrent, "sequence ", item.seq, " has state ", item.state);
      if (item.state < 0) continue;
      KVASIR_CHECK(stated.insert(item.state).second, "two sequences have state ", item.state);
      uint64_t& state = states_[item.state];
      KVASIR_CHECK(item.begin == 0 || state == h[item.begin - 1], "state ", item.state, " is not that of sequence ",
                   item.seq, " at ", item.begin);
      state = h[item.begin + item.count - 1];
    }
    sampled_.clear();
    Run run;
    for (size_t i = 0; i < plan.items.size(); ++i) {
      const PlanItem& item = plan.items[i];
      for (size_t g = 0; g < slots_.size(); ++g) {
        const int64_t window = options_.groups[g].window;
        const int64_t sinks = options_.groups[g].sinks;
        for (int64_t t = 0; t < item.begin; ++t) {
          if (window > 0 && t >= sinks && t <= item.begin - (window - sinks)) continue;
          KVASIR_CHECK(slots_[g][slot_of(item, g, t)] == chains[i][t], "position ", t, " of sequence ", item.seq,
                       " is not in page ", slot_of(item, g, t) / size, " of group ", g);
        }
      }
      if (item.samples) sample(item, chains[i], run);
    }
    run.link();
    return run;
  }

 private:
  int64_t slot_of(const PlanItem& item, size_t g, int64_t t) const {
    std::span<const int32_t> table = g == 0 ? item.pages : std::span<const int32_t>(item.more_pages[g - 1]);
    const int64_t size = options_.page_size;
    KVASIR_CHECK(t / size < int64_t(table.size()), "the page table ends before position ", t);
    if (options_.index_mode == kvcache::IndexMode::offset)
      KVASIR_CHECK(table[t / size] == table[0] + t / size, "a run has a gap");
    return table[t / size] * size + t % size;
  }

  // What the operators are given, kept from plan to plan, is what the tables say.
  void check_starts(const StepPlan& plan) {
    size_t longest = 0;
    for (const PlanItem& item : plan.items) longest = std::max(longest, item.pages.size());
    for (size_t g = 0; g < slots_.size(); ++g) {
      auto& [kept, starts] = starts_[g];
      kept.begin(int64_t(plan.items.size()), int64_t(longest), options_.max_context, starts);
      for (const PlanItem& item : plan.items)
        kept.add(item.table_version, g == 0 ? item.pages : item.more_pages[g - 1], item.begin + item.count, starts);
      std::vector<int64_t> kvstarts{0};
      for (const PlanItem& item : plan.items) kvstarts.push_back(kvstarts.back() + item.begin + item.count);
      kvcache::CacheIndex index{options_.index_mode, options_.page_size, starts.data(), kept.row_length()};
      for (size_t b = 0; b < plan.items.size(); ++b)
        for (int64_t t = 0; t < plan.items[b].begin + plan.items[b].count; ++t)
          KVASIR_CHECK(kvcache::physical_token(index, kvstarts.data(), int64_t(b), t) == slot_of(plan.items[b], g, t),
                       "sequence ", plan.items[b].seq, " finds position ", t, " somewhere else");
    }
  }

  void sample(const PlanItem& item, const std::vector<uint64_t>& h, Run& run) {
    for (int32_t d = 0; d < item.draws; ++d) {
      SeqResult r;
      r.seq = item.seq + d;
      std::vector<int32_t> out;
      int64_t t = item.phase == Phase::verify ? item.begin : item.begin + item.count - 1;
      for (; t < item.begin + item.count; ++t) {
        out.push_back(next(h[t], item.choice + d));
        if (t + 1 < item.begin + item.count && out.back() != item.tokens[t + 1 - item.begin]) break;
      }
      sampled_[r.seq] = out.back();
      run.results.push_back(r);
      run.storage.push_back(std::move(out));
    }
  }

  Settings options_;
  int32_t vocabulary_;
  std::vector<std::vector<uint64_t>> slots_;
  std::vector<uint64_t> host_;
  std::vector<uint64_t> states_;                                               // by slot: the prefix that it stands for
  std::vector<std::pair<kvcache::CacheStarts, std::vector<int64_t>>> starts_;  // by group
  std::map<SeqId, int32_t> sampled_;
};

}  // namespace kvasir::scheduler
