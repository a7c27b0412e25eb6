// A server that has just started knows neither what its steps take nor how long answers are. What it does not know yet
// is no reason to refuse anybody; and it knows soon enough that what it does under overload is of use from then on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <utility>

#include "core/check.h"
#include "scheduler/simulate.h"
#include "tests/scheduler/desk.h"

namespace kvasir::scheduler {
namespace {

// A GPU with 8 billion parameters, and two cores with 135 million.
struct Machine {
  const char* name;
  StepCost cost;
  int32_t max_running;
  int64_t max_tokens_per_step;
  double warm_up_s;  // of its first step
  int64_t prompt, output;
};
const Machine kMachines[] = {{"gpu", {4890, 22.9, 0.0007, 14.9, 0.0312}, 256, 4096, 1.5, 1000, 250},
                             {"cores", {1481, 545, 0.019, 795, 2.5}, 64, 512, 0.3, 100, 40}};

StepCost times(const StepCost& c, double by) {
  return {by * c.fixed_us,        by * c.token_us,          by * c.context_us,
          by * c.decode_token_us, by * c.decode_context_us, by * c.page_move_us};
}

// What `kvasir serve` bounds by default, with a guess at the cost that is off by so much.
Settings server(const Machine& m, double off, double max_step_ms) {
  Settings o;
  o.groups = {{1 << 16, 0}};
  o.max_context = 4096;
  o.max_running = m.max_running;
  o.max_tokens_per_step = m.max_tokens_per_step;
  o.max_step_ms = max_step_ms;
  o.max_wait_s = 4;
  o.max_wait_answers = 3;
  o.tenant_queue_share = 1;
  o.cost = times(m.cost, off);
  return o;
}

SimReport run(const Settings& o, const SimWorkload& w, const Machine& m) {
  auto r = simulate(o, w, &m.cost, nullptr, m.warm_up_s);
  KVASIR_CHECK(r.ok(), r.status().to_string());
  return std::move(r).value();
}

// Each asks again when answered, at once; they come one after the other. `before`: short requests that came first, as
// those that look whether a server is well.
SimWorkload closed_loop(const Machine& m, int clients, int before, int rounds = 3) {
  SimWorkload w;
  for (int i = 0; i < before; ++i) {
    WorkItem item;
    item.prompt_tokens = 3, item.output_tokens = 2;
    if (i > 0) item.follows = i - 1;
    w.items.push_back(item);
  }
  for (int i = 0; i < rounds * clients; ++i) {
    WorkItem item;
    item.prompt_tokens = m.prompt, item.output_tokens = m.output;
    item.arrival_s = before > 0 ? 5 + 0.002 * i : 0.002 * i;
    if (i >= clients) item.follows = before + i - clients, item.arrival_s = 0;
    w.items.push_back(item);
  }
  return w;
}

// Whether nobody waits for longer than may be where nobody is refused. After many short answers, others are not known.
bool bound_holds(Settings o, const SimWorkload& w, const Machine& m, int before) {
  const double least = std::exchange(o.max_wait_s, 0), answers = std::exchange(o.max_wait_answers, 0);
  const SimReport r = run(o, w, m);
  const double an_answer = before < 8 ? r.latency_s.mean - r.ttft_s.mean : 0;
  return r.longest_wait_s <= std::max(least, answers * an_answer);
}

TEST(ColdStart, ClientsWhoAskAgainAreNotRefusedWhateverTheCostWasThoughtToBe) {
  int judged = 0;
  for (const Machine& m : kMachines)
    for (double max_step_ms : {40.0, 0.0})
      for (int clients : {m.max_running / 4, m.max_running, 2 * m.max_running})
        for (int before : {0, 1, 40})
          for (double off : {0.25, 1.0, 2.0, 4.0}) {
            const Settings o = server(m, off, max_step_ms);
            const SimWorkload w = closed_loop(m, clients, before);
            if (!bound_holds(o, w, m, before)) continue;
            ++judged;
            const SimReport r = run(o, w, m);
            EXPECT_EQ(r.refused, 0) << m.name << ", cost thought " << off << " times what it is, steps of "
                                    << max_step_ms << " ms, " << clients << " clients after " << before
                                    << " others; of " << r.requests << ", longest wait " << r.longest_wait_s;
          }
  std::printf("%d closed loops whose waits are within the bound\n", judged);
  EXPECT_GE(judged, 80);
}

enum class Clients { patient, leave, deadlines };
constexpr const char* kNames[] = {"patient", "leave", "deadlines"};

// An open loop from the first second on. `patience`: in seconds, of deadlines and of clients that leave.
SimWorkload open_loop(const Machine& m, double rate, Clients clients, double patience) {
  SimWorkload w;
  std::mt19937 rng(3);
  std::exponential_distribution<double> gap(rate);
  for (double t = gap(rng); t < 60; t += gap(rng)) {
    WorkItem item;
    item.arrival_s = t;
    item.prompt_tokens = m.prompt, item.output_tokens = m.output;
    if (clients == Clients::deadlines) item.deadline_s = patience;
    if (clients == Clients::leave) item.cancel_at_s = patience;
    w.items.push_back(item);
  }
  return w;
}

// On-time tokens a second, against those of clients who ask again when answered.
void expect_useful(const Machine& m, double patience, int policies) {
  constexpr const char* kPolicies[] = {"fcfs", "fair", "deadline"};
  const SimReport best = run(server(m, 1, 40), closed_loop(m, m.max_running * 3 / 2, 0, 60), m);
  const double rate = best.output_tokens_per_s / static_cast<double>(m.output);
  double worst = 10;
  for (double off : {0.25, 1.0, 2.0, 4.0})
    for (int policy = 0; policy < policies; ++policy)
      for (Clients clients : {Clients::patient, Clients::leave, Clients::deadlines})
        for (double load : {2.0, 5.0, 10.0}) {
          Settings o = server(m, off, 40);
          o.policy = kPolicies[policy];
          const SimReport r = run(o, open_loop(m, load * rate, clients, patience), m);
          const double part = static_cast<double>(r.on_time_tokens) / r.simulated_s / best.output_tokens_per_s;
          worst = std::min(worst, part);
          EXPECT_GE(part, 0.95) << m.name << ", " << o.policy << ", cost thought " << off << " times what it is, "
                                << load << " times the load, " << kNames[static_cast<int>(clients)];
        }
  std::printf("%s: %.1f requests a second at best, at least %.3f of it under overload\n", m.name, rate, worst);
}

TEST(ColdStart, WhatIsDoneUnderOverloadIsOfUseWhateverTheCostWasThoughtToBe) {
  expect_useful({"slots", {20000, 20, 0, 20, 0}, 16, 512, 0.5, 20, 34}, 6, 3);
}

TEST(ColdStart, SoItIsOnTwoCores) {
  Machine m = kMachines[1];
  m.max_running = 16;
  expect_useful(m, 12, 1);
}

TEST(ColdStart, SoItIsOnAGpu) {
  Machine m = kMachines[0];
  m.max_running = 64, m.prompt = 200, m.output = 60;
  expect_useful(m, 8, 1);
}

}  // namespace
}  // namespace kvasir::scheduler
