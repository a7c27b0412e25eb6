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
  SimReport report;
  report.policy = options.policy;
  report.requests = static_cast<int64_t>(w.items.size());

  if (one) one->served.assign(w.items.size(), {});

  std::priority_queue<Arrival> arrivals;
  std::unordered_map<size_t, std::vector<size_t>> followers;
  for (size_t i = 0; i < w.items.size(); ++i) {
    if (w.items[i].follows >= 0) {
      followers[w.items[i].follows].push_back(i);
    } else {
      arrivals.push({w.items[i].arrival_s, i, false});
    }
  }
  std::unordered_map<RequestId, Live> live;
  std::map<std::string, std::pair<TenantReport, std::vector<double>>> tenants;
  std::vector<double> ttft, itl, latency;
  std::vector<Notice> events;
  std::vector<SeqResult> results;
  std::vector<int32_t> sampled;
  StepPlan plan;
  double now = 0, used = 0;

  auto go_on = [&](size_t index) {  // whoever waited for this one to end
    auto it = followers.find(index);
    if (it == followers.end()) return;
    for (size_t next : it->second) arrivals.push({now + w.items[next].arrival_s, next, false});
    followers.erase(it);
  };
  auto arrive = [&](const Arrival& a) {
    const WorkItem& item = w.items[a.index];
    if (a.cancels) {
      if (scheduler->cancel(a.index).ok()) ++report.cancelled;
      return;
    }
    Submission s;
    s.id = a.index;
    s.tenant = item.tenant;
    s.priority = item.priority;
    s.max_new = item.output_tokens;
    if (item.deadline_s) s.deadline = at(a.time + *item.deadline_s);
    s.prompt.resize(item.prompt_tokens);
    for (int64_t p = 0; p < item.prompt_tokens; ++p) s.prompt[p] = token_of(w, a.index, p);
    auto seq = scheduler->submit(std::move(s), at(now));
    if (!seq.ok()) {
      ++report.refused;
      go_on(a.index);
      return;
    }
    live[a.index] = {*seq, a.time, -1, a.time, 0};
    if (item.cancel_at_s) arrivals.push({a.time + *item.cancel_at_s, a.index, true});
  };

  for (;;) {
    for (; !arrivals.empty() && arrivals.top().time <= now;) {
      Arrival a = arrivals.top();
      arrivals.pop();
      arrive(a);
    }
    scheduler->next_step(at(now), plan);
    if (!plan.empty()) {
      now += step_seconds(one && one->prompts_come_computed ? work_of_decodes(plan) : work_of(plan),
                          machine ? *machine : options.cost) +
             std::exchange(warm_up_s, 0);
      results.clear();
      sampled.clear();
      sampled.reserve(plan.items.size());
      for (const PlanItem& item : plan.items) {
        if (!item.samples) continue;
        sampled.push_back(token_of(w, item.request, item.begin + item.count));
        SeqResult r;
        r.seq = item.seq;
        r.tokens = std::span(&sampled.back(), 1);
        results.push_back(r);
        Live& l = live[item.request];
        if (l.first < 0) {
          l.first = now;
        } else {
          itl.push_back(now - l.last);
        }
        l.last = now;
        ++l.outputs;
      }
      scheduler->advance(results, at(now));
      const Stats s = scheduler->brief_stats();
      const double use = 1.0 - static_cast<double>(s.pages_free + s.pages_cached) / static_cast<double>(s.pages_total);
      used += use;
      report.page_use_peak = std::max(report.page_use_peak, use);
    }
    scheduler->take_events(events);
    for (const Notice& e : events) {
      if (e.kind == Notice::Kind::expired) ++report.expired;
      if (e.kind == Notice::Kind::finished) {
        const WorkItem& item = w.items[e.request];
        const Live& l = live[e.request];
        ++report.finished;
        const bool on_time = !item.deadline_s || now <= l.arrival + *item.deadline_s;
        report.on_time_tokens += on_time ? l.outputs : 0;
        latency.push_back(now - l.arrival);
        auto& [t, waits] = tenants[item.tenant];
        ++t.finished;
        t.output_tokens += l.outputs;
      }
      if (e.kind == Notice::Kind::released) {
        const Live& l = live[e.request];
        if (one) one->served[e.request] = {l.first, l.outputs > 0 ? l.last : -1};
        if (l.first >= 0) {
          ttft.push_back(l.first - l.arrival);
          tenants[w.items[e.request].tenant].second.push_back(l.first - l.arrival);
          report.longest_wait_s = std::max(report.longest_wait_s, l.first - l.arrival);
        }
        live.erase(e.request);
        go_on(e.request);
      }
    }
    if (!plan.empty() || (!arrivals.empty() && arrivals.top().time <= now)) continue;
    // Who had an answer leaves nothing behind: the run ends with the last who is there.
    while (!arrivals.empty() && arrivals.top().cancels && !live.contains(arrivals.top().index)) arrivals.pop();
    double next = arrivals.empty() ? -1 : arrivals.top().time;
    if (auto wake = scheduler->wake_at(); wake && !scheduler->idle()) {
      const double t = std::chrono::duration<double>(wake->time_since_epoch()).count() + 1e-9;
      if (next < 0 || t < next) next = t;
    }
    if (next < 0) break;
    now = std::max(next, std::nextafter(now, 1e300));  // forward, even where doubles are coarser than the clock
  }
  KVASIR_CHECK(scheduler->idle(), "the simulation ended and ", live.size(), " requests are left");

  const Stats s = scheduler->stats();
  report.simulated_s = now;
  report.steps = s.steps;
  report.steps_cut = s.steps_cut;
  report.preemptions = s.preemptions;
  report.swaps = s.swaps;
  report.prompt_tokens = s.prompt_tokens;
  report.cached_tokens = s.cached_tokens;
  report.output_tokens = s.output_tokens;
  report.hit_rate = s.prompt_tokens > 0 ? double(s.cached_tokens) / double(s.prompt_tokens) : 0;
  report.output_tokens_per_s = now > 0 ? double(s.output_tokens) / now : 0;
  report.goodput_tokens_per_s = now > 0 ? double(report.on_time_tokens) / now : 0;
  report.page_use_mean = s.steps > 0 ? used / double(s.steps) : 0;
  report.ttft_s = percentiles(ttft);
  if (one) one->itl_s = itl;
  report.itl_s = percentiles(itl);
  report.latency_s = percentiles(latency);
  double sum = 0, squares = 0;
  for (auto& [name, entry] : tenants) {
    entry.first.name = name;
    entry.first.ttft_s = percentiles(entry.second);
    report.tenants.push_back(entry.first);
    sum += double(entry.first.output_tokens);
    squares += double(entry.first.output_tokens) * double(entry.first.output_tokens);
  }
  if (squares > 0) report.fairness = sum * sum / (double(tenants.size()) * squares);
  report.wall_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - wall).count();
  return report;
}

}  // namespace kvasir::scheduler
