// What was recorded runs again to the same plans; what is no recording, or was tampered with, is said to be so.
#include <gtest/gtest.h>

#include <sstream>

#include "scheduler/options_json.h"
#include "scheduler/recorder.h"
#include "scheduler/recording.h"
#include "tests/scheduler/random_world.h"

namespace kvasir::scheduler {
namespace {

std::string record(uint64_t seed, int operations) {
  std::string text;
  RandomWorld world(seed, &text);
  for (int i = 0; i < operations; ++i) world.operate();
  world.finish();
  return text;
}

Result<ReplayReport> replay_text(const std::string& text, std::vector<StepTime>* steps = nullptr) {
  std::istringstream in(text);
  return replay(in, steps);
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(Recording, RandomWorldsReplayToTheSamePlans) {
  int64_t steps = 0, swaps = 0, preemptions = 0;
  for (uint64_t seed = 0; seed < 150; ++seed) {
    auto report = replay_text(record(seed, 400));
    ASSERT_TRUE(report.ok()) << seed << ": " << report.status().to_string();
    ASSERT_TRUE(report->identical) << seed << ": " << report->difference;
    EXPECT_FALSE(report->cut_short);
    steps += report->steps;
    swaps += report->swaps;
    preemptions += report->preemptions;
  }
  EXPECT_GT(steps, 5000);
  EXPECT_GT(swaps, 10);
  EXPECT_GT(preemptions, 100);
}

// A prompt, what it was told, and a second turn that repeats both.
struct Conversation {
  std::string text;
  explicit Conversation(uint64_t key = 7) {
    Settings o;
    o.page_size = 4;
    o.groups = {{64, 0}};
    o.max_tokens_per_step = 80;
    o.recorder = std::make_shared<Recorder>([this](std::string lines) { text += lines; }, key);
    auto scheduler = std::move(Scheduler::create(o)).value();
    std::vector<int32_t> prompt{11, 12, 13, 14, 15, 16, 17, 18, 19};
    Time now{};
    StepPlan plan;
    for (RequestId id = 1; id <= 2; ++id) {
      Submission s;
      s.id = id;
      s.tenant = "acme \"quoted\"";
      s.cache_salt = "a secret salt";
      s.weight = 2.5;
      s.prompt = prompt;
      s.max_new = 6;
      EXPECT_TRUE(scheduler->submit(s, now += std::chrono::milliseconds(100)).ok());
      for (scheduler->next_step(now, plan); !plan.empty(); scheduler->next_step(now, plan)) {
        const auto token = static_cast<int32_t>(1000 + prompt.size());
        std::vector<SeqResult> results;
        for (const PlanItem& i : plan.items)
          if (i.samples) results.push_back({.seq = i.seq, .tokens = {&token, 1}});
        if (!results.empty()) prompt.push_back(token);
        scheduler->advance(results, now += std::chrono::milliseconds(10));
      }
    }
  }
};

TEST(Recording, KeepsWhoSharesWhatAndNothingElse) {
  Conversation c;
  auto report = replay_text(c.text);
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_TRUE(report->identical) << report->difference;
  EXPECT_EQ(report->cached_tokens, 14);  // 9 asked and 6 told, but for the last, which was never fed
  EXPECT_EQ(report->output_tokens, 12);
  EXPECT_EQ(c.text.find("secret"), std::string::npos);
  EXPECT_EQ(c.text.find("0000000b"), std::string::npos);  // the first token, as it is
  EXPECT_NE(Conversation(8).text, c.text);                // another key, other hashes
}

TEST(Recording, IsAlsoAWorkload) {
  Conversation c;
  std::istringstream in(c.text);
  auto recorded = read_workload(in);
  ASSERT_TRUE(recorded.ok()) << recorded.status().to_string();
  ASSERT_EQ(recorded->workload.items.size(), 2u);
  EXPECT_EQ(recorded->workload.items[0].output_tokens, 6);
  EXPECT_EQ(recorded->workload.items[1].prompt_tokens, 15);
  EXPECT_NEAR(recorded->workload.items[1].arrival_s, 0.16, 1e-9);
  EXPECT_EQ(recorded->options.tenant_weights["acme \"quoted\""], 2.5);
  recorded->options.policy = "lpm";
  auto sim = simulate(recorded->options, recorded->workload);
  ASSERT_TRUE(sim.ok());
  EXPECT_EQ(sim->finished, 2);
  EXPECT_EQ(sim->cached_tokens, 14);
}

TEST(Recording, ADifferenceIsFoundWhereItIs) {
  Conversation c;
  auto changed = [&](const std::string& from, const std::string& to) {
    return replay_text(replaced(c.text, from, to));
  };
  auto fewer = changed("\"pages\":64", "\"pages\":65");  // page 64 goes out last: the plans are the same
  ASSERT_TRUE(fewer.ok());
  EXPECT_TRUE(fewer->identical);
  auto smaller = changed("\"max_tokens_per_step\":80", "\"max_tokens_per_step\":81");
  ASSERT_TRUE(smaller.ok());
  EXPECT_TRUE(smaller->identical);
  auto other = changed("\"lookahead_tokens\":64", "\"lookahead_tokens\":65");
  ASSERT_TRUE(other.ok());
  auto pages = changed("\"page_size\":4", "\"page_size\":8");
  ASSERT_TRUE(pages.ok());
  EXPECT_FALSE(pages->identical);
  EXPECT_NE(pages->difference.find("line 3"), std::string::npos) << pages->difference;
  auto refused = changed("\"max_new\":6", "\"max_new\":6000");
  ASSERT_TRUE(refused.ok());
  EXPECT_FALSE(refused->identical);
  EXPECT_NE(refused->difference.find("INVALID_ARGUMENT"), std::string::npos) << refused->difference;
}

TEST(Recording, ACutFileIsReplayedAsFarAsItGoes) {
  Conversation c;
  auto cut = replay_text(c.text.substr(0, c.text.size() - 5));
  ASSERT_TRUE(cut.ok()) << cut.status().to_string();
  EXPECT_TRUE(cut->identical);
  EXPECT_TRUE(cut->cut_short);
  auto lost = replay_text(c.text + "{\"call\":\"lost\"}\n");
  ASSERT_TRUE(lost.ok());
  EXPECT_TRUE(lost->cut_short);
}

TEST(Recording, WhatIsNoneSaysWhatIsWrong) {
  Conversation c;
  auto message = [](const std::string& text) { return replay_text(text).status().message(); };
  auto broken = [&](const std::string& from, const std::string& to) { return message(replaced(c.text, from, to)); };
  EXPECT_NE(message("").find("empty"), std::string::npos);
  EXPECT_NE(message("{\"arrival_s\":0}\n").find("version 1"), std::string::npos);
  EXPECT_NE(message("nonsense\nmore").find("line 1"), std::string::npos);
  EXPECT_NE(broken("\"page_size\":4", "\"page_size\":0").find("from 1 to 65536"), std::string::npos);
  EXPECT_NE(broken("\"call\":\"submit\"", "\"call\":\"sumbit\"").find("sumbit"), std::string::npos);
  EXPECT_NE(broken("\"prompt\":\"", "\"prompt\":\"x").find("line 2"), std::string::npos);
  EXPECT_NE(broken("\"results\":[[1,", "\"results\":[[9,").find("has no result"), std::string::npos);
  EXPECT_NE(broken("\"results\":[[1,\"", "\"results\":[[1,\"00000001").find("at most 1"), std::string::npos);
  EXPECT_NE(broken(",0,-1]]", ",0,3]]").find("choice 3"), std::string::npos);
  EXPECT_NE(broken("\"call\":\"step\"", "\"call\":\"advance\",\"results\":[]").find("none is in flight"),
            std::string::npos);
  EXPECT_NE(broken("\"t\":", "\"u\":").find("line 2"), std::string::npos);
  EXPECT_NE(broken("\"pages\":64", "\"pages\":64000000000").find("pages"), std::string::npos);
}

TEST(OptionsJson, SayAllOfThemBothWays) {
  Settings o;
  o.page_size = 8;
  o.groups = {{64, 0}, {32, 16}};
  o.index_mode = kvcache::IndexMode::offset;
  o.patience = std::chrono::nanoseconds(1234567891);
  o.tenant_weights = {{"a", 0.1}, {"b \"c\"", 3}};
  o.policy = "fair";
  o.depth = 2;
  o.max_step_ms = 12.5;
  o.cost.context_us = 1.0 / 3;
  Settings back;
  ASSERT_TRUE(apply_json(options_to_json(o), &back, "it").ok());
  EXPECT_EQ(options_to_json(back), options_to_json(o));
  EXPECT_EQ(back.groups[1].window, 16);
  EXPECT_EQ(back.patience, o.patience);
  EXPECT_EQ(back.max_step_ms, 12.5);
  EXPECT_EQ(back.cost.context_us, o.cost.context_us);
  auto field = [](const std::string& json) {
    Settings none;
    none.groups = {{64, 0}};
    return apply_json(json, &none, "it").field();
  };
  EXPECT_EQ(field("{\"page_size\":\"x\"}"), "page_size");
  EXPECT_EQ(field("{\"page_size\":1.5}"), "page_size");
  EXPECT_EQ(field("{\"max_running\":1e12}"), "max_running");
  EXPECT_EQ(field("{\"page\":1}"), "page");
  EXPECT_EQ(field("{\"cost\":{\"token_us\":-1}}"), "token_us");
  EXPECT_EQ(field("{\"cost\":{\"tokn_us\":1}}"), "tokn_us");
  EXPECT_EQ(field("{\"groups\":[]}"), "groups");
  EXPECT_EQ(field("{\"max_step_ms\":\"x\"}"), "max_step_ms");
  EXPECT_EQ(field("{\"groups\":[{\"size\":3}]}"), "size");
  EXPECT_EQ(field("{\"index_mode\":\"table\"}"), "index_mode");
  EXPECT_EQ(field("{\"tenant_weights\":{\"a\":true}}"), "a");
}

TEST(CostModel, IsFoundAgainFromTheTimesOfItsSteps) {
  const StepCost truth{4000, 25, 0.0008, 15, 0.03, 40};
  std::mt19937 rng(3);
  std::vector<StepTime> steps;
  for (int i = 0; i < 400; ++i) {
    StepTime s;
    s.decodes = static_cast<double>(rng() % 64);
    s.decode_context = s.decodes * static_cast<double>(rng() % 2000);
    if (rng() % 2) s.prefill_tokens = static_cast<double>(rng() % 512);
    s.prefill_context = s.prefill_tokens * static_cast<double>(rng() % 2000);
    if (rng() % 4 == 0) s.moves = static_cast<double>(rng() % 100);
    s.seconds = step_seconds(s, truth) * (0.98 + 0.04 * static_cast<double>(rng() % 1000) / 1000);
    steps.push_back(s);
  }
  auto fit = fit_cost(steps);
  ASSERT_TRUE(fit.ok()) << fit.status().to_string();
  EXPECT_NEAR(fit->cost.fixed_us, truth.fixed_us, 0.05 * truth.fixed_us);
  EXPECT_NEAR(fit->cost.token_us, truth.token_us, 0.05 * truth.token_us);
  EXPECT_NEAR(fit->cost.context_us, truth.context_us, 0.1 * truth.context_us);
  EXPECT_NEAR(fit->cost.decode_token_us, truth.decode_token_us, 0.1 * truth.decode_token_us);
  EXPECT_NEAR(fit->cost.decode_context_us, truth.decode_context_us, 0.05 * truth.decode_context_us);
  EXPECT_NEAR(fit->cost.page_move_us, truth.page_move_us, 0.05 * truth.page_move_us);
  EXPECT_LT(fit->median_error, 0.02);
  EXPECT_TRUE(fit->moves_measured);
  Settings o;
  o.groups = {{64, 0}};
  EXPECT_TRUE(apply_json(to_json(*fit, "a test"), &o, "the fit").ok());
  EXPECT_NEAR(o.cost.token_us, truth.token_us, 0.05 * truth.token_us);

  steps.resize(10);
  EXPECT_FALSE(fit_cost(steps).ok());
  std::vector<StepTime> decodes(100, StepTime{.seconds = 0.01, .decodes = 4, .decode_context = 100});
  EXPECT_NE(fit_cost(decodes).status().message().find("prefills"), std::string::npos);
}

}  // namespace
}  // namespace kvasir::scheduler
