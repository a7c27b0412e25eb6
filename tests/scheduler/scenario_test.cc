// Scenarios that all end with every page back, on a device that checks what it reads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

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
    Options o = small();
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
        Options o = small();
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
        EXPECT_GT(w.count(Event::Kind::preempted), 0);
        EXPECT_EQ(host > 0, w.scheduler->stats().swaps > 0);
        for (int r = 0; r < 5; ++r) w.expect_output(r, seqs[r], 0, 30);
        w.expect_all_back();
      }
}

TEST(Scenario, APrefixIsFoundAndItsLastPartCopied) {
  World w(small());
  SeqId a = w.submit(1, prompt_of(22), 4);
  w.run();
  auto longer = prompt_of(22);
  auto said = w.outputs[a];
  longer.insert(longer.end(), said.begin(), said.end());
  longer.push_back(7);
  w.events.clear();
  SeqId b = w.submit(2, longer, 3);
  w.run();
  ASSERT_EQ(w.events[0].kind, Event::Kind::admitted);
  EXPECT_EQ(w.events[0].cached_tokens, 25);  // 22 and three of the four said: the last was never fed
  w.expect_output(2, b, 0, 3);
  w.events.clear();
  SeqId c = w.submit(3, prompt_of(20), 3);
  w.run();
  EXPECT_EQ(w.events[0].cached_tokens, 19);  // never the whole prompt
  w.expect_output(3, c, 0, 3);
  w.expect_all_back();
}

TEST(Scenario, TenantsAndSaltsShareNothing) {
  World w(small());
  w.submit(1, prompt_of(20), 2);
  w.run();
  for (auto [tenant, salt, hit] : {std::tuple("x", "", 0), {"", "s", 0}, {"", "", 19}, {"x", "", 19}, {"", "s", 19}}) {
    w.events.clear();
    Submission s = w.make(2, prompt_of(20), 2);
    s.tenant = tenant;
    s.cache_salt = salt;
    w.submit(s);
    w.run();
    EXPECT_EQ(w.events[0].cached_tokens, hit) << tenant << salt;
  }
  w.expect_all_back();
}

