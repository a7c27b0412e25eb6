// Under more load than the machine can carry, what it does is still of use: with deadlines, with clients that leave,
// with patient ones, at twice, five and ten times what it can do. And nobody fills the queue for everybody.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "core/check.h"
#include "scheduler/simulate.h"
#include "tests/scheduler/desk.h"

namespace kvasir::scheduler {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr double kPatience = 6;  // seconds, of deadlines and of clients that leave

// What `kvasir serve` bounds by default (engine/engine.h).
Settings machine() {
  Settings o;
  o.groups = {{16384, 0}};
  o.max_context = 4096;
  o.max_running = 16;
  o.max_tokens_per_step = 512;
  o.max_step_ms = 40;
  o.max_wait_s = 4;
  o.max_wait_answers = 3;
  o.tenant_queue_share = 1;
  o.cost = {.fixed_us = 20000, .token_us = 20, .context_us = 0, .decode_token_us = 20, .decode_context_us = 0};
  return o;
}

struct Kind {
  int64_t prompt, output;
  double spread;  // lengths are drawn from 1 - spread to 1 + spread times these
};

SimWorkload arrivals(double time, double rate, const Kind& kind, int seed) {
  SimWorkload w;
  std::mt19937 rng(seed);
  std::exponential_distribution<double> gap(rate);
  std::uniform_real_distribution<double> size(1 - kind.spread, 1 + kind.spread);
  for (double t = gap(rng); t < time; t += gap(rng)) {
    WorkItem item;
    item.arrival_s = t;
    item.prompt_tokens = std::max<int64_t>(1, static_cast<int64_t>(size(rng) * static_cast<double>(kind.prompt)));
    item.output_tokens = std::max<int64_t>(1, static_cast<int64_t>(size(rng) * static_cast<double>(kind.output)));
    w.items.push_back(item);
  }
  return w;
}

SimReport run(const Settings& o, const SimWorkload& w, const StepCost* machine = nullptr) {
  auto r = simulate(o, w, machine);
  KVASIR_CHECK(r.ok(), r.status().to_string());
  return std::move(r).value();
}

// What a queue that is never empty gives, in tokens and requests a second.
double capacity(Settings o, const Kind& kind) {
  o.max_wait_s = o.max_wait_answers = 0;
  o.max_waiting = 1 << 20;
  o.max_waiting_tokens = int64_t(1) << 40;
  SimWorkload full = arrivals(40, 100, kind, 1);
  for (WorkItem& item : full.items) item.arrival_s = 0;
  const SimReport r = run(o, full);
  return static_cast<double>(r.finished) / r.simulated_s;
}

enum class Clients { patient, leave, deadlines };
constexpr const char* kNames[] = {"patient", "leave", "deadlines"};

// On-time answers a second from a cold start, against what the machine can do.
double useful(const Settings& o, const Kind& kind, double rate, double times, Clients clients, double time = 60) {
  SimWorkload w = arrivals(time, rate * times, kind, 2);
  for (WorkItem& item : w.items) {
    if (clients == Clients::deadlines) item.deadline_s = kPatience;
    if (clients == Clients::leave) item.cancel_at_s = kPatience;
  }
  const SimReport r = run(o, w);
  int64_t tokens = 0;
  for (const WorkItem& item : w.items) tokens += item.output_tokens;
  const double each = static_cast<double>(tokens) / static_cast<double>(w.items.size());
  return static_cast<double>(r.on_time_tokens) / each / r.simulated_s / rate;
}

// Of equal lengths; of all lengths; where prompts are what takes the time.
constexpr Kind kKinds[] = {{20, 34, 0}, {50, 30, 0.9}, {1500, 4, 0.3}};

TEST(Overload, WhatIsDoneIsOfUseAtAnyLoad) {
  for (const Kind& kind : kKinds) {
    const double rate = capacity(machine(), kind);
    for (const char* policy : {"fcfs", "fair", "deadline"})
      for (Clients clients : {Clients::patient, Clients::leave, Clients::deadlines}) {
        std::printf("%4lld+%-3lld %-9s %-10s %5.1f/s:", (long long)kind.prompt, (long long)kind.output, policy,
                    kNames[static_cast<int>(clients)], rate);
        for (double times : {1.0, 2.0, 5.0, 10.0}) {
          Settings o = machine();
          o.policy = policy;
          const double part = useful(o, kind, rate, times, clients);
          std::printf("  %4.0f x %.3f", times, part);
          if (times > 1) {
            EXPECT_GE(part, 0.95) << policy << ", " << kNames[static_cast<int>(clients)] << ", " << times;
          }
        }
        std::printf("\n");
      }
  }
}

// Clients who each ask again when answered are no overload, whatever the machine was thought to be before its first
// step: an H200 with 8 billion parameters, and two cores with 135 million, at what `kvasir serve` has by itself there.
TEST(Overload, ClientsWhoAskAgainAreNotRefused) {
  const StepCost h200 = {4890, 22.9, 0.0007, 14.9, 0.0312}, cores = {1481, 545, 0.019, 795, 2.5};
  for (auto [cost, clients, prompt, output] : {std::tuple(&h200, 64, 1000, 250),
                                               {&h200, 256, 1000, 250},
                                               {&h200, 256, 1500, 250},
                                               {&h200, 400, 1000, 300},
                                               {&cores, 8, 300, 100},
                                               {&cores, 32, 300, 100}}) {
    Settings o = machine();
    o.cost = {};
    o.groups = {{1 << 16, 0}};
    o.max_running = cost == &h200 ? 256 : 64;
    o.max_tokens_per_step = cost == &h200 ? 4096 : 512;
    SimWorkload w;
    for (int i = 0; i < 4 * clients; ++i) {
      WorkItem item;
      item.prompt_tokens = prompt, item.output_tokens = output;
      if (i >= clients) item.follows = i - clients;
      if (i < clients) item.arrival_s = static_cast<double>(i) / clients;  // while the first are under way already
      w.items.push_back(item);
    }
    const SimReport r = run(o, w, cost);
    std::printf("%3d clients: %lld of %zu refused, %.0f tokens/s, first token %.2f s, between tokens %.1f ms (p99)\n",
                clients, (long long)r.refused, w.items.size(), r.output_tokens_per_s, r.ttft_s.p99, 1e3 * r.itl_s.p99);
    EXPECT_EQ(r.refused, 0);
  }
}

// What the bounds are for: with a queue that only its length ends, all that is done is late.
TEST(Overload, WithoutABoundOnTimeMostOfItIsOfNoUse) {
  Settings o = machine();
  const double rate = capacity(o, kKinds[0]);
  o.max_wait_s = o.max_wait_answers = 0;
  EXPECT_LT(useful(o, kKinds[0], rate, 5, Clients::leave), 0.5);
}

// What an answer takes is known from one on.
void warm_up(Desk& desk) {
  Submission s;
  s.id = 1 << 30;
  s.prompt = {1, 2, 3};
  s.max_new = 50;
  KVASIR_CHECK(desk.scheduler->submit(s, desk.now).ok(), "");
  while (!desk.scheduler->idle()) desk.step();
}

// A machine of four slots whose every answer takes half a second, filled by one tenant that always asks for more.
class OneTenantsFlood : public ::testing::Test {
 protected:
  explicit OneTenantsFlood(const std::string& policy = "fcfs") : desk_(four_slots(policy)) {
    warm_up(desk_);
    while (desk_.now < Time{} + seconds(10)) {
      flood();
      desk_.step();
    }
    flood();
  }
  static Settings four_slots(const std::string& policy) {
    Settings o = machine();
    o.policy = policy;
    o.max_running = 4;
    return o;
  }
  Status ask(const std::string& tenant, std::optional<Duration> deadline = std::nullopt, int32_t priority = 0) {
    Submission s;
    s.id = ++id_;
    s.tenant = tenant;
    s.prompt = {1, 2, 3, static_cast<int32_t>(id_)};
    s.max_new = 50;
    s.priority = priority;
    if (deadline) s.deadline = desk_.now + *deadline;
    return desk_.scheduler->submit(std::move(s), desk_.now).status();
  }
  // Until it is refused; how many came in.
  int flood(const std::string& tenant = "loud") {
    int in = 0;
    while ((last_ = ask(tenant)).ok()) ++in;
    return in;
  }

