// What is known only after a step was planned: which drafts were right, masks that come late, and stops in the text.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/scheduler/world.h"

namespace kvasir::scheduler {
namespace {

TEST(LateNews, DraftsAreVerifiedAndRejectedOnesRolledBack) {
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
TEST(LateNews, ADraftLivesAsLongAsAPlanNamesIt) {
  Settings o = small();
  o.policy = "deadline";
  o.groups = {{5, 0}};
  o.lookahead_tokens = 0;
  World w(o);
  Submission s = w.make(1, prompt_of(8), 12);
  s.n = 2;
  s.deadline = w.now + seconds(3600);
  const SeqId first = w.submit(s);
  for (; w.count(Notice::Kind::preempted) == 0; w.collect()) {  // the second choice, when the pages are used up
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
  ASSERT_EQ(w.count(Notice::Kind::expired), 1);
  ASSERT_EQ(w.plan.items.size(), 1u);
  ASSERT_EQ(w.plan.items[0].phase, Phase::verify);
  const auto named = w.plan.items[0].tokens;
  EXPECT_THAT(named, testing::ElementsAre(last, 3, 1, 2));
  w.runs.push_back(w.device.launch(*w.scheduler, w.plan));
  w.retire();
  w.expect_all_back();
}

TEST(LateNews, ARequestWithoutItsMaskSitsOut) {
  Settings o = small();
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

TEST(LateNews, AMaskThatIsMissingAtTheDrawMeansTheSamePositionAgain) {
  for (int depth : {1, 2}) {
    Settings o = small();
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

TEST(LateNews, ATextStopComesLate) {
  for (int depth : {1, 2}) {
    Settings o = small();
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
    EXPECT_EQ(w.count(Notice::Kind::released), 1);
  }
}

}  // namespace
}  // namespace kvasir::scheduler
