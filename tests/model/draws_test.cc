#include "model/draws.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "model/sampler.h"

namespace kvasir::model {
namespace {

// Rows that a device decided are taken as they are; only the others have logits on the host.
TEST(Draws, TakesWhatTheDeviceFound) {
  constexpr int32_t kVocab = 8;
  std::vector<SamplingParams> params(9);
  for (SamplingParams& p : params) p.temperature = 0;
  params[1].temperature = 1, params[1].typical_p = 0.5f;
  params[2].logprobs = 0;
  params[3].repetition_penalty = 1.5f;
  params[4].presence_penalty = 1;
  params[5].frequency_penalty = 1;
  params[6].logit_bias = {{2, 50.0f}};
  std::vector<SampleRow> rows;
  for (const SamplingParams& p : params) rows.push_back({.params = &p});
  const uint32_t mask = 1u << 3;
  rows[7].mask = &mask;
  rows[8].score_only = true, rows[8].target = 1;
  SamplingParams random;
  random.top_k = 40, random.top_p = 0.9f, random.min_p = 0.1f;
  rows.push_back({.params = &random});
  rows.push_back(rows[0]);
  Batch batch;
  batch.tokens = {0};
  batch.logit_rows.assign(rows.size(), 0);
  ThreadPool pool(2);
  Draws draws(kVocab, pool.threads());
  ASSERT_TRUE(draws.begin(batch, rows).ok());
  const int64_t count = int64_t(rows.size());
  std::vector<float> logits(size_t(count * kVocab), 0.0f);
  std::vector<DeviceDraw> found(size_t(count), DeviceDraw{7, -0.5f, 0});
  found.back().bad_logits = 1;
  for (int64_t i = 0; i < count; ++i) {
    EXPECT_EQ(draws.for_device(i), i < 2 || i + 2 >= count) << "row " << i;
    logits[size_t(i * kVocab + 4)] = 30;  // what the host would take
  }
  ASSERT_TRUE(draws.draw(pool, logits.data(), kVocab, count, {.draws = found.data()}).ok());
  draws.end();
  const std::vector<Sampled> drawn = draws.take();
  EXPECT_EQ(drawn[0].token, 7);
  EXPECT_EQ(drawn[0].logprob, -0.5f);
  EXPECT_EQ(drawn[1].token, 7);
  for (size_t i : {2, 3, 4, 5}) EXPECT_EQ(drawn[i].token, 4) << "row " << i;
  EXPECT_EQ(drawn[6].token, 2);
  EXPECT_EQ(drawn[7].token, 3);
  EXPECT_EQ(drawn[8].token, 1);
  EXPECT_EQ(drawn[9].token, 7);
  EXPECT_TRUE(drawn.back().bad_logits);
}

// A device that changes logits itself draws for whoever wants no more of the host than that, and says the likeliest.
TEST(Draws, ADeviceThatChangesLogits) {
  constexpr int32_t kVocab = 64;
  std::vector<SamplingParams> params(8);
  for (SamplingParams& p : params) p.temperature = 0;
  params[0].logprobs = 2;
  params[1].repetition_penalty = 1.5f, params[1].presence_penalty = 1, params[1].frequency_penalty = 1;
  params[2].logit_bias = {{2, 50.0f}};
  params[3].logprobs = kMostDeviceTop + 1;
  params[4].top_n_sigma = 1, params[4].temperature = 1;
  params[7].typical_p = 0.5f, params[7].temperature = 1, params[7].top_k = 5000;
  std::vector<SampleRow> rows;
  for (const SamplingParams& p : params) rows.push_back({.params = &p});
  const uint32_t mask[] = {1u << 3, 0};
  rows[5].mask = mask;
  rows[6].score_only = true, rows[6].target = 1;
  Batch batch;
  batch.tokens = {0};
  batch.logit_rows.assign(rows.size(), 0);
  Draws draws(kVocab, 1, true);
  ASSERT_TRUE(draws.begin(batch, rows).ok());
  for (int64_t i = 0; i < std::ssize(rows); ++i) EXPECT_EQ(draws.for_device(i), i != 3) << i;
  std::vector<float> logits(rows.size() * kVocab, 0.0f);
  const std::vector<DeviceDraw> found(rows.size(), DeviceDraw{7, -0.5f, 0});
  std::vector<TokenLogprob> top(rows.size() * kMostDeviceTop, {-1, 0});
  top[0] = {9, -0.25f}, top[1] = {7, -0.5f};
  ThreadPool pool(1);
  ASSERT_TRUE(
      draws.draw(pool, logits.data(), kVocab, std::ssize(rows), {.draws = found.data(), .top = top.data()}).ok());
  draws.end();
  const std::vector<Sampled> drawn = draws.take();
  ASSERT_EQ(drawn[0].top.size(), 2u);
  EXPECT_EQ(drawn[0].top[0].token, 9);
  EXPECT_EQ(drawn[0].top[1].logprob, -0.5f);
  EXPECT_EQ(drawn[1].token, 7);
  EXPECT_TRUE(drawn[1].top.empty());
  EXPECT_EQ(drawn[3].top.size(), size_t(kMostDeviceTop + 1));
  for (size_t i : {4, 5, 6, 7}) EXPECT_EQ(drawn[i].token, 7) << "as the device says";
}

// Its k-th token has the remainder k by three; its masks come when they have been asked for so many times.
class ByThrees final : public Constraint {
 public:
  ByThrees(int32_t vocab, int late, int64_t dead_end) : vocab_(vocab), late_(late), dead_end_(dead_end) {}
  bool take(int32_t token, bool) override {
    if (token % 3 != taken_ % 3) return false;
    ++taken_;
    return true;
  }
  const uint32_t* mask() override {
    if (late_-- > 0) return nullptr;
    bits_.assign(size_t(vocab_ + 31) / 32, 0);
    for (int32_t t = 0; t < vocab_ && taken_ != dead_end_; ++t)
      if (t % 3 == taken_ % 3) bits_[size_t(t) / 32] |= 1u << (t % 32);
    return bits_.data();
  }

