// A world made from one number: options, and operations good and bad in random order.
#pragma once

#include <deque>
#include <map>
#include <random>

#include "scheduler/cost_model.h"
#include "scheduler/policy.h"
#include "scheduler/recorder.h"
#include "tests/scheduler/fake_device.h"

namespace kvasir::scheduler {

class RandomWorld {
 public:
  // `recording`: where every call is written, or null.
  explicit RandomWorld(uint64_t seed, std::string* recording = nullptr)
      : rng_(seed), options_(random_options(seed)), device_(options_, vocabulary_) {
    if (recording != nullptr)
      options_.recorder = std::make_shared<Recorder>([recording](std::string lines) { *recording += lines; }, seed,
                                                     "a random world", 0);
    wholes_ = seed % 5 == 2;
    if (seed % 4 == 3) options_.max_step_ms = static_cast<double>(1 + seed / 4 % 40);
    auto made = Scheduler::create(options_);
    KVASIR_CHECK(made.ok(), made.status().to_string());
    scheduler_ = std::move(made).value();
  }

  void operate() {
    now_ += std::chrono::milliseconds(rng_() % 5);
    switch (rng_() % 16) {
      case 0:
      case 1:
      case 2: submit(); break;
      case 3: tolerate(scheduler_->cancel(some_request())); break;
      case 4:
        if (rng_() % 2 == 0) tolerate(scheduler_->pause(some_request()));
        break;
      case 5: tolerate(scheduler_->resume(some_request())); break;
      case 6: stop_late(); break;
      case 7: tolerate(scheduler_->mask_ready(some_sequence())); break;
      case 8: propose(); break;
      case 9:
        if (rng_() % 8 == 0) scheduler_->flush_prefix_cache();
        break;
      default:
        if (rng_() % 2 == 0 || !launch()) retire();
    }
    check();
  }

  // Whatever was paused goes on, every mask comes: nothing may be forgotten, every page comes back.
  void finish() {
    for (int idle_rounds = 0; !scheduler_->idle();) {
      for (RequestId r : scheduler_->live_requests()) tolerate(scheduler_->resume(r));
      for (auto& [seq, live] : live_) tolerate(scheduler_->mask_ready(seq));
      bool moved = launch();
      moved = retire() || moved;
      idle_rounds = moved ? 0 : idle_rounds + 1;
      KVASIR_CHECK(idle_rounds < 8, "nothing runs and ", scheduler_->live_requests().size(),
                   " requests are left: ", describe());
      check();
    }
    collect();
    Stats s = scheduler_->stats();
    KVASIR_CHECK(s.pages_free + s.pages_cached == s.pages_total, "pages are missing at the end");
    KVASIR_CHECK(s.waiting_tokens == 0 && live_.empty(), "requests are missing at the end");
    scheduler_->flush_prefix_cache();
    check();
    s = scheduler_->stats();
    KVASIR_CHECK(s.pages_free == s.pages_total && s.host_pages_free == s.host_pages_total, "the cache kept pages");
  }

  uint64_t plans_hash() const { return plans_; }
  const Settings& options() const { return options_; }
  int64_t finished() const { return finished_; }

 private:
  struct Live {
    RequestId request = 0;
    int32_t choice = 0;
    bool beam = false, stopped = false, masked = false, whole = false;
    std::vector<int32_t> prompt, output;
  };

