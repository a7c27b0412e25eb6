// What each policy promises to those it does not favour, under more load than the machine can carry: bounds that hold
// for every request, not on average. And who gives up pages to whom.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "scheduler/policy.h"
#include "tests/scheduler/desk.h"
#include "tests/scheduler/world.h"

namespace kvasir::scheduler {
namespace {

using ::testing::HasSubstr;

Settings crowded(const std::string& policy) {
  Settings o;
  o.policy = policy;
  o.groups = {{256, 0}};
  o.max_context = 512;
  o.max_running = 4;
  o.max_tokens_per_step = 64;
  o.max_waiting = 1 << 20;
  o.max_waiting_tokens = 1 << 30;
  o.patience = seconds(2);
  return o;
}

std::vector<int32_t> fresh_prompt(RequestId id, int n) { return prompt_of(n, static_cast<int>(id) * 100); }

struct Guest {
  Time arrival;
  bool favoured = false, admitted = false;
};

// For twenty seconds more come than go, most of them such as the policy likes; then the queue empties. Nobody may be
// admitted while somebody waits who came more than `bound` before. Returns how often a later one went first.
int64_t overtakings(const std::string& policy, Duration bound, bool* all_came_in) {
  Desk desk(crowded(policy));
  std::mt19937 rng(4);
  std::vector<Guest> guests;
  int64_t overtaken = 0;
  size_t in = 0;
  while (desk.now < Time{} + seconds(20) || !desk.scheduler->idle()) {
    for (int k = 0; k < 2 && desk.now < Time{} + seconds(20); ++k) {
      if (rng() % 3 == 0) continue;
      const RequestId id = guests.size();
      Guest g{desk.now, rng() % 20 != 0};
      Submission s;
      s.id = id;
      s.prompt = g.favoured ? prompt_of(40) : fresh_prompt(id + 1, 40);  // lpm: cached, or never heard of
      s.max_new = 6 + static_cast<int64_t>(rng() % 8);
      s.priority = g.favoured ? 3 : 0;
      guests.push_back(g);
      EXPECT_TRUE(desk.scheduler->submit(std::move(s), desk.now).ok());
    }
    desk.step();
    for (const Notice& e : desk.events) {
      if (e.kind != Notice::Kind::admitted) continue;
      Guest& g = guests[e.request];
      g.admitted = true;
      ++in;
      for (size_t other = 0; other < e.request; ++other) {
        if (guests[other].admitted) continue;
        ++overtaken;
        EXPECT_LE(g.arrival - guests[other].arrival, bound) << policy << ": " << e.request << " before " << other;
      }
    }
  }
  *all_came_in = in == guests.size() && guests.size() > 2000;
  return overtaken;
}

TEST(Starvation, NobodyWaitsForOneWhoCameMuchLater) {
  bool all = false;
  EXPECT_EQ(overtakings("fcfs", Duration::zero(), &all), 0);
  EXPECT_TRUE(all);
  EXPECT_GT(overtakings("lpm", seconds(2), &all), 100);  // a whole cached prompt is worth `patience`
  EXPECT_TRUE(all);
  EXPECT_GT(overtakings("priority", 3 * seconds(2), &all), 100);  // as is each level of priority
  EXPECT_TRUE(all);
  EXPECT_EQ(overtakings("deadline", Duration::zero(), &all), 0);  // without deadlines, as they come
  EXPECT_TRUE(all);
  EXPECT_EQ(overtakings("fair", Duration::zero(), &all), 0);  // nor within one tenant
  EXPECT_TRUE(all);
}

// Those with a deadline go before those without, but for no longer than `patience`.
TEST(Starvation, ADeadlineIsNoWayPastEverybody) {
  Desk desk(crowded("deadline"));
  std::vector<Time> arrival;
  Time last{};
  int64_t patient = 0;
  for (RequestId id = 0; desk.now < Time{} + seconds(20) || !desk.scheduler->idle(); ++id) {
    if (desk.now < Time{} + seconds(20)) {
      Submission s;
      s.id = id;
      s.prompt = fresh_prompt(id, 40);
      s.max_new = 8;
      if (id % 10 != 0) s.deadline = desk.now + milliseconds(600);
      arrival.push_back(desk.now);
      (void)desk.scheduler->submit(std::move(s), desk.now);  // many cannot make it and are refused
    }
    desk.step();
    for (const Notice& e : desk.events) {
      if (e.kind != Notice::Kind::admitted || e.request % 10 != 0) continue;
      ++patient;
      last = std::max(last, Time{} + (desk.now - arrival[e.request]));
    }
  }
  EXPECT_EQ(patient, 200);
  // Its place comes when it is due after `patience`; then at most what runs, and those due before it.
  EXPECT_LE(last, Time{} + seconds(2) + milliseconds(600));
}

// Both always want more: what is computed for "heavy" against "light", whose weights the options or their requests say.
double heavy_against_light(const std::map<std::string, double>& by_options,
                           const std::map<std::string, double>& by_requests) {
  Settings o = crowded("fair");
  o.max_running = 8;
  o.tenant_weights = by_options;
  Desk desk(o);
  std::map<std::string, double> computed;
  std::map<RequestId, std::pair<std::string, int64_t>> live;
  RequestId id = 0;
  const auto keep_asking = [&](const std::string& tenant, int prompt, int output) {
    int64_t waiting = 0;
    for (const auto& [r, l] : live) waiting += l.first == tenant;
    for (; waiting < 12; ++waiting) {
      Submission s;
      s.id = ++id;
      s.tenant = tenant;
      s.prompt = fresh_prompt(id, prompt);
      s.max_new = output;
      if (auto said = by_requests.find(tenant); said != by_requests.end()) s.weight = said->second;
      live[id] = {tenant, prompt + output};
      EXPECT_TRUE(desk.scheduler->submit(std::move(s), desk.now).ok());
    }
  };
  for (int step = 0; step < 12000; ++step) {
    keep_asking("light", 90, 30);
    keep_asking("heavy", 20, 10);
    desk.step();
    for (const Notice& e : desk.events) {
      if (e.kind == Notice::Kind::finished && step > 1000)
        computed[live[e.request].first] += double(live[e.request].second);
      if (e.kind == Notice::Kind::released) live.erase(e.request);
    }
  }
  return computed["heavy"] / computed["light"];
}

// Each gets its weight's share of what is computed, whatever the size of what it asks.
TEST(FairShare, WeightsAreKeptBetweenTenantsThatAlwaysWantMore) {
  const double times = heavy_against_light({{"light", 1}, {"heavy", 3}}, {});
  std::printf("tokens of heavy (weight 3) against light (weight 1): %.3f times\n", times);
  EXPECT_NEAR(times, 3.0, 0.3);
}

// A key's weight comes with its requests, and what the options say wins.
TEST(FairShare, ARequestSaysTheWeightOfATenantThatTheOptionsDoNotName) {
  EXPECT_NEAR(heavy_against_light({{"light", 1}}, {{"light", 50}, {"heavy", 3}}), 3.0, 0.3);
}

TEST(Deadlines, ARequestThatCannotMakeItsOwnIsRefusedAtOnce) {
  Settings o = crowded("deadline");
  Desk desk(o);
  const auto ask = [&](RequestId id, Duration left) {
    Submission s;
    s.id = id;
    s.prompt = fresh_prompt(id, 20);
    s.max_new = 50;  // half a second of steps
    s.deadline = desk.now + left;
    return desk.scheduler->submit(std::move(s), desk.now).status();
  };
  EXPECT_TRUE(ask(1, seconds(60)).ok());
  while (!desk.scheduler->idle()) desk.step();  // what a step takes is known from here on
  const Status refused = ask(2, milliseconds(100));
  EXPECT_EQ(refused.code(), Code::deadline_exceeded);
  EXPECT_EQ(refused.field(), "deadline");
  EXPECT_THAT(refused.message(), HasSubstr("s of work are expected"));
  EXPECT_TRUE(ask(3, seconds(2)).ok());
  int64_t accepted = 1;
  for (RequestId id = 4; id < 100; ++id) accepted += ask(id, seconds(2)).ok();
  EXPECT_LT(accepted, 30) << "no more are let in than can be through in time";
  int64_t finished = 0;
  while (!desk.scheduler->idle()) {
    desk.step();
    for (const Notice& e : desk.events) finished += e.kind == Notice::Kind::finished;
  }
  EXPECT_GE(10 * finished, 8 * accepted);  // what is let in is an estimate, and nearly all of it is right
}

TEST(Preemption, TheNewestAndTheLeastInPriorityLoseTheirPagesFirst) {
  for (const char* policy : {"fcfs", "priority"}) {
    Settings o = small();
    o.policy = policy;
    o.groups = {{14, 0}};
    o.max_context = 50;
    o.lookahead_tokens = 0;
    World w(o);
    const int32_t priorities[] = {2, 0, 1};
    for (RequestId r = 0; r < 3; ++r) {
      Submission s = w.make(r, prompt_of(10, 100 * static_cast<int>(r)), 30);
      s.priority = priorities[r];
      w.submit(s);
    }
    w.run();
    std::vector<RequestId> lost;
    for (const Notice& e : w.events)
      if (e.kind == Notice::Kind::preempted) lost.push_back(e.request);
    ASSERT_FALSE(lost.empty());
    EXPECT_EQ(lost[0], policy == std::string("fcfs") ? 2u : 1u) << policy;
    EXPECT_THAT(lost, ::testing::Not(::testing::Contains(0u))) << "the first and the highest keeps its own";
    w.expect_all_back();
  }
}

TEST(Preemption, PagesAreMovedOrComputedAgainWhicheverIsCheaper) {
  for (bool cheap_moves : {true, false}) {
    Settings o = small();
    o.groups = {{14, 0}};
    o.max_context = 50;
    o.host_pages = 40;
    o.lookahead_tokens = 0;
    o.cost.page_move_us = cheap_moves ? 1 : 1e6;
    World w(o);
    for (int r = 0; r < 4; ++r) w.submit(r, prompt_of(10, 100 * r), 30);
    w.run();
    const Stats s = w.scheduler->stats();
    EXPECT_GT(s.preemptions, 0);
    EXPECT_EQ(s.swaps, cheap_moves ? s.preemptions : 0);
    EXPECT_EQ(s.recomputed_tokens > 0, !cheap_moves);
    w.expect_all_back();
  }
}

TEST(Preemption, WhatIsCheaperIsJudgedByWhatStepsWereSeenToTake) {
  for (bool learns : {true, false}) {
    Settings o = small();
    o.groups = {{14, 0}};
    o.max_context = 50;
    o.host_pages = 40;
    o.lookahead_tokens = 0;
    o.max_step_ms = learns ? 60000 : 0;
    o.cost = {.fixed_us = 1, .token_us = 10, .context_us = 0, .decode_token_us = 10, .page_move_us = 100};
    World w(o);
    w.by_work = true;
    // The device is far slower than it was said to be.
    w.options.cost.token_us = w.options.cost.decode_token_us = 5000;
    for (int r = 0; r < 8; ++r) w.submit(r, prompt_of(10, 100 * r), 30);
    w.run();
    const Stats s = w.scheduler->stats();
    EXPECT_GT(s.preemptions, 0);
    EXPECT_EQ(s.swaps > 0, learns);
    w.expect_all_back();
  }
}

}  // namespace
}  // namespace kvasir::scheduler
