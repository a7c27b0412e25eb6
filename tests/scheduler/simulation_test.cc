// What the policies promise, on simulated days.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <random>

#include "core/check.h"
#include "scheduler/policy.h"
#include "scheduler/simulate.h"

namespace kvasir::scheduler {
namespace {

Settings machine() {
  Settings o;
  o.groups = {{16384, 0}};
  o.max_context = 32768;
  o.max_running = 64;
  o.max_tokens_per_step = 1024;
  o.max_waiting = 1 << 20;
  o.max_waiting_tokens = int64_t(1) << 40;
  o.cost = {.fixed_us = 5000, .token_us = 23, .context_us = 0.0007, .decode_token_us = 15, .decode_context_us = 0.03};
  return o;
}

SimReport run(Settings o, const std::string& policy, const SimWorkload& w) {
  o.policy = policy;
  auto r = simulate(o, w);
  KVASIR_CHECK(r.ok(), r.status().to_string());
  return std::move(r).value();
}

TEST(Simulation, LongestPrefixMatchKeepsConversationsInTheCache) {
  // 64 users, one system prompt of 4,096 tokens, 20 turns each of 100 tokens asked and 100 answered, no
  // pause between turns; a pool half the size of all they say.
  const int users = 64, turns = 20, asked = 100, answered = 100, system = 4096;
  SimWorkload w;
  int64_t repeated = 0;  // what an order with an endless cache would find
  for (int t = 0; t < turns; ++t)
    for (int u = 0; u < users; ++u) {
      WorkItem item;
      item.conversation = u;
      for (int b = 0; b < system / 16; ++b) item.prefix_ids.push_back(b);
      item.prompt_tokens = system + t * (asked + answered) + asked;
      item.output_tokens = answered;
      if (t > 0) item.follows = int64_t(t - 1) * users + u;
      if (t > 0) repeated += item.prompt_tokens - asked - 1;
      if (t == 0 && u > 0) repeated += system;
      w.items.push_back(item);
    }
  Settings o = machine();
  o.groups[0].pages = (system + users * turns * (asked + answered)) / 16 / 2;
  for (int running : {16, 64}) {  // with the patience that is usual
    o.max_running = running;
    SimReport lpm = run(o, "lpm", w), fcfs = run(o, "fcfs", w);
    std::printf("%d running: of %.1f million repeated tokens lpm found %.1f%%, fcfs %.1f%%; longest wait %.1f s\n",
                running, repeated / 1e6, 100.0 * lpm.cached_tokens / repeated, 100.0 * fcfs.cached_tokens / repeated,
                lpm.longest_wait_s);
    EXPECT_EQ(lpm.finished, users * turns);
    EXPECT_GE(lpm.cached_tokens, repeated * 9 / 10);
    EXPECT_GT(lpm.cached_tokens, fcfs.cached_tokens);
  }
}

SimWorkload poisson(double seconds, double rate, int64_t prompt, int64_t output, const std::string& tenant, int seed) {
  SimWorkload w;
  std::mt19937 rng(seed);
  std::exponential_distribution<double> gap(rate);
  std::uniform_real_distribution<double> size(0.5, 1.5);
  for (double t = gap(rng); t < seconds; t += gap(rng)) {
    WorkItem item;
    item.arrival_s = t;
    item.prompt_tokens = static_cast<int64_t>(size(rng) * static_cast<double>(prompt));
    item.output_tokens = static_cast<int64_t>(size(rng) * static_cast<double>(output));
    item.tenant = tenant;
    w.items.push_back(item);
  }
  return w;
}

SimWorkload merge(SimWorkload a, const SimWorkload& b) {
  a.items.insert(a.items.end(), b.items.begin(), b.items.end());
  std::stable_sort(a.items.begin(), a.items.end(), [](auto& x, auto& y) { return x.arrival_s < y.arrival_s; });
  return a;
}

double p99_of(const SimReport& r, const std::string& tenant) {
  for (const TenantReport& t : r.tenants)
    if (t.name == tenant) return t.ttft_s.p99;
  return -1;
}

TEST(Simulation, AFloodOfOneTenantHardlyTouchesAnother) {
  SimWorkload quiet = poisson(300, 2, 2000, 100, "quiet", 1);
  SimWorkload both = merge(quiet, poisson(300, 60, 500, 200, "loud", 2));
  Settings o = machine();
  SimReport alone = run(o, "fair", quiet), fair = run(o, "fair", both), fcfs = run(o, "fcfs", both);
  std::printf("quiet tenant's TTFT p99: alone %.3f s, in the flood %.3f s under fair, %.3f s under fcfs\n",
              p99_of(alone, "quiet"), p99_of(fair, "quiet"), p99_of(fcfs, "quiet"));
  EXPECT_LE(p99_of(fair, "quiet"), 1.2 * p99_of(alone, "quiet"));
}

TEST(Simulation, DeadlinesAreKeptAboveCapacity) {
  Settings o = machine();
  // Capacity: what a queue that is never empty gives.
  SimWorkload full = poisson(100, 200, 500, 200, "", 3);
  for (WorkItem& item : full.items) item.arrival_s = 0;
  full.items.resize(4000);
  const double capacity = run(o, "fcfs", full).output_tokens_per_s;
  SimWorkload w = poisson(300, 1.2 * capacity / 200, 500, 200, "", 4);
  std::mt19937 rng(5);
  std::uniform_real_distribution<double> slack(6, 20);
  for (WorkItem& item : w.items) item.deadline_s = slack(rng);
  SimReport edf = run(o, "deadline", w), fcfs = run(o, "fcfs", w);
  std::printf("capacity %.0f tokens/s; on time: deadline %.1f%% (refused %lld, expired %lld), fcfs %.1f%%\n", capacity,
              100 * edf.goodput_tokens_per_s / capacity, (long long)edf.refused, (long long)edf.expired,
              100 * fcfs.goodput_tokens_per_s / capacity);
  EXPECT_GE(edf.goodput_tokens_per_s, 0.85 * capacity);
}

TEST(Simulation, NobodyStarves) {
  // A steady stream of what each policy likes better, at nine tenths of capacity, and a few it does not.
  for (const std::string& policy : policy_names()) {
    Settings o = machine();
    o.max_running = 16;
    o.patience = std::chrono::seconds(5);
    SimWorkload w = poisson(200, 20, 400, 100, "many", 6);
    for (WorkItem& item : w.items) {
      item.priority = 3;
      item.conversation = 1;
    }
    SimWorkload few = poisson(200, 0.2, 400, 100, "few", 7);
    SimReport r = run(o, policy, merge(w, few));
    // The difference of priorities is 3: nobody waits for who came more than 3 * patience later.
    double queue = p99_of(r, "many") + 3 * 5;
    std::printf("%-9s longest wait %.2f s\n", policy.c_str(), r.longest_wait_s);
    EXPECT_EQ(r.finished, r.requests) << policy;
    EXPECT_LE(r.longest_wait_s, queue + 5) << policy;
  }
}

TEST(Simulation, ADayOfRequestsTakesSeconds) {
  SimWorkload w = poisson(86400, 100000.0 / 86400, 300, 60, "", 8);
  SimReport r = run(machine(), "fcfs", w);
  std::printf("%lld requests, %.0f s simulated in %.1f s\n", (long long)r.requests, r.simulated_s, r.wall_s);
  EXPECT_EQ(r.finished, r.requests);
  EXPECT_LT(r.wall_s, 20 * 4);  // the bar is 20 s on an idle core; tests share theirs
}

TEST(Workloads, SayWhichLineIsWrong) {
  auto message = [](const std::string& text) { return parse_workload(text).status().message(); };
  EXPECT_NE(message("{\"arrival_s\":2,\"prompt_tokens\":5}\n{\"arrival_s\":1,\"prompt_tokens\":5}").find("line 2"),
            std::string::npos);
  EXPECT_NE(message("{\"prompt_tokens\":0}").find("prompt_tokens"), std::string::npos);
  EXPECT_NE(message("{\"prompt_token\":1}").find("not known"), std::string::npos);
  EXPECT_NE(message("[1]").find("line 1"), std::string::npos);
  EXPECT_FALSE(message("").empty());
  auto w =
      parse_workload("{\"arrival_s\":0.5,\"prompt_tokens\":5,\"output_tokens\":2,\"tenant\":\"a\",\"deadline_s\":3}");
  ASSERT_TRUE(w.ok());
  EXPECT_EQ(w->items[0].tenant, "a");
}

}  // namespace
}  // namespace kvasir::scheduler