  Desk desk_;
  RequestId id_ = 0;
  Status last_;
};

TEST_F(OneTenantsFlood, LeavesRoomInTheQueueForOthers) {
  EXPECT_EQ(last_.code(), Code::resource_exhausted);
  EXPECT_THAT(last_.message(), HasSubstr("are yours while others may come"));
  ASSERT_TRUE(last_.retry_after().has_value());
  EXPECT_GT(last_.retry_after()->count(), 0);
  const Stats s = desk_.scheduler->brief_stats();
  EXPECT_NEAR(s.expected_wait_s, 0.5 * s.wait_bound_s, 0.3);  // alone it has half
  EXPECT_EQ(s.wait_bound_s, 4);
  EXPECT_GE(flood("second"), 6);  // half of the rest: a second's worth of eight answers a second
  EXPECT_GE(flood("third"), 3);
}

TEST_F(OneTenantsFlood, WithoutANameHasTheWholeQueue) {
  Desk desk(four_slots("fcfs"));
  warm_up(desk);
  for (; desk.now < Time{} + seconds(10); desk.step())
    for (;;) {
      Submission s;
      s.id = ++id_;
      s.prompt = {1, 2, 3};
      s.max_new = 50;
      last_ = desk.scheduler->submit(std::move(s), desk.now).status();
      if (!last_.ok()) break;
    }
  EXPECT_THAT(last_.message(), HasSubstr("at most 4 s may be"));
  const Stats s = desk.scheduler->brief_stats();
  EXPECT_NEAR(s.expected_wait_s, s.wait_bound_s, 0.3);
}

// Every tenant's wait is its own there: a flood costs the others nothing of the bound.
TEST(Overload, UnderFairAFloodDoesNotShortenTheQueueOfOthers) {
  Settings o = machine();
  o.policy = "fair";
  o.max_running = 4;
  Desk desk(o);
  warm_up(desk);
  RequestId id = 0;
  const auto ask = [&](const std::string& tenant) {
    Submission s;
    s.id = ++id;
    s.tenant = tenant;
    s.prompt = {1, 2, 3};
    s.max_new = 50;
    return desk.scheduler->submit(std::move(s), desk.now).status();
  };
  for (; desk.now < Time{} + seconds(10); desk.step())
    while (ask("loud").ok()) {
    }
  int in = 0;
  while (ask("quiet").ok()) ++in;
  EXPECT_GE(in, 6);  // half of 4 s, at half of eight answers a second
}

TEST_F(OneTenantsFlood, ADeadlineThatTheQueueCannotKeepIsRefusedAtOnce) {
  const Status late = ask("other", seconds(1));
  EXPECT_EQ(late.code(), Code::deadline_exceeded);
  EXPECT_EQ(late.field(), "deadline");
  EXPECT_THAT(late.message(), HasSubstr("s of waiting"));
  EXPECT_TRUE(ask("other", seconds(20)).ok());
}

// Its own bounds are those of the answers: where one takes long, a longer wait is worth it.
TEST(Overload, TheBoundGrowsWithTheTimeThatAnAnswerTakes) {
  Settings o = machine();
  o.max_running = 4;
  Desk desk(o, std::chrono::milliseconds(100));
  warm_up(desk);
  RequestId id = 0;
  for (; desk.now < Time{} + seconds(40); desk.step())
    for (;;) {
      Submission s;
      s.id = ++id;
      s.prompt = {1, 2, 3};
      s.max_new = 50;  // 5 s
      if (!desk.scheduler->submit(std::move(s), desk.now).ok()) break;
    }
  EXPECT_NEAR(desk.scheduler->brief_stats().wait_bound_s, 15, 1);
}

TEST_F(OneTenantsFlood, AHigherPriorityWaitsForItsOwnOnly) {
  Desk desk(four_slots("priority"));
  warm_up(desk);
  Submission s;
  s.prompt = {1, 2, 3};
  s.max_new = 50;
  for (; desk.now < Time{} + seconds(10); desk.step()) do {
      s.id = ++id_;
    } while (desk.scheduler->submit(s, desk.now).ok());
  s.id = ++id_;
  EXPECT_FALSE(desk.scheduler->submit(s, desk.now).ok());
  s.id = ++id_;
  s.priority = 5;
  EXPECT_TRUE(desk.scheduler->submit(s, desk.now).ok());
}

// A cost: of a wait that a plan's pages bound, not its slots.
TEST(Overload, WhereThePagesDoNotGoRoundTheSlotsThatDoAreCounted) {
  Settings o = machine();
  o.groups = {{16, 0}};  // of 16 tokens: four answers of 54
  o.max_context = 128;
  Desk desk(o);
  warm_up(desk);
  RequestId id = 0;
  Submission s;
  s.prompt = {1, 2, 3, 4};
  s.max_new = 50;
  for (; desk.now < Time{} + seconds(10); desk.step()) do {
      s.id = ++id;
    } while (desk.scheduler->submit(s, desk.now).ok());
  // At half a second each and some four at once, 4 s are some 32.
  int64_t queued = 0;
  for (RequestId live : desk.scheduler->live_requests()) queued += live > 0;
  EXPECT_LE(queued, 50);
  EXPECT_GE(queued, 16);
}

}  // namespace
}  // namespace kvasir::scheduler