TEST(Scenario, ChoicesForkFromOnePromptAndCopyOnWrite) {
  for (int depth : {1, 2}) {
    Options o = small();
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
  Options o = small();
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

TEST(Scenario, WindowLayersGivePagesBack) {
  for (bool mixed : {true, false}) {
    Options o = small();
    o.max_context = 400;
    if (mixed) {
      o.groups = {{100, 0}, {12, 10}};
    } else {
      o.groups = {{12, 10}};
    }
    World w(o);
    SeqId a = w.submit(1, prompt_of(90), 150);
    w.run();
    w.expect_output(1, a, 0, 150);
    w.events.clear();
    SeqId b = w.submit(2, prompt_of(60), 5);
    w.run();
    w.expect_output(2, b, 0, 5);
    w.expect_all_back();
  }
}

TEST(Scenario, AHitWithWindowGroupsNeedsTheWindowToo) {
  Options o = small();
  o.groups = {{32, 0}, {24, 8}};
  World w(o);
  w.submit(1, prompt_of(40), 2);
  w.run();
  w.events.clear();
  SeqId b = w.submit(2, prompt_of(40), 3);
  w.run();
  EXPECT_EQ(w.events[0].cached_tokens, 39);
  w.expect_output(2, b, 0, 3);
  w.expect_all_back();
}

TEST(Scenario, DraftsAreVerifiedAndRejectedOnesRolledBack) {
  World w(small(), 2);  // two tokens: guesses are often right
  SeqId a = w.submit(1, prompt_of(9), 40), b = w.submit(2, prompt_of(5), 40);
  int verified = 0;
  for (int i = 0; i < 400 && !w.scheduler->idle(); ++i) {
    if (i % 2) (void)w.scheduler->propose(a, {1, 0, 1});
    if (!w.launch()) break;
    Phase last = Phase::decode;
    for (const PlanItem& item : w.plan.items) {
      EXPECT_GE(item.phase, last);
      last = item.phase;
      verified += item.phase == Phase::verify;
    }
    w.retire();
  }
  EXPECT_GT(verified, 3);
  w.expect_output(1, a, 0, 40);
  w.expect_output(2, b, 0, 40);
  w.expect_all_back();
}

// While a plan that verifies a draft is being made, its request can be found to be hopeless for another of its choices,
// which waits to come back. The plan must not name a draft that is gone.
TEST(Scenario, ADraftLivesAsLongAsAPlanNamesIt) {
  Options o = small();
  o.policy = "deadline";
  o.groups = {{5, 0}};
  o.lookahead_tokens = 0;
  World w(o);
  Submission s = w.make(1, prompt_of(8), 12);
  s.n = 2;
  s.deadline = w.now + seconds(3600);
  const SeqId first = w.submit(s);
  for (; w.count(Event::Kind::preempted) == 0; w.collect()) {  // the second choice, when the pages are used up
    ASSERT_TRUE(w.launch());
    w.retire();
  }
  ASSERT_TRUE(w.scheduler->alive(first) && w.outputs[first + 1].size() < 12);
  const std::vector<int32_t> draft{3, 1, 2};
  const int32_t last = w.scheduler->tokens(first).back();
  ASSERT_TRUE(w.scheduler->propose(first, draft).ok());
  w.now = *s.deadline - milliseconds(1);
  w.scheduler->next_step(w.now, w.plan);
  w.collect();
  ASSERT_EQ(w.count(Event::Kind::expired), 1);
  ASSERT_EQ(w.plan.items.size(), 1u);
  ASSERT_EQ(w.plan.items[0].phase, Phase::verify);
  const auto named = w.plan.items[0].tokens;
  EXPECT_THAT(named, testing::ElementsAre(last, 3, 1, 2));
  w.runs.push_back(w.device.launch(*w.scheduler, w.plan));
  w.retire();
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

TEST(Scenario, ARequestWithoutItsMaskSitsOut) {
  Options o = small();
  o.depth = 2;
  World w(o);
  Submission s = w.make(1, prompt_of(9), 3);
  s.needs_mask = true;
  SeqId a = w.submit(s);
  w.run();
  EXPECT_TRUE(w.outputs[a].empty());
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(w.outputs[a].size(), size_t(i));
    ASSERT_TRUE(w.scheduler->mask_ready(a).ok());
    w.run();
  }
  w.expect_output(1, a, 0, 3);
  w.expect_all_back();
}

TEST(Scenario, AMaskThatIsMissingAtTheDrawMeansTheSamePositionAgain) {
  for (int depth : {1, 2}) {
    Options o = small();
    o.depth = depth;
    World w(o);
    Submission s = w.make(1, prompt_of(7), 6);  // its second token opens a page
    s.needs_mask = true;
    SeqId a = w.submit(s), mate = w.submit(2, prompt_of(9, 20), 6);
    for (int i = 0; i < 6; ++i) {
      ASSERT_TRUE(w.scheduler->mask_ready(a).ok());
      ASSERT_TRUE(w.launch());
      w.retire();
      ASSERT_EQ(w.outputs[a].size(), size_t(i + 1));
      if (i == 5) break;
      ASSERT_TRUE(w.scheduler->mask_ready(a).ok());
      ASSERT_TRUE(w.launch());
      for (size_t r = 0; r < w.runs[0].results.size(); ++r)
        if (w.runs[0].results[r].seq == a) w.runs[0].storage[r].clear();  // late
      w.retire();
      ASSERT_EQ(w.outputs[a].size(), size_t(i + 1));
      EXPECT_EQ(w.scheduler->in_flight(), 0);
    }
    EXPECT_EQ(w.outputs[mate].size(), 6u);  // it never waited
    w.expect_output(1, a, 0, 6);
    w.expect_output(2, mate, 0, 6);
    w.expect_all_back();
  }
}

TEST(Scenario, ATextStopComesLate) {
  for (int depth : {1, 2}) {
    Options o = small();
    o.depth = depth;
    World w(o);
    SeqId a = w.submit(1, prompt_of(9), 30);
    while (w.outputs[a].size() < 8) {
      while (w.scheduler->in_flight() < depth && w.launch()) {
      }
      w.retire();
    }
    ASSERT_TRUE(w.scheduler->stop_at(a, 5).ok());
    EXPECT_EQ(w.scheduler->stop_at(a, 5).code(), Code::not_found);
    w.run();
    w.collect();
    EXPECT_EQ(w.outputs[a].size(), 8u);
    w.expect_all_back();
    EXPECT_EQ(w.count(Event::Kind::released), 1);
  }
}

TEST(Scenario, PausedRequestsKeepTheirPagesUntilSomebodyNeedsThem) {
  Options o = small();
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
  EXPECT_EQ(w.count(Event::Kind::preempted), 1);
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
  EXPECT_EQ(w.count(Event::Kind::expired), 1);
  w.expect_all_back();
}

TEST(Refusals, SayWhatIsWrong) {
  World w(small());
  auto status = [&](auto change) {
    Submission s = w.make(9, prompt_of(5), 5);
    change(s);
    return w.scheduler->submit(s, w.now + seconds(1)).status();
  };
  EXPECT_EQ(status([](Submission& s) { s.prompt.clear(); }).field(), "prompt");
  EXPECT_EQ(status([](Submission& s) { s.prompt.assign(200, 1); }).field(), "prompt");
  EXPECT_EQ(status([](Submission& s) { s.prompt[1] = -4; }).field(), "prompt");
  EXPECT_EQ(status([](Submission& s) { s.max_new = 96; }).field(), "max_tokens");
  EXPECT_EQ(status([](Submission& s) { s.max_new = -1; }).field(), "max_tokens");
  EXPECT_EQ(status([](Submission& s) { s.n = 0; }).field(), "n");
  EXPECT_EQ(status([](Submission& s) { s.n = 9; }).field(), "n");
  EXPECT_EQ(status([&](Submission& s) { s.deadline = w.now; }).code(), Code::deadline_exceeded);
  EXPECT_TRUE(status([](Submission&) {}).ok());
  EXPECT_EQ(status([](Submission&) {}).code(), Code::already_exists);
  for (auto call : {&Scheduler::cancel, &Scheduler::pause, &Scheduler::resume})
    EXPECT_EQ((w.scheduler.get()->*call)(77).code(), Code::not_found);
  EXPECT_TRUE(w.scheduler->cancel(9).ok());
  EXPECT_EQ(w.scheduler->cancel(9).code(), Code::not_found);
  w.collect();
  w.expect_all_back();
}

TEST(Refusals, BadOptions) {
  auto field = [](auto change) {
    Options o = small();
    change(o);
    return Scheduler::create(o).status().field();
  };
  EXPECT_EQ(field([](Options& o) { o.page_size = 12; }), "page_size");
  EXPECT_EQ(field([](Options& o) { o.page_size = 512; }), "page_size");
  EXPECT_EQ(field([](Options& o) { o.groups[0].pages = 0; }), "kv_memory");
  EXPECT_EQ(field([](Options& o) { o.max_tokens_per_step = 8; }), "max_tokens_per_step");
  for (double ms : {-1.0, 0.5, 60001.0, std::nan("")})
    EXPECT_EQ(field([ms](Options& o) { o.max_step_ms = ms; }), "max_step_ms");
  EXPECT_EQ(field([](Options& o) { o.policy = "best"; }), "policy");
  EXPECT_EQ(field([](Options& o) { o.depth = 9; }), "depth");
  EXPECT_EQ(field([](Options& o) { o.tenant_weights["x"] = 0; }), "tenant_weights");
}

}  // namespace
}  // namespace kvasir::scheduler
