#include "scheduler/simulate.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <queue>
#include <unordered_map>
#include <utility>

#include "core/check.h"

namespace kvasir::scheduler {
namespace {

int32_t token_at(uint64_t stream, int64_t position) {
  uint64_t h = (stream + 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull + static_cast<uint64_t>(position);
  h = (h ^ (h >> 31)) * 0x94d049bb133111ebull;
  return static_cast<int32_t>((h ^ (h >> 29)) & 0x7fffff);
}

int32_t token_of(const SimWorkload& w, size_t index, int64_t position) {
  const WorkItem& item = w.items[index];
  if (static_cast<size_t>(position) < item.text.size()) return item.text[static_cast<size_t>(position)];
  const int64_t block = position / w.prefix_block;
  if (block < static_cast<int64_t>(item.prefix_ids.size()))
    return token_at(static_cast<uint64_t>(item.prefix_ids[block]) * 2 + 1, position);
  const uint64_t own = item.conversation >= 0 ? uint64_t(item.conversation) : (uint64_t(1) << 40) + index;
  return token_at(own * 2, position);
}

Time at(double seconds) {
  seconds = std::min(seconds, 9e9);  // what the clock can say: chains of followers may add up to more
  return Time{} + std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

struct Live {
  SeqId seq = 0;
  double arrival = 0, first = -1, last = 0;
  int64_t outputs = 0;
};
struct Arrival {
  double time;
  size_t index;
  bool cancels;
  bool operator<(const Arrival& o) const { return time != o.time ? time > o.time : index > o.index; }
};

// A prompt whose cache came over a link is one decode, of its last token.
StepTime work_of_decodes(const StepPlan& plan) {
  StepTime work = work_of(plan);
  work.prefill_tokens = work.prefill_context = 0;
  for (const PlanItem& item : plan.items)
    if (item.phase == Phase::prefill && item.samples) add_work(work, Phase::decode, item.begin + item.count - 1, 1);
  return work;
}

// One run of a workload.
class Simulation {
 public:
  Simulation(const Settings& options, std::unique_ptr<Scheduler> scheduler, const SimWorkload& w,
             const StepCost* machine, OneOfMany* one, double warm_up_s)
      : options_(options),
        scheduler_(std::move(scheduler)),
        w_(w),
        machine_(machine ? *machine : options.cost),
        one_(one),
        warm_up_s_(warm_up_s) {
    report_.policy = options.policy;
    report_.requests = static_cast<int64_t>(w.items.size());
    if (one) one->served.assign(w.items.size(), {});
    for (size_t i = 0; i < w.items.size(); ++i) {
      if (w.items[i].follows >= 0) {
        followers_[w.items[i].follows].push_back(i);
      } else {
        arrivals_.push({w.items[i].arrival_s, i, false});
      }
    }
  }

  SimReport run() {
    for (;;) {
      while (!arrivals_.empty() && arrivals_.top().time <= now_) {
        const Arrival a = arrivals_.top();
        arrivals_.pop();
        arrive(a);
      }
      scheduler_->next_step(at(now_), plan_);
      if (!plan_.empty()) run_step();
      take_notices();
      if (!plan_.empty() || (!arrivals_.empty() && arrivals_.top().time <= now_)) continue;
      const double next = next_time();
      if (next < 0) break;
      now_ = std::max(next, std::nextafter(now_, 1e300));  // forward, even where doubles are coarser than the clock
    }
    KVASIR_CHECK(scheduler_->idle(), "the simulation ended and ", live_.size(), " requests are left");
    sum_up();
    return std::move(report_);
  }

 private:
  void arrive(const Arrival& a) {
    const WorkItem& item = w_.items[a.index];
    if (a.cancels) {
      if (scheduler_->cancel(a.index).ok()) ++report_.cancelled;
      return;
    }
    Submission s;
    s.id = a.index;
    s.tenant = item.tenant;
    s.priority = item.priority;
    s.max_new = item.output_tokens;
    if (item.deadline_s) s.deadline = at(a.time + *item.deadline_s);
    s.prompt.resize(item.prompt_tokens);
    for (int64_t p = 0; p < item.prompt_tokens; ++p) s.prompt[p] = token_of(w_, a.index, p);
    auto seq = scheduler_->submit(std::move(s), at(now_));
    if (!seq.ok()) {
      ++report_.refused;
      go_on(a.index);
      return;
    }
    live_[a.index] = {*seq, a.time, -1, a.time, 0};
    if (item.cancel_at_s) arrivals_.push({a.time + *item.cancel_at_s, a.index, true});
  }

  // Whoever waited for this one to end.
  void go_on(size_t index) {
    auto it = followers_.find(index);
    if (it == followers_.end()) return;
    for (size_t next : it->second) arrivals_.push({now_ + w_.items[next].arrival_s, next, false});
    followers_.erase(it);
  }

  void run_step() {
    now_ += step_seconds(one_ && one_->prompts_come_computed ? work_of_decodes(plan_) : work_of(plan_), machine_) +
            std::exchange(warm_up_s_, 0);
    results_.clear();
    sampled_.clear();
    sampled_.reserve(plan_.items.size());
    for (const PlanItem& item : plan_.items) {
      if (!item.samples) continue;
      sampled_.push_back(token_of(w_, item.request, item.begin + item.count));
      SeqResult r;
      r.seq = item.seq;
      r.tokens = std::span(&sampled_.back(), 1);
      results_.push_back(r);
      Live& l = live_[item.request];
      if (l.first < 0) {
        l.first = now_;
      } else {
        itl_.push_back(now_ - l.last);
      }
      l.last = now_;
      ++l.outputs;
    }
    scheduler_->advance(results_, at(now_));
    const Stats s = scheduler_->brief_stats();
    const double use = 1.0 - static_cast<double>(s.pages_free + s.pages_cached) / static_cast<double>(s.pages_total);
    used_ += use;
    report_.page_use_peak = std::max(report_.page_use_peak, use);
  }

  void take_notices() {
    scheduler_->take_events(notices_);
    for (const Notice& e : notices_) {
      if (e.kind == Notice::Kind::expired) ++report_.expired;
      if (e.kind == Notice::Kind::finished) finished(e.request);
      if (e.kind == Notice::Kind::released) released(e.request);
    }
  }

  void finished(RequestId request) {
    const WorkItem& item = w_.items[request];
    const Live& l = live_[request];
    ++report_.finished;
    const bool on_time = !item.deadline_s || now_ <= l.arrival + *item.deadline_s;
    report_.on_time_tokens += on_time ? l.outputs : 0;
    latency_.push_back(now_ - l.arrival);
    TenantReport& t = tenants_[item.tenant].first;
    ++t.finished;
    t.output_tokens += l.outputs;
  }

  void released(RequestId request) {
    const Live& l = live_[request];
    if (one_) one_->served[request] = {l.first, l.outputs > 0 ? l.last : -1};
    if (l.first >= 0) {
      const double wait = l.first - l.arrival;
      ttft_.push_back(wait);
      tenants_[w_.items[request].tenant].second.push_back(wait);
      report_.longest_wait_s = std::max(report_.longest_wait_s, wait);
    }
    live_.erase(request);
    go_on(request);
  }

  // When something is to be done again; below 0: never.
  double next_time() {
    // Who had an answer leaves nothing behind: the run ends with the last who is there.
    while (!arrivals_.empty() && arrivals_.top().cancels && !live_.contains(arrivals_.top().index)) arrivals_.pop();
    double next = arrivals_.empty() ? -1 : arrivals_.top().time;
    if (auto wake = scheduler_->wake_at(); wake && !scheduler_->idle()) {
      const double t = std::chrono::duration<double>(wake->time_since_epoch()).count() + 1e-9;
      if (next < 0 || t < next) next = t;
    }
    return next;
  }

  void sum_up() {
    const Stats s = scheduler_->stats();
    report_.simulated_s = now_;
    report_.steps = s.steps;
    report_.steps_cut = s.steps_cut;
    report_.preemptions = s.preemptions;
    report_.swaps = s.swaps;
    report_.prompt_tokens = s.prompt_tokens;
    report_.cached_tokens = s.cached_tokens;
    report_.output_tokens = s.output_tokens;
    report_.hit_rate = s.prompt_tokens > 0 ? double(s.cached_tokens) / double(s.prompt_tokens) : 0;
    report_.output_tokens_per_s = now_ > 0 ? double(s.output_tokens) / now_ : 0;
    report_.goodput_tokens_per_s = now_ > 0 ? double(report_.on_time_tokens) / now_ : 0;
    report_.page_use_mean = s.steps > 0 ? used_ / double(s.steps) : 0;
    report_.ttft_s = percentiles(ttft_);
    if (one_) one_->itl_s = itl_;
    report_.itl_s = percentiles(itl_);
    report_.latency_s = percentiles(latency_);
    sum_up_tenants();
  }

  void sum_up_tenants() {
    double sum = 0, squares = 0;
    for (auto& [name, entry] : tenants_) {
      entry.first.name = name;
      entry.first.ttft_s = percentiles(entry.second);
      report_.tenants.push_back(entry.first);
      sum += double(entry.first.output_tokens);
      squares += double(entry.first.output_tokens) * double(entry.first.output_tokens);
    }
    if (squares > 0) report_.fairness = sum * sum / (double(tenants_.size()) * squares);
  }

  const Settings& options_;
  const std::unique_ptr<Scheduler> scheduler_;
  const SimWorkload& w_;
  const StepCost& machine_;
  OneOfMany* const one_;
  double warm_up_s_;
  SimReport report_;
  std::priority_queue<Arrival> arrivals_;
  std::unordered_map<size_t, std::vector<size_t>> followers_;
  std::unordered_map<RequestId, Live> live_;
  std::map<std::string, std::pair<TenantReport, std::vector<double>>> tenants_;
  std::vector<double> ttft_, itl_, latency_;
  std::vector<Notice> notices_;
  std::vector<SeqResult> results_;
  std::vector<int32_t> sampled_;
  StepPlan plan_;
  double now_ = 0, used_ = 0;
};

}  // namespace

Percentiles percentiles(std::vector<double>& v) {
  Percentiles p;
  if (v.empty()) return p;
  std::sort(v.begin(), v.end());
  auto at = [&](double q) { return v[static_cast<size_t>(q * static_cast<double>(v.size() - 1))]; };
  p = {at(0.5), at(0.9), at(0.99), 0};
  for (double x : v) p.mean += x;
  p.mean /= static_cast<double>(v.size());
  return p;
}

Result<SimReport> simulate(const Settings& options, const SimWorkload& w, const StepCost* machine, OneOfMany* one,
                           double warm_up_s) {
  const auto wall = std::chrono::steady_clock::now();
  KVASIR_ASSIGN(auto scheduler, Scheduler::create(options));
  SimReport report = Simulation(options, std::move(scheduler), w, machine, one, warm_up_s).run();
  report.wall_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - wall).count();
  return report;
}

}  // namespace kvasir::scheduler
