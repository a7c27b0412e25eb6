// Microseconds of next_step by policy and load, and of a prefix lookup: thread CPU time, medians.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "kvcache/kv_space.h"
#include "scheduler/policy.h"
#include "scheduler/scheduler.h"

using namespace kvasir;
using namespace kvasir::scheduler;

namespace {

double cpu_us() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

double at(std::vector<double>& v, double q) {
  std::sort(v.begin(), v.end());
  return v[static_cast<size_t>(q * static_cast<double>(v.size() - 1))];
}

// `running` decode, `waiting` wait; every 64th step one ends and another comes in.
void next_step(const char* policy, int running, int waiting, double bar) {
  Options o;
  o.policy = policy;
  o.max_running = running;
  o.max_tokens_per_step = running + 512;
  o.groups = {{running * 40ll, 0}};
  o.max_context = 2048;
  o.max_waiting = running + waiting;
  o.max_waiting_tokens = 1ll << 40;
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
  std::vector<Event> events;
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
    for (const Event& e : events)
      if (e.kind == Event::Kind::released) submit(id++);
    if (step < warm_up) continue;
    plans.push_back(t1 - t0);
    retires.push_back(t3 - t2);
  }
  const double median = at(plans, 0.5);
  std::printf(
      "next_step %-9s running %5d waiting %6d: median %7.1f us  p99 %7.1f us  (bar %3.0f)  %s   advance %7.1f us\n",
      policy, running, waiting, median, at(plans, 0.99), bar, median < bar ? "ok  " : "OVER", at(retires, 0.5));
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
  std::printf("prefix lookup of 32768 tokens: median %.1f us  p99 %.1f us  (bar 200)  %s, found %lld\n", median,
              at(times, 0.99), median < 200 ? "ok" : "OVER", static_cast<long long>(found));
}

}  // namespace

int main() {
  lookup();
  for (const std::string& p : policy_names()) next_step(p.c_str(), 256, 10000, 50);
  for (const std::string& p : policy_names()) next_step(p.c_str(), 4096, 10000, 500);
}