  Settings random_options(uint64_t seed) {
    auto one_of = [&](auto list) { return list[rng_() % list.size()]; };
    Settings o;
    o.page_size = one_of(std::vector{1, 2, 3, 4, 7, 8, 12, 16});
    o.max_running = static_cast<int32_t>(1 + rng_() % 8);
    o.max_tokens_per_step = o.max_running + o.page_size + rng_() % 24;
    o.max_context = 24 + rng_() % 60;
    const int64_t pages = 2 + rng_() % (3 * o.max_context / o.page_size + 4);
    o.groups = {{pages, 0}};
    const int32_t window = static_cast<int32_t>(1 + rng_() % 20);
    const int64_t least = (window + o.max_tokens_per_step) / o.page_size + 2;
    if (rng_() % 4 == 0) o.groups.push_back({least + int64_t(rng_() % 20), window});
    if (rng_() % 8 == 0) o.groups = {{least + int64_t(rng_() % 20), window}};
    if (rng_() % 8 == 0) o.groups = {{least + 1 + int64_t(rng_() % 20), window, int32_t(rng_() % uint32_t(window))}};
    o.depth = static_cast<int>(1 + rng_() % 2);
    o.prefix_cache = rng_() % 4 != 0;
    if (rng_() % 6 == 0 && o.groups[0].sinks == 0) o.index_mode = kvcache::IndexMode::offset;
    if (rng_() % 6 == 0) o.index_mode = kvcache::IndexMode::token_table;
    if (o.index_mode == kvcache::IndexMode::offset) o.prefix_cache = false;
    if (o.groups.size() == 1 && o.groups[0].window == 0 && o.index_mode != kvcache::IndexMode::offset && rng_() % 2)
      o.host_pages = 1 + rng_() % 40;
    o.cost.page_move_us = rng_() % 2 ? 1 : 100000;
    o.lookahead_tokens = static_cast<int32_t>(rng_() % 16);
    o.policy = one_of(policy_names());
    o.patience = std::chrono::milliseconds(1 + rng_() % 1000);
    o.tenant_weights = {{"a", 1}, {"b", 2}};
    o.max_waiting = 2 + rng_() % 20;
    o.max_waiting_tokens = 100 + rng_() % 500;
    if (rng_() % 2) o.tenant_max_waiting = 1 + rng_() % 5;
    o.tenant_cache_share = rng_() % 2 ? 1.0 : 0.5;
    vocabulary_ = static_cast<int32_t>(2 + rng_() % 6);  // few tokens: prefixes meet often
    if (o.host_pages == 0 && seed % 7 > 2) o.recurrent = true, o.max_draft = 0, o.kept_states = int64_t(1 + seed % 6);
    return o;
  }

  void submit() {
    Submission s;
    s.id = rng_() % 40;
    s.tenant = std::string(1, static_cast<char>('a' + rng_() % 3));
    s.cache_salt = rng_() % 5 ? "" : "salt";
    s.prompt.resize(rng_() % 8 ? 1 + rng_() % options_.max_context : rng_() % (4 * options_.max_context));
    std::minstd_rand words(static_cast<unsigned>(rng_() % 3 + 1));  // three texts that everybody quotes
    for (int32_t& t : s.prompt) t = static_cast<int32_t>(words() % vocabulary_);
    if (!s.prompt.empty() && rng_() % 2)
      s.prompt[rng_() % s.prompt.size()] = static_cast<int32_t>(rng_() % vocabulary_);
    s.n = rng_() % 3 ? 1 : static_cast<int32_t>(rng_() % 5);
    s.beam = s.n > 1 && rng_() % 3 == 0;
    if (rng_() % 8) s.max_new = static_cast<int64_t>(rng_() % 24);
    s.priority = static_cast<int32_t>(rng_() % 4);
    if (rng_() % 8 == 0) s.deadline = now_ + std::chrono::milliseconds(int(rng_() % 400) - 20);
    s.no_prefix_read = rng_() % 8 == 0;
    s.needs_mask = rng_() % 6 == 0;
    s.whole = s.no_prefix = wholes_ && s.id % 2 == 0;
    auto first = scheduler_->submit(s, now_);
    if (!first.ok()) {
      KVASIR_CHECK(!first.status().message().empty(), "a refusal without words");
      return;
    }
    const int64_t outputs = s.max_new.value_or(1);
    for (int32_t c = 0; c < s.n; ++c)
      live_[*first + c] = {s.id, c, s.beam, outputs == 0, s.needs_mask, s.whole, s.prompt, {}};
  }

