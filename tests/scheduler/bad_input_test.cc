// What callers do wrong, each in the words of the contract: a typed error, and nothing is leaked.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "scheduler/policy.h"
#include "scheduler/simulate.h"
#include "tests/scheduler/world.h"

namespace kvasir::scheduler {
namespace {

using ::testing::HasSubstr;

TEST(BadInput, APromptLongerThanThePool) {
  Settings o = small();
  o.groups = {{8, 0}};  // 32 tokens, where the context would allow 100
  World w(o);
  for (int64_t max_new : {1, 0}) {
    const Status s = w.scheduler->submit(w.make(1, prompt_of(max_new > 0 ? 32 : 33), max_new), w.now).status();
    EXPECT_EQ(s.code(), Code::invalid_argument);
    EXPECT_EQ(s.field(), "prompt");
    EXPECT_THAT(s.message(), HasSubstr("room for 32"));
    EXPECT_THAT(s.message(), HasSubstr("kv-memory"));
  }
  EXPECT_EQ(w.scheduler->submit(w.make(1, prompt_of(30), 3), w.now).status().field(), "max_tokens");
  Submission beams = w.make(1, prompt_of(20), 4);  // alone it would fit; two beams need twice as much
  beams.n = 2;
  beams.beam = true;
  EXPECT_EQ(w.scheduler->submit(beams, w.now).status().field(), "prompt");
  w.expect_all_back();
  SeqId whole = w.submit(1, prompt_of(31), 1);
  w.run();
  w.expect_output(1, whole, 0, 1);
  w.expect_all_back();
}

TEST(BadInput, AnIdThatIsThereAlready) {
  for (int depth : {1, 2}) {
    Settings o = small();
    o.depth = depth;
    World w(o);
    const auto again = [&] { return w.scheduler->submit(w.make(1, prompt_of(5), 3), w.now).status(); };
    w.submit(1, prompt_of(5), 3);
    EXPECT_EQ(again().code(), Code::already_exists);
    EXPECT_EQ(again().field(), "id");
    ASSERT_TRUE(w.launch());
    EXPECT_EQ(again().code(), Code::already_exists);
    ASSERT_TRUE(w.scheduler->cancel(1).ok());
    EXPECT_EQ(again().code(), Code::already_exists) << "a plan in flight still names it";
    w.retire();
    EXPECT_EQ(w.count(Notice::Kind::released), 1);
    SeqId second = w.submit(1, prompt_of(5), 3);
    w.run();
    w.expect_output(1, second, 0, 3);
    w.expect_all_back();
  }
}

TEST(BadInput, CancelBeforeSubmitAfterFinishAndTwice) {
  World w(small());
  EXPECT_EQ(w.scheduler->cancel(1).code(), Code::not_found);
  SeqId a = w.submit(1, prompt_of(5), 3);
  w.run();
  w.expect_output(1, a, 0, 3);
  EXPECT_EQ(w.scheduler->cancel(1).code(), Code::not_found);
  w.submit(2, prompt_of(9, 50), 9);
  ASSERT_TRUE(w.launch());
  EXPECT_TRUE(w.scheduler->cancel(2).ok());
  EXPECT_EQ(w.scheduler->cancel(2).code(), Code::not_found);
  w.run();
  EXPECT_EQ(w.count(Notice::Kind::cancelled), 1);
  EXPECT_EQ(w.count(Notice::Kind::finished), 1);
  EXPECT_EQ(w.count(Notice::Kind::released), 2);
  w.expect_all_back();
}

// A request whose pages are being taken from it: a plan in flight may still name them, or they are on their way to the
// second tier.
TEST(BadInput, CancelDuringPreemption) {
  for (int depth : {1, 2})
    for (int64_t host : {0, 40}) {
      Settings o = small();
      o.groups = {{14, 0}};
      o.max_context = 50;
      o.depth = depth;
      o.host_pages = host;
      o.lookahead_tokens = 0;
      World w(o);
      for (int r = 0; r < 5; ++r) w.submit(r, prompt_of(10, 100 * r), 30);
      int cancelled = 0;
      for (size_t seen = 0; !w.scheduler->idle();) {
        while (w.scheduler->in_flight() < depth && w.launch()) {
        }
        w.collect();  // before anything retires
        for (; seen < w.events.size() && cancelled < 3; ++seen) {
          if (w.events[seen].kind != Notice::Kind::preempted) continue;
          const RequestId id = w.events[seen].request;
          cancelled += w.scheduler->cancel(id).ok();
          EXPECT_EQ(w.scheduler->cancel(id).code(), Code::not_found);
          w.scheduler->check_integrity();
        }
        if (!w.runs.empty()) w.retire();
      }
      w.collect();
      EXPECT_EQ(cancelled, 3) << depth << ", " << host;
      EXPECT_EQ(w.count(Notice::Kind::finished), 2);
      EXPECT_EQ(w.count(Notice::Kind::released), 5);
      w.expect_all_back();
      w.scheduler->flush_prefix_cache();
      EXPECT_EQ(w.scheduler->stats().host_pages_free, host);
      EXPECT_EQ(w.scheduler->stats().pages_free, 14);
    }
}

TEST(BadInput, APauseForEver) {
  Settings o = small();
  o.groups = {{12, 0}};
  o.max_waiting = 3;
  World w(o);
  w.submit(1, prompt_of(20), 20);
  w.launch();
  w.retire();
  ASSERT_TRUE(w.scheduler->pause(1).ok());
  ASSERT_TRUE(w.scheduler->pause(1).ok());  // what is paused already is
  for (int round = 0; round < 5; ++round) {
    SeqId other = w.submit(2, prompt_of(30, 500 + 100 * round), 12);
    w.run();
    w.expect_output(2, other, 0, 12);
    w.outputs.erase(other);
  }
  EXPECT_EQ(w.scheduler->stats().paused, 1);
  EXPECT_FALSE(w.launch());  // and nothing is busy with it

  // Paused before they ran, they count as waiting: no amount of memory is filled by pausing.
  for (RequestId id : {3, 4}) {
    w.submit(id, prompt_of(5), 5);
    ASSERT_TRUE(w.scheduler->pause(id).ok());
  }
  const Status full = w.scheduler->submit(w.make(5, prompt_of(5), 5), w.now).status();
  EXPECT_EQ(full.code(), Code::resource_exhausted) << "1 lost its pages and waits, as 3 and 4 do";
  Submission late = w.make(5, prompt_of(5), 5);
  ASSERT_TRUE(w.scheduler->cancel(4).ok());
  late.deadline = w.now + seconds(1);
  w.submit(late);
  ASSERT_TRUE(w.scheduler->pause(5).ok());
  w.now += seconds(1);
  EXPECT_FALSE(w.launch());
  w.collect();
  EXPECT_EQ(w.count(Notice::Kind::expired), 1);  // a deadline ends a pause
  EXPECT_TRUE(w.scheduler->cancel(1).ok());
  EXPECT_TRUE(w.scheduler->cancel(3).ok());
  w.collect();
  w.expect_all_back();
}

TEST(BadInput, ADeadlineInThePast) {
  for (const std::string& policy : policy_names()) {
    Settings o = small();
    o.policy = policy;
    World w(o);
    w.now += seconds(5);
    for (auto late : {seconds(0), seconds(5)}) {
      Submission s = w.make(1, prompt_of(5), 5);
      s.deadline = w.now - late;
      const Status refused = w.scheduler->submit(s, w.now).status();
      EXPECT_EQ(refused.code(), Code::deadline_exceeded);
      EXPECT_EQ(refused.field(), "deadline");
    }
    EXPECT_EQ(w.scheduler->stats().refused, 2);
    EXPECT_EQ(w.scheduler->wake_at(), std::nullopt);
    w.expect_all_back();
  }
}

TEST(BadInput, APageSizeThatNoPageHas) {
  for (int size : {-4, 0, 65537, 1 << 30}) {
    Settings o = small();
    o.page_size = size;
    const Status s = Scheduler::create(o).status();
    EXPECT_EQ(s.code(), Code::invalid_argument) << size;
    EXPECT_EQ(s.field(), "page_size");
    EXPECT_THAT(s.message(), HasSubstr("it must be from 1 to 65536"));
  }
  for (int size : {1, 2, 3, 12, 24, 64, 255, 256, 257, 1000, 65536}) {
    Settings o = small();
    o.page_size = size;
    o.max_tokens_per_step = 70'000;
    EXPECT_TRUE(Scheduler::create(o).ok()) << size;
  }
}

TEST(BadInput, AWorkloadWithTimesGoingBackwards) {
  const auto wrong = [](const std::string& text) { return parse_workload(text).status(); };
  const Status s = wrong("{\"arrival_s\":2,\"prompt_tokens\":5}\n{\"arrival_s\":1.5,\"prompt_tokens\":5}\n");
  EXPECT_EQ(s.code(), Code::invalid_argument);
  EXPECT_THAT(s.message(), HasSubstr("line 2: arrival_s is 1.5, before the 2 of an earlier line; sort them"));
  EXPECT_THAT(wrong("{\"arrival_s\":-1,\"prompt_tokens\":5}").message(), HasSubstr("line 1: arrival_s is -1"));
  EXPECT_THAT(wrong("{\"prompt_tokens\":5,\"follows\":0}").message(), HasSubstr("earlier request"));
}

TEST(BadInput, AWorkloadOfValuesThatNothingCanHold) {
  for (const char* line :
       {"{\"prompt_tokens\":1e12}", "{\"prompt_tokens\":1e999}", "{\"prompt_tokens\":5,\"arrival_s\":1e300}",
        "{\"prompt_tokens\":5,\"deadline_s\":1e18}", "{\"prompt_tokens\":5,\"cancel_at_s\":-1}",
        "{\"prompt_tokens\":5,\"priority\":1e6}", "{\"prompt_tokens\":\"5\"}", "{\"prompt_tokens\":5,\"tenant\":5}",
        "{\"prompt_tokens\":5,\"prefix_ids\":[1.5]}"})
    EXPECT_THAT(parse_workload(line).status().message(), HasSubstr("line 1")) << line;
  // The latest times that are read do not stop the clock: each turn comes three years after the one before.
  std::string turns;
  for (int i = 0; i < 120; ++i) {
    turns += "{\"prompt_tokens\":5,\"output_tokens\":2,\"arrival_s\":1e8,\"deadline_s\":1e8";
    turns += i == 0 ? "}\n" : ",\"follows\":" + std::to_string(i - 1) + "}\n";
  }
  auto workload = parse_workload(turns);
  ASSERT_TRUE(workload.ok()) << workload.status().to_string();
  Settings o = small();
  auto report = simulate(o, *workload);
  ASSERT_TRUE(report.ok());
  EXPECT_EQ(report->finished + report->expired + report->refused, 120);
}

TEST(BadInput, EachFieldIsNamed) {
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

TEST(BadInput, OptionsAreNamed) {
  auto field = [](auto change) {
    Settings o = small();
    change(o);
    return Scheduler::create(o).status().field();
  };
  EXPECT_EQ(field([](Settings& o) { o.recurrent = true, o.max_draft = 0; }), "kept_states");
  EXPECT_EQ(field([](Settings& o) { o.kept_states = -1; }), "kept_states");
  EXPECT_EQ(field([](Settings& o) { o.recurrent = true, o.kept_states = 1; }), "max_draft");
  EXPECT_EQ(field([](Settings& o) { o.recurrent = true, o.kept_states = 1, o.max_draft = 0, o.host_pages = 4; }),
            "host_pages");
  EXPECT_EQ(field([](Settings& o) { o.page_size = 0; }), "page_size");
  EXPECT_EQ(field([](Settings& o) { o.page_size = 65537; }), "page_size");
  EXPECT_EQ(field([](Settings& o) { o.groups[0].pages = 0; }), "kv_memory");
  EXPECT_EQ(field([](Settings& o) { o.max_tokens_per_step = 8; }), "max_tokens_per_step");
  for (double ms : {-1.0, 0.5, 60001.0, std::nan("")})
    EXPECT_EQ(field([ms](Settings& o) { o.max_step_ms = ms; }), "max_step_ms");
  EXPECT_EQ(field([](Settings& o) { o.policy = "best"; }), "policy");
  EXPECT_EQ(field([](Settings& o) { o.depth = 9; }), "depth");
  EXPECT_EQ(field([](Settings& o) { o.tenant_weights["x"] = 0; }), "tenant_weights");
}

}  // namespace
}  // namespace kvasir::scheduler
