// Microseconds of next_step by policy and load, and of a prefix lookup: thread CPU time, medians. And how long a
// synthetic day of 100,000 requests takes to simulate.
//   build/release/bench/scheduler/scheduler_bench [--json bench/results/scheduler.json]
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "core/cat.h"

#include "kvcache/kv_space.h"
#include "scheduler/policy.h"
#include "scheduler/recorder.h"
#include "scheduler/scheduler.h"
#include "scheduler/simulate.h"

using namespace kvasir;
using namespace kvasir::scheduler;

namespace {

double cpu_us() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

nlohmann::ordered_json results = nlohmann::ordered_json::array();
bool all_within = true;

void note(const std::string& what, double median, double p99, double bar, const char* unit,
          nlohmann::ordered_json more) {
  nlohmann::ordered_json j = {{"what", what}, {"median", median}, {"p99", p99}, {"bar", bar}, {"unit", unit}};
  j.update(more);
  results.push_back(j);
  all_within = all_within && median < bar;
}

double at(std::vector<double>& v, double q) {
  std::sort(v.begin(), v.end());
  return v[static_cast<size_t>(q * static_cast<double>(v.size() - 1))];
}

// `running` decode, `waiting` wait; every 64th step one ends and another comes in.
void next_step(const char* policy, int running, int waiting, double bar, bool recorded = false) {
  Settings o;
  o.policy = policy;
  o.max_running = running;
  o.max_tokens_per_step = running + 512;
  o.max_step_ms = 40;  // as kvasir serve has it
  o.groups = {{running * 40ll, 0}};
  o.max_context = 2048;
  o.max_waiting = running + waiting;
  o.max_waiting_tokens = 1ll << 40;
  size_t recorded_bytes = 0;
  if (recorded) o.recorder = std::make_shared<Recorder>([&](std::string lines) { recorded_bytes += lines.size(); }, 1);
  auto scheduler = std::move(Scheduler::create(o)).value();
  Time now{};
  const int tenants = 16;
  auto submit = [&](int id) {
    Submission s;
    s.id = static_cast<RequestId>(id);
    s.tenant = cat("tenant", id % tenants);
    for (int i = 0; i < 200; ++i) s.prompt.push_back((id % 50) * 1000 + i);
    s.max_new = 100 + id % 200;
    s.priority = id % 3;
    s.deadline = now + std::chrono::hours(10);
    now += std::chrono::microseconds(1);
    auto r = scheduler->submit(std::move(s), now);
    if (!r.ok()) std::fprintf(stderr, "%s\n", r.status().to_string().c_str());
  };
  for (int id = 0; id < running + waiting; ++id) submit(id);
  StepPlan plan;
  std::vector<SeqResult> results;
  std::vector<Notice> events;
  std::vector<double> plans, retires;
  const int32_t token = 7;
  const int warm_up = running * 200 / 512 + 50;
  int id = running + waiting;
  for (int step = 0; step < warm_up + 400; ++step) {
    now += std::chrono::milliseconds(5);
    double t0 = cpu_us();
    scheduler->next_step(now, plan);
    double t1 = cpu_us();
    results.clear();
    for (const PlanItem& item : plan.items)
      if (item.samples) results.push_back({.seq = item.seq, .tokens = {&token, 1}});
    double t2 = cpu_us();
    scheduler->advance(results, now);
    double t3 = cpu_us();
    scheduler->take_events(events);
    for (const Notice& e : events)
      if (e.kind == Notice::Kind::released) submit(id++);
    if (step < warm_up) continue;
    plans.push_back(t1 - t0);
    retires.push_back(t3 - t2);
  }
  const double median = at(plans, 0.5), p99 = at(plans, 0.99), retire = at(retires, 0.5);
  note(recorded ? "next_step, recorded" : "next_step", median, p99, bar, "us",
       {{"policy", policy}, {"running", running}, {"waiting", waiting}, {"advance_median", retire}});
  std::printf("%s %-9s running %5d waiting %6d: median %7.1f us  p99 %7.1f us  (bar %3.0f)  %s   advance %7.1f us\n",
              recorded ? "recorded " : "next_step", policy, running, waiting, median, p99, bar,
              median < bar ? "ok  " : "OVER", retire);
}

void lookup() {
  kvcache::KvSpaceOptions o;
  o.groups = {{8192, 0}};
  kvcache::KvSpace kv(o);
  std::vector<int32_t> tokens(32768);
  uint32_t x = 1;
  for (int32_t& t : tokens) t = static_cast<int32_t>((x = x * 1664525u + 1013904223u) >> 15);
  for (int other = 0; other < 3; ++other) {  // other prompts of the pool beside it
    auto mine = tokens;
    if (other < 2)
      for (int32_t& t : mine) t += other + 1;
    kvcache::Lease lease = kv.acquire("k", 0, kvcache::Match{});
    if (!kv.grow(lease, 32768)) std::abort();
    kv.finish(std::move(lease), mine, 32768);
  }
  std::vector<double> times;
  int64_t found = 0;
  for (int i = 0; i < 400; ++i) {
    double t0 = cpu_us();
    found = kv.match("k", tokens, 32767).tokens;
    times.push_back(cpu_us() - t0);
  }
  const double median = at(times, 0.5);
  note("prefix lookup of 32768 tokens", median, at(times, 0.99), 200, "us", {{"found", found}});
  std::printf("prefix lookup of 32768 tokens: median %.1f us  p99 %.1f us  (bar 200)  %s, found %lld\n", median,
              at(times, 0.99), median < 200 ? "ok" : "OVER", static_cast<long long>(found));
}

// 100,000 requests in a day, 300 tokens asked and 60 answered on average.
void simulated_day() {
  SimWorkload day;
  std::mt19937 rng(8);
  std::exponential_distribution<double> gap(100000.0 / 86400);
  std::uniform_real_distribution<double> size(0.5, 1.5);
  double t = 0;
  for (int i = 0; i < 100000; ++i) {
    WorkItem item;
    item.arrival_s = t += gap(rng);
    item.prompt_tokens = static_cast<int64_t>(300 * size(rng));
    item.output_tokens = static_cast<int64_t>(60 * size(rng));
    day.items.push_back(item);
  }
  Settings o;
  o.groups = {{16384, 0}};
  o.max_context = 32768;
  o.max_tokens_per_step = 1024;
  const double t0 = cpu_us();
  auto report = simulate(o, day);
  const double seconds = (cpu_us() - t0) * 1e-6;
  if (!report.ok() || report->finished != 100000) std::abort();
  note("100,000 requests simulated", seconds, seconds, 20, "s", {{"steps", report->steps}});
  std::printf("100,000 requests simulated in %.1f s of processor time (bar 20)  %s\n", seconds,
              seconds < 20 ? "ok" : "OVER");
}

}  // namespace

int main(int argc, char** argv) {
  lookup();
  for (const std::string& p : policy_names()) next_step(p.c_str(), 256, 10000, 50);
  for (const std::string& p : policy_names()) next_step(p.c_str(), 4096, 10000, 500);
  next_step("fcfs", 256, 10000, 50, true);
  simulated_day();
  double load[1] = {0};
  if (getloadavg(load, 1) != 1) load[0] = -1;
  if (argc == 3 && std::strcmp(argv[1], "--json") == 0) {
    nlohmann::ordered_json all = {{"command", "bench/scheduler/scheduler_bench --json FILE"},
                                  {"clock", "processor time of one thread"},
                                  {"load_average", load[0]},
                                  {"results", results}};
    std::ofstream file(argv[2]);
    file << all.dump(1) << '\n';
    if (!file.flush()) {
      std::fprintf(stderr, "cannot write %s\n", argv[2]);
      return 1;
    }
  }
  return all_within ? 0 : 1;
}
