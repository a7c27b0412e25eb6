// How much may wait, in all and of each tenant, and how long a refusal says to stay away.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "tests/scheduler/desk.h"
#include "tests/scheduler/world.h"

namespace kvasir::scheduler {
namespace {

using ::testing::HasSubstr;

Status ask(World& w, RequestId id, int tokens, const std::string& tenant = "a") {
  Submission s = w.make(id, prompt_of(tokens), 5);
  s.tenant = tenant;
  return w.scheduler->submit(std::move(s), w.now).status();
}

void expect_refused(const Status& s, const std::string& why) {
  EXPECT_EQ(s.code(), Code::resource_exhausted);
  EXPECT_THAT(s.message(), HasSubstr(why));
  EXPECT_THAT(s.message(), HasSubstr("try again in"));
  ASSERT_TRUE(s.retry_after().has_value());
  EXPECT_GT(s.retry_after()->count(), 0);
}

TEST(Limits, OfRequestsAndOfTokensInAllAndOfEachTenant) {
  Settings o = small();
  o.max_waiting = 6;
  o.max_waiting_tokens = 100;
  o.tenant_max_waiting = 3;
  o.tenant_max_waiting_tokens = 60;
  World w(o);
  EXPECT_TRUE(ask(w, 1, 30).ok());
  EXPECT_TRUE(ask(w, 2, 30).ok());
  expect_refused(ask(w, 3, 1), "60 of your prompt tokens wait, at most 60 may");
  EXPECT_TRUE(ask(w, 4, 20, "b").ok());
  EXPECT_TRUE(ask(w, 5, 5, "b").ok());
  EXPECT_TRUE(ask(w, 6, 5, "b").ok());
  expect_refused(ask(w, 7, 1, "b"), "3 of your requests wait, at most 3 may");
  expect_refused(ask(w, 8, 20, "c"), "90 prompt tokens wait, at most 100 may");
  EXPECT_TRUE(ask(w, 9, 10, "c").ok());
  expect_refused(ask(w, 10, 1, "d"), "6 requests wait, at most 6 may");
  EXPECT_EQ(w.scheduler->stats().refused, 4);
  EXPECT_EQ(w.scheduler->stats().requests, 6);
  w.run();
  EXPECT_EQ(w.count(Notice::Kind::finished), 6);
  EXPECT_TRUE(ask(w, 3, 30).ok());
  w.run();
  w.expect_all_back();
}

// It would be refused for ever: nothing that goes makes room for it.
TEST(Limits, OneLongPromptMayComeToAnEmptyQueue) {
  Settings o = small();
  o.max_waiting_tokens = o.tenant_max_waiting_tokens = 20;
  World w(o);
  EXPECT_TRUE(ask(w, 1, 50).ok());
  expect_refused(ask(w, 2, 1), "50 prompt tokens wait");
  w.run();
  EXPECT_EQ(w.count(Notice::Kind::finished), 1);
  w.expect_all_back();
}

// One that is refused asks again as soon as it would be let in: that was when it was told to.
double advised_against_real(Settings o, int shortest, int longest) {
  Desk desk(o);
  std::mt19937 rng(11);
  const auto draw = [&] {
    Submission s;
    s.prompt.assign(static_cast<size_t>(shortest + static_cast<int>(rng() % unsigned(longest - shortest + 1))), 1);
    for (int32_t& t : s.prompt) t = static_cast<int32_t>(rng() % 50000);
    s.max_new = 50 + static_cast<int64_t>(rng() % 100);
    return s;
  };
  Submission next = draw();
  std::optional<std::pair<Time, Duration>> refused;
  Duration advised{}, real{};
  for (int step = 0; step < 40000; ++step) {
    for (;;) {
      next.id += 1;
      const Status s = desk.scheduler->submit(next, desk.now).status();
      if (!s.ok()) {
        EXPECT_TRUE(s.retry_after().has_value());
        if (!refused) refused = {desk.now, Duration(*s.retry_after())};
        break;
      }
      if (refused && step > 4000) {
        advised += refused->second;
        real += desk.now - refused->first;
      }
      refused.reset();
      const RequestId id = next.id;
      next = draw();
      next.id = id;
    }
    desk.step();
  }
  return std::chrono::duration<double>(advised) / std::chrono::duration<double>(real);
}

// Choices that are still to part have their places: nobody else is let in there.
TEST(Limits, NoMoreRunThanMayWhenChoicesPart) {
  Settings o;
  o.groups = {{4096, 0}};
  o.max_context = 1024;
  o.max_running = 8;
  o.max_tokens_per_step = 64;
  Desk desk(o);
  for (RequestId id = 0; id < 12; ++id) {
    Submission s;
    s.id = id;
    s.prompt.assign(id % 3 == 0 ? 100 : 5, 1);
    s.n = id % 3 == 0 ? 3 : 1;
    s.max_new = 10 + 7 * int64_t(id);
    ASSERT_TRUE(desk.scheduler->submit(std::move(s), desk.now).ok());
  }
  size_t most = 0;
  while (!desk.scheduler->idle()) {
    desk.step();
    most = std::max(most, desk.plan().items.size());
    desk.scheduler->check_integrity();
  }
  EXPECT_EQ(most, 8u);
}

// Others come and decode without end: a prompt that is computed in one step, and fills it, has its turn all the same.
// Tokens that are computed again behind it may come in pieces.
TEST(Limits, APromptThatFillsAStepIsNotPassedForEver) {
  Settings o = small();
  o.groups = {{256, 0}};
  o.max_running = 6;
  o.max_tokens_per_step = 24;
  o.max_waiting = 1 << 20, o.max_waiting_tokens = 1 << 20;
  Desk desk(o);
  RequestId next = 1;
  auto submit = [&](int tokens, int64_t output, bool whole) {
    Submission s;
    s.id = next++;
    s.prompt = prompt_of(tokens, int(s.id));
    s.max_new = output;
    s.whole = s.no_prefix = whole;
    EXPECT_TRUE(desk.scheduler->submit(std::move(s), desk.now).ok());
  };
  for (int i = 0; i < 4; ++i) submit(3, 20, false);
  for (int i = 0; i < 3; ++i) desk.step();
  submit(24, 20, true);
  const RequestId whole = next - 1;
  int64_t answered = -1;
  for (int step = 0; step < 200 && answered < 0; ++step) {
    submit(3, 20, false);
    desk.step();
    for (const PlanItem& item : desk.plan().items)
      if (item.request == whole && item.begin == 0) EXPECT_EQ(item.count, 24);
    for (const Notice& e : desk.events)
      if (e.kind == Notice::Kind::finished && e.request == whole) answered = step;
  }
  EXPECT_GE(answered, 0);
}

TEST(Limits, ARefusalSaysWhenToComeBackFromTheMeasuredRate) {
  Settings o = small();
  o.page_size = 16;
  o.groups = {{256, 0}};
  o.max_context = 1024;
  o.max_tokens_per_step = 256;
  o.prefix_cache = false;
  o.max_waiting = 32;
  const double by_requests = advised_against_real(o, 20, 60);
  o.max_waiting = 1 << 20;
  o.max_waiting_tokens = 2000;
  const double by_tokens = advised_against_real(o, 20, 300);
  std::printf("advised against real: %.2f where requests are bounded, %.2f where tokens are\n", by_requests, by_tokens);
  EXPECT_GT(by_requests, 0.6);
  EXPECT_LT(by_requests, 1.6);
  EXPECT_GT(by_tokens, 0.5);
  EXPECT_LT(by_tokens, 2.0);
}

}  // namespace
}  // namespace kvasir::scheduler