  RequestId some_request() { return rng_() % 42; }
  SeqId some_sequence() {
    if (live_.empty() || rng_() % 8 == 0) return rng_() % 1000;
    auto it = live_.begin();
    std::advance(it, rng_() % live_.size());
    return it->first;
  }
  void stop_late() {
    SeqId seq = some_sequence();
    const int64_t at = static_cast<int64_t>(rng_() % 12) - 1;
    if (scheduler_->stop_at(seq, at).ok() && live_.contains(seq)) live_[seq].stopped = true;
  }
  void propose() {
    SeqId seq = some_sequence();
    if (!live_.contains(seq)) return;
    std::vector<int32_t> draft;
    auto known = scheduler_->tokens(seq);
    if (rng_() % 2) draft = device_.continuation({known.begin(), known.end()}, live_[seq].choice, rng_() % 5);
    while (rng_() % 2) draft.push_back(static_cast<int32_t>(rng_() % vocabulary_));
    tolerate(scheduler_->propose(seq, draft));
  }
  std::string describe() const {
    const Stats s = scheduler_->stats();
    return cat(options_.policy, ", depth ", options_.depth, ", page ", options_.page_size, ", max_running ",
               options_.max_running, ", groups ", options_.groups.size(), ", mode ", int(options_.index_mode),
               ", max_step_ms ", options_.max_step_ms, ", pages ", s.pages_total, " free ", s.pages_free, " cached ",
               s.pages_cached, ", share ", options_.tenant_cache_share, ", host ", s.host_pages_total, ", running ",
               s.running, ", waiting ", s.waiting, ", swapped ", s.swapped);
  }
  static void tolerate(const Status& s) { KVASIR_CHECK(s.ok() || !s.message().empty(), "an error without words"); }

  void note(uint64_t v) { plans_ = FakeDevice::chain(plans_ ^ v, static_cast<int32_t>(v >> 40)); }

  bool launch() {
    if (scheduler_->in_flight() >= options_.depth) return false;
    scheduler_->next_step(now_, plan_);
    if (plan_.empty()) return false;
    Phase last = Phase::decode;
    int64_t tokens = 0, decodes = 0;
    std::set<SeqId> once;
    for (const PlanItem& item : plan_.items) {
      KVASIR_CHECK(item.phase >= last, "phases out of order");
      KVASIR_CHECK(once.insert(item.seq).second, "a sequence twice in a plan");
      KVASIR_CHECK(item.count > 0, "an item of nothing");
      last = item.phase;
      tokens += item.count;
      decodes += item.phase == Phase::decode;
      // (Beams that come back stop one token short, to take that one up together.)
      const bool ends = item.begin + item.count + 1 >= static_cast<int64_t>(scheduler_->tokens(item.seq).size());
      if (item.phase == Phase::prefill && !ends) {
        const int64_t end = item.begin + item.count;
        const bool whole = live_[item.seq].whole && end == static_cast<int64_t>(live_[item.seq].prompt.size());
        KVASIR_CHECK(whole || end % options_.page_size == 0, "a chunk that is not the last ends within a page");
      }
      if (const auto live = live_.find(item.seq); live != live_.end() && live->second.whole)
        KVASIR_CHECK(item.begin > 0 || item.count >= static_cast<int64_t>(live->second.prompt.size()),
                     "a prompt in pieces that is to be computed whole");
      note(item.seq);
      note(static_cast<uint64_t>(item.begin) << 20 | static_cast<uint64_t>(item.count));
      for (int32_t p : item.pages) note(static_cast<uint64_t>(p));
    }
    if (options_.max_step_ms > 0) check_time();
    KVASIR_CHECK(tokens == plan_.tokens && tokens <= options_.max_tokens_per_step, "the budget is passed");
    KVASIR_CHECK(decodes == plan_.decoding_batches, "decodes counted wrongly");
    for (const PageCopy& c : plan_.copies) note(static_cast<uint64_t>(c.from) << 32 | static_cast<uint64_t>(c.to));
    for (const PageMove& m : plan_.moves) note(static_cast<uint64_t>(m.device) << 32 | static_cast<uint64_t>(m.host));
    runs_.push_back(device_.launch(*scheduler_, plan_));
    return true;
  }

