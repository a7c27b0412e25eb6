// max_step_ms: prompts beside decodes are cut so that nobody waits longer for the next token, on machines of any speed,
// and go on all the same.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "scheduler/learned_cost.h"
#include "scheduler/simulate.h"
#include "tests/scheduler/world.h"

namespace kvasir::scheduler {
namespace {

Settings bounded(double ms) {
  Settings o = small();
  o.groups = {{512, 0}};
  o.max_context = 1000;
  o.max_tokens_per_step = 512;
  o.max_step_ms = ms;
  return o;
}

int64_t prompt_tokens(const StepPlan& plan) {
  int64_t n = 0;
  for (const PlanItem& i : plan.items) n += i.phase == Phase::prefill ? i.count : 0;
  return n;
}

// Steps of a machine with costs of its own, each a little off: from 100 us to 20 ms a step, a token from 5 us to 1 ms.
struct Machine {
  std::mt19937_64 rng;
  StepCost cost;
  explicit Machine(uint64_t seed) : rng(seed) {
    auto between = [this](double low, double high) {
      return low * std::pow(high / low, std::uniform_real_distribution<double>(0, 1)(rng));
    };
    cost.fixed_us = between(100, 20000);
    cost.token_us = between(5, 1000);
    cost.context_us = between(0.0001, 0.1);
    cost.decode_token_us = between(5, 1000);
    cost.decode_context_us = between(0.001, 1);
  }
  double run(const StepPlan& plan) {
    return step_seconds(work_of(plan), cost) * std::uniform_real_distribution<double>(0.9, 1.1)(rng);
  }
};

TEST(StepBound, IsKeptOnMachinesThatNobodyKnew) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Machine machine(seed);
    Settings o = bounded(40);
    o.page_size = 16;
    o.max_running = 32;
    o.max_context = 4096;
    o.groups = {{8192, 0}};
    auto scheduler = std::move(Scheduler::create(o)).value();
    Time now{};
    StepPlan plan;
    RequestId next = 0;
    int64_t late = 0, cut = 0, wasted = 0, measured = 0;
    const int32_t token = 1;
    for (int step = 0; step < 1500; ++step) {
      if (step % 40 == 0) {
        Submission s;
        s.id = next++;
        s.prompt = prompt_of(int(20 + machine.rng() % 1500), int(machine.rng() % 1000000));
        s.max_new = int64_t(20 + machine.rng() % 200);
        ASSERT_TRUE(scheduler->submit(std::move(s), now).ok());
      }
      const int64_t cut_before = scheduler->stats().steps_cut;
      scheduler->next_step(now, plan);
      if (plan.empty()) continue;
      const bool was_cut = scheduler->stats().steps_cut > cut_before;
      StepTime decodes;
      for (const PlanItem& i : plan.items)
        if (i.phase == Phase::decode) add_work(decodes, i.phase, i.begin, i.count);
      const double took = machine.run(plan);
      const double bound = std::max(1e-3 * o.max_step_ms, 2 * step_seconds(decodes, machine.cost));
      if (step >= 200 && plan.decoding_batches > 0 && prompt_tokens(plan) > 0) {
        ++measured;
        late += took > 1.3 * bound && prompt_tokens(plan) > o.page_size;
        cut += was_cut;
        // What was kept out would have had no place: but for a page, which is all or nothing.
        StepTime with_a_page = work_of(plan);
        with_a_page.prefill_tokens += o.page_size;
        wasted += was_cut && step_seconds(with_a_page, machine.cost) < 0.6 * bound;
      }
      now += std::chrono::duration_cast<Duration>(std::chrono::duration<double>(took));
      std::vector<SeqResult> results;
      for (const PlanItem& i : plan.items)
        if (i.samples) results.push_back({.seq = i.seq, .tokens = {&token, 1}});
      scheduler->advance(results, now);
    }
    EXPECT_LE(late, measured / 50) << "seed " << seed << ", of " << measured;
    EXPECT_LE(wasted, cut / 20) << "seed " << seed << ", of " << cut;
  }
}

TEST(StepBound, APromptGoesOnByAPageHoweverShortTheTime) {
  World w(bounded(1));
  w.by_work = true;
  w.options.cost.token_us = w.options.cost.decode_token_us = 1000;  // what steps of this world take
  SeqId a = w.submit(1, prompt_of(5), 60);
  w.launch();
  w.retire();
  SeqId b = w.submit(2, prompt_of(101, 50), 3), c = w.submit(3, prompt_of(9, 300), 3);
  int steps = 0;
  for (int64_t left = 101; left > 0; ++steps) {
    ASSERT_TRUE(w.launch());
    EXPECT_EQ(w.plan.decoding_batches, 1);  // decodes are never cut
    EXPECT_GE(prompt_tokens(w.plan), std::min<int64_t>(4, left));
    EXPECT_EQ(w.plan.items[1].seq, b);  // in the policy's order, one after another
    left -= w.plan.items[1].count;
    w.retire();
  }
  EXPECT_LE(steps, 26);
  EXPECT_GE(steps, 15);
  w.run();
  w.expect_output(1, a, 0, 60);
  w.expect_output(2, b, 0, 3);
  w.expect_output(3, c, 0, 3);
  w.expect_all_back();
}

