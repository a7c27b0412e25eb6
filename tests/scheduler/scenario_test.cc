// Who runs, in which order, and how it ends: every page is back each time, on a device that checks what it reads.
#include <gtest/gtest.h>

#include "tests/scheduler/world.h"

namespace kvasir::scheduler {
namespace {

TEST(Scenario, OneRequestIsChunkedByWholePagesAndDecoded) {
  World w(small());
  SeqId s = w.submit(1, prompt_of(37), 5);
  ASSERT_TRUE(w.launch());
  EXPECT_EQ(w.plan.items[0].count, 24);
  EXPECT_FALSE(w.plan.items[0].samples);
  w.retire();
  ASSERT_TRUE(w.launch());
  EXPECT_EQ(w.plan.items[0].count, 13);
  EXPECT_TRUE(w.plan.items[0].samples);
  EXPECT_EQ(w.plan.items[0].pages.size(), 10u);
  w.run();
  w.expect_output(1, s, 0, 5);
  w.expect_all_back();
}

TEST(Scenario, DecodesComeFirst) {
  World w(small());
  SeqId a = w.submit(1, prompt_of(5), 20);
  w.launch();
  w.retire();
  SeqId b = w.submit(2, prompt_of(30, 50), 3);
  ASSERT_TRUE(w.launch());
  ASSERT_EQ(w.plan.items.size(), 2u);
  EXPECT_EQ(w.plan.items[0].seq, a);
  EXPECT_EQ(w.plan.items[0].phase, Phase::decode);
  EXPECT_EQ(w.plan.items[1].count, 20);  // 23 are left: whole pages
  EXPECT_EQ(w.plan.decoding_batches, 1);
  w.run();
  w.expect_output(1, a, 0, 20);
  w.expect_output(2, b, 0, 3);
  w.expect_all_back();
}

TEST(Scenario, TwoPlansInFlightGiveTheSameTokensAndDiscardOverruns) {
  for (int depth : {1, 2}) {
    Settings o = small();
    o.depth = depth;
    World w(o);
    SeqId a = w.submit(1, prompt_of(9), 30), b = w.submit(2, prompt_of(6, 70), 12);
    w.stop_after[a] = 7;
    w.run();
    w.expect_output(1, a, 0, 7);
    w.expect_output(2, b, 0, 12);
    w.expect_all_back();
  }
}

TEST(Scenario, PreemptedRequestsGoOnAsIfNothingHadHappened) {
  for (int depth : {1, 2})
    for (int64_t host : {0, 40})
      for (bool cache : {true, false}) {
        Settings o = small();
        o.groups = {{14, 0}};
        o.max_context = 50;
        o.depth = depth;
        o.host_pages = host;
        o.prefix_cache = cache;
        o.lookahead_tokens = 0;
        World w(o);
        std::vector<SeqId> seqs;
        for (int r = 0; r < 5; ++r) seqs.push_back(w.submit(r, prompt_of(10, 100 * r), 30));
        w.run();
        EXPECT_GT(w.count(Notice::Kind::preempted), 0);
        EXPECT_EQ(host > 0, w.scheduler->stats().swaps > 0);
        for (int r = 0; r < 5; ++r) w.expect_output(r, seqs[r], 0, 30);
        w.expect_all_back();
      }
}

TEST(Scenario, ChoicesForkFromOnePromptAndCopyOnWrite) {
  for (int depth : {1, 2}) {
    Settings o = small();
    o.depth = depth;
    World w(o);
    Submission s = w.make(1, prompt_of(10), 9);
    s.n = 4;
    SeqId first = w.submit(s);
    w.run();
    for (int c = 0; c < 4; ++c) w.expect_output(1, first + c, c, 9);
    w.expect_all_back();
  }
}

TEST(Scenario, OffsetModeKeepsRuns) {
  Settings o = small();
  o.index_mode = kvcache::IndexMode::offset;
  o.prefix_cache = false;
  World w(o);
  std::map<int, SeqId> seqs;
  for (int r = 0; r < 12; ++r) {
    Submission s = w.make(r, prompt_of(7 + r, 10 * r), 11);
    s.n = r % 3 + 1;
    seqs[r] = w.submit(s);
  }
  w.run();
  for (auto [r, first] : seqs)
    for (int c = 0; c < r % 3 + 1; ++c) w.expect_output(r, first + c, c, 11);
  w.expect_all_back();
}

TEST(Scenario, BeamsForkAndDrop) {
  World w(small());
  Submission s = w.make(1, prompt_of(10), 12);
  s.n = 3;
  s.beam = true;
  SeqId first = w.submit(s);
  std::map<int, std::vector<int32_t>> truth;
  for (int step = 0; w.launch(); ++step) {
    auto& run = w.runs.front();
    std::map<int, std::vector<int32_t>> old = truth;
    for (SeqResult& r : run.results) {
      int c = static_cast<int>(r.seq - first);
      r.parent = step == 0 ? c : (step * 7 + c * c) % 3;
      truth[c] = old[r.parent];
      truth[c].push_back(r.tokens[0]);
    }
    w.retire();
    for (auto& [c, t] : truth) {
      auto all = w.scheduler->tokens(first + c);
      if (all.empty()) continue;
      EXPECT_EQ(std::vector<int32_t>(all.begin() + 10, all.end()), t);
    }
  }
  EXPECT_EQ(truth[0].size(), 12u);
  w.collect();
  w.expect_all_back();
}

TEST(Scenario, PausedRequestsKeepTheirPagesUntilSomebodyNeedsThem) {
  Settings o = small();
  o.groups = {{12, 0}};
  World w(o);
  SeqId a = w.submit(1, prompt_of(20), 20);
  w.launch();
  w.retire();
  ASSERT_TRUE(w.scheduler->pause(1).ok());
  EXPECT_FALSE(w.launch());
  SeqId b = w.submit(2, prompt_of(30, 500), 12);
  w.run();
  w.expect_output(2, b, 0, 12);
  EXPECT_EQ(w.count(Notice::Kind::preempted), 1);
  ASSERT_TRUE(w.scheduler->resume(1).ok());
  w.run();
  w.expect_output(1, a, 0, 20);
  w.expect_all_back();
}

TEST(Scenario, DeadlinesEndRequests) {
  World w(small());
  Submission s = w.make(1, prompt_of(9), 80);
  s.deadline = w.now + milliseconds(100);
  w.submit(s);
  EXPECT_EQ(*w.scheduler->wake_at(), *s.deadline);
  w.run();
  EXPECT_EQ(w.count(Notice::Kind::expired), 1);
  w.expect_all_back();
}

// Each choice that was asked for is said to be over, though nothing forks where nothing is drawn.
TEST(Scenario, APromptAloneEndsAllItsChoices) {
  World w(small());
  Submission s = w.make(1, prompt_of(9), 0);
  s.n = 3;
  w.submit(s);
  w.run();
  std::vector<int32_t> choices;
  for (const Notice& e : w.events)
    if (e.kind == Notice::Kind::finished) choices.push_back(e.choice);
  EXPECT_EQ(choices, (std::vector<int32_t>{0, 1, 2}));
  EXPECT_EQ(w.events.back().kind, Notice::Kind::released);
  EXPECT_EQ(w.scheduler->stats().finished, 3);
  w.expect_all_back();
}

// Else a server would keep, and wake up for, each deadline it was ever told.
TEST(Scenario, WhatIsOverHasNoDeadlineAnyMore) {
  World w(small());
  for (RequestId id : {1, 2, 3}) {
    Submission s = w.make(id, prompt_of(9), 4);
    s.n = id == 3 ? 2 : 1;
    s.deadline = w.now + std::chrono::hours(1000);
    w.submit(s);
  }
  ASSERT_TRUE(w.scheduler->cancel(2).ok());
  EXPECT_NE(w.scheduler->wake_at(), std::nullopt);
  w.run();
  EXPECT_EQ(w.count(Notice::Kind::finished), 3);
  EXPECT_EQ(w.scheduler->wake_at(), std::nullopt);
  w.expect_all_back();
}

// Prompts are no output, however fast they are read.
TEST(Scenario, OutputsASecondAreThoseOfTheStepsThatDrewThem) {
  World w(small());  // a step takes 10 ms, and each of these draws one token
  w.submit(1, prompt_of(20), 60);
  w.run();
  const Stats s = w.scheduler->stats();
  EXPECT_NEAR(s.outputs_per_second, 100, 1e-6);
  EXPECT_GT(s.tokens_per_second, 110);
  w.expect_all_back();
}

TEST(Scenario, ASequenceIsCountedOnce) {
  Settings o = small();
  o.max_running = 2;
  World w(o);
  for (RequestId id : {1, 2, 3, 4}) w.submit(w.make(id, prompt_of(9), 40));
  ASSERT_TRUE(w.launch());
  w.retire();
  ASSERT_TRUE(w.scheduler->pause(1).ok());
  ASSERT_TRUE(w.scheduler->pause(4).ok());
  const Stats s = w.scheduler->stats();
  EXPECT_EQ(s.running, 1);
  EXPECT_EQ(s.waiting, 1);
  EXPECT_EQ(s.paused, 2);
  EXPECT_EQ(s.preempted, 0);
  for (RequestId id : {1, 4}) ASSERT_TRUE(w.scheduler->resume(id).ok());
  w.run();
  w.expect_all_back();
}

}  // namespace
}  // namespace kvasir::scheduler