  // Beside those who decode, prompts have the time that is left, or as much as these take, and a page. (What moves may
  // come after a chunk.)
  void check_time() const {
    StepTime work = work_of(plan_);
    work.moves = 0;
    StepTime decodes;
    int64_t prompts = 0;
    bool within_page = true;
    for (const PlanItem& item : plan_.items) {
      if (item.begin == 0 && live_.at(item.seq).whole) return;  // is not cut
      if (item.phase != Phase::prefill) add_work(decodes, item.phase, item.begin, item.count);
      if (item.phase == Phase::prefill && ++prompts)
        within_page = item.begin % options_.page_size + item.count <= options_.page_size;
    }
    if (prompts == static_cast<int64_t>(plan_.items.size()) || prompts == 0 || (prompts == 1 && within_page)) return;
    const StepCost& cost = scheduler_->cost();
    const double most = std::max(1e-3 * options_.max_step_ms, 2 * step_seconds(decodes, cost));
    KVASIR_CHECK(step_seconds(work, cost) <= most * 1.000001, "a step of ", prompts, " prompts is to take ",
                 1e3 * step_seconds(work, cost), " ms");
  }

  bool retire() {
    if (runs_.empty()) return false;
    FakeDevice::Run run = std::move(runs_.front());
    runs_.pop_front();
    run.link();
    now_ += std::chrono::milliseconds(1 + rng_() % 20);
    std::map<RequestId, std::vector<size_t>> beams;
    for (size_t i = 0; i < run.results.size(); ++i) {
      SeqResult& r = run.results[i];
      auto it = live_.find(r.seq);
      if (it == live_.end()) continue;
      if (it->second.beam) {
        if (!scheduler_->tokens(r.seq).empty()) beams[it->second.request].push_back(i);
      } else if (it->second.masked && !it->second.output.empty() && !options_.recurrent && rng_() % 4 == 0) {
        r.tokens = {};  // its mask came late
      } else {
        r.stop = rng_() % 32 == 0;
      }
    }
    for (auto& [request, members] : beams)
      for (size_t i : members)
        if (rng_() % 2) run.results[i].parent = live_[run.results[members[rng_() % members.size()]].seq].choice;
    scheduler_->advance(run.results, now_);
    for (const SeqResult& r : run.results) {
      auto it = live_.find(r.seq);
      if (it == live_.end() || r.accepted == 0) continue;
      auto& out = it->second.output;
      out.insert(out.end(), r.tokens.begin(), r.tokens.begin() + r.accepted);
      it->second.stopped |= r.stop;
    }
    return true;
  }

  void collect() {
    std::vector<Notice> events;
    scheduler_->take_events(events);
    for (const Notice& e : events) {
      if (e.kind == Notice::Kind::finished) {
        auto it = live_.find(e.seq);
        KVASIR_CHECK(it != live_.end(), "sequence ", e.seq, " finished twice");
        const Live& l = it->second;
        KVASIR_CHECK(e.output_tokens <= int64_t(l.output.size()), "sequence ", e.seq, " has output nobody saw");
        if (!l.beam)
          KVASIR_CHECK(l.output == device_.continuation(l.prompt, l.choice, l.output.size()), "sequence ", e.seq,
                       " said something else than alone");
        ++finished_;
        live_.erase(it);
      }
      if (e.kind == Notice::Kind::released)
        std::erase_if(live_, [&](const auto& l) { return l.second.request == e.request; });
    }
  }

  void check() {
    scheduler_->check_integrity();
    collect();
  }

  std::mt19937_64 rng_;
  int32_t vocabulary_ = 2;
  Settings options_;
  FakeDevice device_;
  std::unique_ptr<Scheduler> scheduler_;
  Time now_{};
  StepPlan plan_;
  std::deque<FakeDevice::Run> runs_;
  bool wholes_ = false;  // some prompts are computed in one step, and nobody shares them
  std::map<SeqId, Live> live_;
  uint64_t plans_ = 0;
  int64_t finished_ = 0;
};

}  // namespace kvasir::scheduler