// Where decodes alone take longer than the bound, cutting prompts to pieces would help nobody.
TEST(StepBound, PromptsMayTakeAsLongAsTheDecodesBesideThem) {
  Settings o = bounded(10);
  o.cost = {.fixed_us = 40000, .token_us = 1000, .context_us = 0, .decode_token_us = 1000, .decode_context_us = 0};
  World w(o);
  w.by_work = true;
  w.submit(1, prompt_of(8), 50);
  w.launch();
  w.retire();
  w.submit(2, prompt_of(200, 400), 5);
  ASSERT_TRUE(w.launch());
  EXPECT_EQ(prompt_tokens(w.plan), 40);  // 41 ms
  w.retire();
  w.run();
  w.expect_all_back();
}

TEST(StepBound, HoldsOnlyWhileSomebodyDecodes) {
  World w(bounded(1));
  w.submit(1, prompt_of(300), 5);
  w.submit(2, prompt_of(200, 400), 5);
  ASSERT_TRUE(w.launch());
  EXPECT_EQ(prompt_tokens(w.plan), 500);
  EXPECT_EQ(w.scheduler->stats().steps_cut, 0);
  w.retire();
  w.submit(3, prompt_of(300, 700), 5);
  ASSERT_TRUE(w.launch());
  EXPECT_LT(prompt_tokens(w.plan), 100);
  EXPECT_EQ(w.scheduler->stats().steps_cut, 1);
  w.retire();
  w.run();
  w.expect_all_back();
}

TEST(StepBound, APausedReaderIsNobodyWhoWaits) {
  World w(bounded(1));
  w.submit(1, prompt_of(30), 50);
  w.launch();
  w.retire();
  ASSERT_TRUE(w.scheduler->pause(1).ok());
  w.submit(2, prompt_of(200, 400), 5);
  ASSERT_TRUE(w.launch());
  EXPECT_EQ(prompt_tokens(w.plan), 200);
  w.retire();
  ASSERT_TRUE(w.scheduler->resume(1).ok());
  w.run();
  w.expect_all_back();
}

TEST(StepBound, VerificationsTakeOfTheTime) {
  int64_t with[2] = {};
  for (bool drafted : {false, true}) {
    Settings o = bounded(10);
    o.cost = {.fixed_us = 1000, .token_us = 200, .context_us = 0, .decode_token_us = 200, .decode_context_us = 0};
    World w(o);
    w.by_work = true;
    SeqId a = w.submit(1, prompt_of(8), 50);
    w.launch();
    w.retire();
    if (drafted) {
      ASSERT_TRUE(w.scheduler->propose(a, {1, 2, 3, 4, 5, 6, 7, 8}).ok());
    }
    w.submit(2, prompt_of(200, 400), 5);
    ASSERT_TRUE(w.launch());
    with[drafted] = prompt_tokens(w.plan);
    EXPECT_LE(step_seconds(work_of(w.plan), w.scheduler->cost()), 0.010);
    w.retire();
    w.run();
    w.expect_all_back();
  }
  EXPECT_GE(with[0], 20);
  EXPECT_LE(with[1], with[0] - 8);
  EXPECT_GE(with[1], 12);
}

TEST(StepBound, IsSeenInASimulation) {
  SimWorkload w;
  for (int i = 0; i < 60; ++i) {
    WorkItem item;
    item.arrival_s = 0.4 * i;
    item.prompt_tokens = 1000;
    item.output_tokens = 100;
    w.items.push_back(item);
  }
  Settings o;
  o.groups = {{16384, 0}};
  o.cost = {.fixed_us = 2000, .token_us = 200, .context_us = 0.001, .decode_token_us = 300, .decode_context_us = 0.1};
  auto without = simulate(o, w);
  o.max_step_ms = 40;
  auto with = simulate(o, w);
  ASSERT_TRUE(with.ok() && without.ok());
  EXPECT_GT(without->itl_s.p99, 0.1);
  EXPECT_LE(with->itl_s.p99, 0.0401);
  EXPECT_EQ(without->steps_cut, 0);
  EXPECT_GT(with->steps_cut, 100);
  EXPECT_EQ(with->finished, 60);
  EXPECT_LT(with->simulated_s, 1.05 * without->simulated_s);
}

TEST(LearnedCost, OneHiccupIsSoonForgotten) {
  StepCost first;
  LearnedCost learned(first);
  StepTime step;
  step.decodes = 4;
  step.decode_context = 400;
  step.prefill_tokens = 64;
  step.prefill_context = 2048;
  for (int i = 0; i < 20; ++i) {
    step.seconds = 0.050;
    learned.learn(step);
  }
  EXPECT_NEAR(step_seconds(step, learned.cost()), 0.050, 0.002);
  step.seconds = 5;
  learned.learn(step);
  EXPECT_LT(step_seconds(step, learned.cost()), 0.075);
  for (int i = 0; i < 20; ++i) {
    step.seconds = 0.050;
    learned.learn(step);
  }
  EXPECT_NEAR(step_seconds(step, learned.cost()), 0.050, 0.003);
}

TEST(LearnedCost, NothingIsLearnedFromNothing) {
  LearnedCost learned({.fixed_us = 0, .token_us = 0, .context_us = 0, .decode_token_us = 0});
  for (double seconds : {0.0, -1.0, 0.001}) {
    StepTime step;
    step.seconds = seconds;
    learned.learn(step);
    EXPECT_TRUE(std::isfinite(learned.cost().fixed_us));
    EXPECT_GT(learned.cost().token_us, 0);
  }
}

}  // namespace
}  // namespace kvasir::scheduler
