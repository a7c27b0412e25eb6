// Pages that are found again, by whom, and those that a window lets go early.
#include <gtest/gtest.h>

#include <tuple>

#include "tests/scheduler/world.h"

namespace kvasir::scheduler {
namespace {

TEST(KeptPages, APrefixIsFoundAndItsLastPartCopied) {
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
  ASSERT_EQ(w.events[0].kind, Notice::Kind::admitted);
  EXPECT_EQ(w.events[0].cached_tokens, 25);  // 22 and three of the four said: the last was never fed
  w.expect_output(2, b, 0, 3);
  w.events.clear();
  SeqId c = w.submit(3, prompt_of(20), 3);
  w.run();
  EXPECT_EQ(w.events[0].cached_tokens, 19);  // never the whole prompt
  w.expect_output(3, c, 0, 3);
  w.expect_all_back();
}

// A state is kept when the step that gives it has ended: with two in flight the sequence goes on in the one after.
TEST(KeptPages, AStateIsKeptHoweverManyStepsAreInFlight) {
  for (int depth : {1, 2}) {
    Settings o = small();
    o.depth = depth;
    o.recurrent = true, o.kept_states = 2, o.max_draft = 0;
    World w(o);
    for (int64_t hit : {0, 20}) {
      w.events.clear();
      const SeqId a = w.submit(1, prompt_of(22), 4);
      w.run();
      ASSERT_EQ(w.events[0].kind, Notice::Kind::admitted);
      EXPECT_EQ(w.events[0].cached_tokens, hit) << depth;
      w.expect_output(1, a, 0, 4);
    }
    w.expect_all_back();
  }
}

TEST(KeptPages, TenantsAndSaltsShareNothing) {
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

TEST(KeptPages, WindowLayersGivePagesBack) {
  for (bool mixed : {true, false}) {
    Settings o = small();
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

TEST(KeptPages, AHitWithWindowGroupsNeedsTheWindowToo) {
  Settings o = small();
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

}  // namespace
}  // namespace kvasir::scheduler