 private:
  const int32_t vocab_;
  int late_;
  const int64_t dead_end_;
  int64_t taken_ = 0;
  std::vector<uint32_t> bits_;
};

// Refuses whatever is drawn first.
class Only final : public Constraint {
 public:
  explicit Only(const uint32_t* mask) : mask_(mask) {}
  bool take(int32_t, bool masked) override { return masked; }
  const uint32_t* mask() override { return mask_; }

 private:
  const uint32_t* mask_;
};

// A device's draws go by the constraints as the host's do, and are repeated where those refuse them: the same tokens,
// whether rows stand alone or behind one another, their masks come at once, while they are waited for, or too late.
TEST(Draws, WhatAConstraintRefusesIsDrawnAgainOnTheDevice) {
  constexpr int32_t kVocab = 200;
  constexpr int64_t kChains = 60, kLength = 3, kRows = kChains * kLength;
  std::vector<SamplingParams> params(static_cast<size_t>(kChains));
  std::vector<float> logits;
  for (int64_t i = 0; i < kRows * kVocab; ++i) logits.push_back(float((i * i + 7 * i) % 113) / 30);
  const std::vector<int32_t> history{4, 5, 5, 6};
  Batch batch;
  batch.tokens = {0};
  batch.logit_rows.assign(size_t(kRows), 0);
  int waited = 0;
  batch.wait_for_masks = [&waited] { ++waited; };
  std::vector<uint32_t> some((kVocab + 31) / 32, 0xfffffff7u);
  ThreadPool pool(2);
  std::vector<int32_t> expected;  // what drafts say: now and then it is right
  auto draw = [&](bool device) {
    std::vector<ByThrees> constraints;
    constraints.reserve(size_t(kChains));
    for (int64_t c = 0; c < kChains; ++c) constraints.emplace_back(kVocab, int(c % 4), c % 7 == 6 ? c / 7 % 2 : -1);
    std::vector<SampleRow> rows(static_cast<size_t>(kRows));
    for (int64_t r = 0; r < kRows; ++r) {
      const int64_t c = r / kLength;
      SamplingParams& p = params[size_t(c)];
      p.seed = uint64_t(c), p.temperature = c % 3 ? 1.0f : 0.0f, p.frequency_penalty = c % 5 ? 0.0f : 0.7f;
      SampleRow& row = rows[size_t(r)];
      row.params = &p, row.position = r, row.output = history;
      if (c % 10 != 9) row.constraint = &constraints[size_t(c)];  // the others are drawn freely
      if (c % 4 == 0) row.mask = some.data();
      if (r % kLength != 0 && row.constraint) row.after = expected.empty() ? 0 : expected[size_t(r - 1)];
    }
    Draws draws(kVocab, pool.threads(), device);
    EXPECT_TRUE(draws.begin(batch, rows).ok());
    std::vector<float> copy = logits;
    Said said;
    Sampler sampler(kVocab);
    auto as_device = [&](SampleRow row, int64_t at, Constraint* constraint) {
      row.constraint = constraint, row.after = -1;
      std::vector<float> own(logits.begin() + at * kVocab, logits.begin() + (at + 1) * kVocab);
      Sampled out;
      Sampler::Refused refused;
      EXPECT_TRUE(sampler.sample(own, row, out, refused));
      return DeviceDraw{out.token, out.logprob, out.bad_logits, out.nothing_allowed};
    };
    std::vector<DeviceDraw> found;
    int64_t redrawn = 0;
    const Redraw redraw = [&](std::span<const MaskedRow> again, std::span<DeviceDraw> out) {
      redrawn += std::ssize(again);
      for (size_t k = 0; k < again.size(); ++k) {
        Only only(again[k].mask);
        out[k] = as_device(*again[k].row, again[k].at, &only);
      }
      return Status();
    };
    for (int64_t r = 0; device && r < kRows; ++r) {
      EXPECT_TRUE(draws.for_device(r));
      found.push_back(as_device(rows[size_t(r)], r, nullptr));
    }
    // In two pieces, between which a chain goes on.
    for (const int64_t count : {int64_t(40), kRows - 40}) {
      if (device) said = {.draws = found.data() + draws.rows_drawn(), .redraw = &redraw};
      EXPECT_TRUE(draws.draw(pool, copy.data() + draws.rows_drawn() * kVocab, kVocab, count, said).ok());
    }
    EXPECT_EQ(redrawn > 0, device);
    draws.end();
    return draws.take();
  };
  for (int times = 0; times < 4; ++times) {
    const std::vector<Sampled> want = draw(false), got = draw(true);
    int64_t late = 0, dead = 0, drawn = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      EXPECT_EQ(got[i].token, want[i].token) << i;
      EXPECT_EQ(got[i].late, want[i].late) << i;
      EXPECT_EQ(got[i].nothing_allowed, want[i].nothing_allowed) << i;
      if (want[i].token >= 0) {
        EXPECT_EQ(got[i].logprob, want[i].logprob) << i;
      }
      late += want[i].late, dead += want[i].nothing_allowed, drawn += want[i].token >= 0;
    }
    EXPECT_GT(late, 0);
    EXPECT_GT(dead, 0);
    EXPECT_GT(drawn, kChains);
    expected.clear();
    for (size_t i = 0; i < want.size(); ++i) expected.push_back(i % 4 == 3 ? 0 : std::max(0, want[i].token));
  }
  EXPECT_GT(waited, 0);
}

// A device that fails while it draws again fails the launch.
TEST(Draws, ADeviceThatCannotDrawAgain) {
  constexpr int32_t kVocab = 8;
  SamplingParams params;
  const uint32_t mask = 1u << 3;
  Only only(&mask);
  const std::vector<SampleRow> rows{{.params = &params, .constraint = &only}};
  Batch batch;
  batch.tokens = {0};
  batch.logit_rows = {0};
  Draws draws(kVocab, 1, true);
  ASSERT_TRUE(draws.begin(batch, rows).ok());
  ThreadPool pool(1);
  const DeviceDraw found{1, -1, 0, 0};
  const Redraw broken = [](std::span<const MaskedRow>, std::span<DeviceDraw>) { return internal_error("it broke"); };
  EXPECT_EQ(draws.draw(pool, nullptr, kVocab, 1, {.draws = &found, .redraw = &broken}).code(), Code::internal);
}

// A launch that follows one in flight: its tokens name samples until these are drawn, its histories go on with them.
TEST(Draws, FollowALaunchInFlight) {
  constexpr int32_t kVocab = 8;
  SamplingParams params;
  params.temperature = 0, params.presence_penalty = 2;
  Batch first, second;
  first.tokens = {1, 2};
  first.logit_rows = {0, 1};
  second.tokens = {previous_sample(1), 5, previous_sample(0)};
  second.logit_rows = {0};
  const std::vector<SampleRow> rows(2, {.params = &params});
  std::vector<SampleRow> last(1, {.params = &params});
  ThreadPool pool(1);
  Draws a(kVocab, 1), b(kVocab, 1);
  ASSERT_TRUE(a.begin(first, rows, nullptr).ok());
  ASSERT_TRUE(b.begin(second, last, &a).ok());
  EXPECT_EQ(b.tokens(), second.tokens) << "not drawn yet";
  std::vector<float> logits(2 * kVocab, 0.0f);
  logits[6] = 1, logits[kVocab + 3] = 1;
  ASSERT_TRUE(a.draw(pool, logits.data(), kVocab, 2).ok());
  last[0].last = previous_sample(1);
  ASSERT_TRUE(b.begin(second, last, &a).ok());
  EXPECT_EQ(b.tokens(), (std::vector<int32_t>{3, 5, 6}));
  std::vector<float> more(kVocab, 0.0f);
  more[3] = 1, more[4] = 0.5f;
  ASSERT_TRUE(b.draw(pool, more.data(), kVocab, 1).ok());
  b.end();
  EXPECT_EQ(b.take()[0].token, 4) << "3 was drawn before";
}

}  // namespace
}  // namespace kvasir::model
