// What requests change of their logits on a device, against the host's sampler: the same tokens, log-probabilities of
// the distribution before penalties and masks, the same likeliest tokens; rows that are scored, and rows drawn again.
#include "model/cuda/change.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "attention/cuda/memory.h"
#include "model/cuda/draw.h"
#include "model/cuda/kernels.h"
#include "model/cuda/redraw.h"
#include "model/draws.h"
#include "model/sampler.h"
#include "tests/model/cuda_case.h"

namespace kvasir::model {
namespace {

using attention::cuda::DeviceMemory;
using attention::cuda::PinnedMemory;
using Ids = std::vector<int32_t>;
using CudaChanges = NeedsDevice;

constexpr int32_t kVocab = 5003;

std::vector<SamplingParams> all_kinds() {
  std::vector<SamplingParams> out(14);
  for (SamplingParams& p : out) p.temperature = 0;
  out[1].logprobs = 0;
  out[2].logprobs = 1;
  out[3].logprobs = kMostDeviceTop;
  out[4].repetition_penalty = 1.7f;
  out[5].repetition_penalty = 0.6f, out[5].logprobs = 5;
  out[6].presence_penalty = 1.5f;
  out[7].frequency_penalty = 0.8f, out[7].logprobs = 2;
  out[8].logit_bias = {{7, 30.0f}, {8, -100.0f}}, out[8].logprobs = 3;
  out[9].repetition_penalty = 1.2f, out[9].presence_penalty = -0.7f, out[9].frequency_penalty = 0.3f;
  out[9].logit_bias = {{11, 2.5f}}, out[9].logprobs = 4;
  for (size_t i = 10; i < out.size(); ++i) {
    out[i] = out[i - 6];
    out[i].temperature = 0.9f, out[i].seed = i, out[i].top_p = i % 2 ? 0.8f : 1.0f, out[i].top_k = i % 3 ? 0 : 40;
  }
  return out;
}

using Bits = std::vector<uint32_t>;

// Of most tokens, of a few, of one, of none.
std::vector<Bits> all_masks() {
  std::mt19937 random(9);
  std::vector<Bits> out(4, Bits((kVocab + 31) / 32, 0));
  for (int32_t t = 0; t < kVocab; ++t) {
    if (random() % 10 != 0) out[0][size_t(t) / 32] |= 1u << (t % 32);
    if (random() % 300 == 0) out[1][size_t(t) / 32] |= 1u << (t % 32);
  }
  out[2][4999 / 32] = 1u << (4999 % 32);
  return out;
}

TEST_F(CudaChanges, TheHostSamplersTokensAndLogProbabilities) {
  std::mt19937 random(5);
  const std::vector<Bits> masks = all_masks();
  std::normal_distribution<float> normal(0, 3);
  const std::vector<SamplingParams> kinds = all_kinds();
  cuda::DeviceChanges there;
  for (int64_t count : {1, 14, 150}) {  // more than are counted at a time
    SCOPED_TRACE(count);
    std::vector<float> logits(size_t(count * kVocab));
    for (float& l : logits) l = std::round(normal(random) * 8) / 8;  // with equal ones
    std::vector<Ids> prompts, outputs;
    Ids before;
    std::vector<SampleRow> rows, known;
    std::vector<RefusesFirst> constraints;
    constraints.reserve(masks.size());
    for (const Bits& mask : masks) constraints.emplace_back(mask.data());
    cuda::Changes changes;
    for (int64_t i = 0; i < count; ++i) {
      Ids& prompt = prompts.emplace_back();
      Ids& output = outputs.emplace_back();
      for (uint32_t n = random() % 900; n > 0; --n) prompt.push_back(int32_t(random() % kVocab));
      for (uint32_t n = random() % 300; n > 0; --n) output.push_back(int32_t(random() % (n % 2 ? 20 : kVocab)));
      if (i % 5 == 1) prompt.push_back(-3), prompt.push_back(kVocab + 9);  // nobody's tokens
      before.push_back(int32_t(random() % 20));
    }
    for (int64_t i = 0; i < count; ++i) {
      SampleRow& row = rows.emplace_back();
      row.params = &kinds[size_t(i) % kinds.size()], row.choice = int32_t(i), row.position = 100 + i;
      row.prompt = prompts[size_t(i)], row.output = outputs[size_t(i)];
      if (i % 4 == 2) row.mask = masks[size_t(i / 4) % masks.size()].data();
      if (i % 7 == 5) row.score_only = true, row.target = i % 2 ? int32_t(i) : kVocab;
      if (i % 5 == 3) row.constraint = &constraints[size_t(i / 5) % constraints.size()];
      known.push_back(row);
      // The last token is known on the device alone, or on both, or there is none.
      if (i % 3 == 0) row.last = -1 - int32_t(i), known.back().last = before[size_t(i)];
      if (i % 3 == 1) row.last = known.back().last = 17;
      ASSERT_TRUE(draws_on_device(row, true));
      changes.add(i, count, row, kVocab);
    }
    std::vector<cuda::Wish> wishes;
    for (const SampleRow& row : rows) wishes.push_back(cuda::wish_of(row, kVocab));
    DeviceMemory on_device, wished, tokens, drawn_before;
    PinnedMemory drawn, top;
    ASSERT_TRUE(on_device.upload(logits.data(), logits.size() * 4).ok());
    ASSERT_TRUE(wished.upload(wishes.data(), wishes.size() * sizeof(cuda::Wish)).ok());
    ASSERT_TRUE(drawn_before.upload(before.data(), before.size() * 4).ok());
    ASSERT_TRUE(tokens.allocate(size_t(count) * 4).ok());
    ASSERT_TRUE(drawn.allocate(size_t(count) * sizeof(DeviceDraw)).ok());
    ASSERT_TRUE(top.allocate(size_t(count) * kMostDeviceTop * sizeof(TokenLogprob)).ok());
    EXPECT_EQ(there.has_room(changes), count == 1);  // whose row changes nothing
    ASSERT_TRUE(there.make_room(changes, 150, kVocab, nullptr).ok());
    EXPECT_TRUE(there.has_room(changes));
    ASSERT_TRUE(there.upload(changes, nullptr).ok());
    cuda::DeviceRedraw redraw;
    std::vector<DeviceDraw> again(static_cast<size_t>(count));
    // In two parts, as the logits of many rows come.
    for (int64_t first = 0, part = (count + 1) / 2; first < count; first += part) {
      const int64_t n = std::min(part, count - first);
      float* at = on_device.as<float>() + first * kVocab;
      auto* out = drawn.as<DeviceDraw>() + first;
      auto* ids = tokens.as<int32_t>() + first;
      const auto* b = drawn_before.as<int32_t>();
      ASSERT_TRUE(there.bias(changes, at, first, n, kVocab, nullptr).ok());
      cuda::launch_greatest(at, out, ids, n, kVocab, nullptr);
      ASSERT_TRUE(there
                      .before_draw(changes, at, out, b, top.as<TokenLogprob>() + first * kMostDeviceTop, first, n,
                                   kVocab, nullptr)
                      .ok());
      cuda::launch_greatest(at, out, ids, n, kVocab, nullptr);
      cuda::launch_draw(at, wished.as<cuda::Wish>() + first, out, ids, n, kVocab, nullptr);
      ASSERT_TRUE(there.after_draw(changes, at, b, out, ids, first, n, kVocab, nullptr).ok());
      std::vector<MaskedRow> refused;
      for (int64_t i = first; i < first + n; ++i)
        if (SampleRow& row = rows[size_t(i)]; row.constraint && !row.score_only)
          refused.push_back({i, &row, row.constraint->mask()});
      std::vector<DeviceDraw> redrawn(refused.size());
      ASSERT_TRUE(redraw.run({at, first, n, kVocab, b}, there, refused, redrawn, nullptr).ok());
      for (size_t k = 0; k < refused.size(); ++k) again[size_t(refused[k].at)] = redrawn[k];
    }
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    Sampler sampler(kVocab);
    for (int64_t i = 0; i < count; ++i) {
      SCOPED_TRACE(i);
      Sampled want;
      Sampler::Refused refused;
      ASSERT_TRUE(sampler.sample({logits.data() + i * kVocab, size_t(kVocab)}, known[size_t(i)], want, refused));
      const bool constrained = rows[size_t(i)].constraint && !rows[size_t(i)].score_only;
      const DeviceDraw& first = drawn.as<DeviceDraw>()[i];
      const DeviceDraw& got = constrained && !first.nothing_allowed ? again[size_t(i)] : first;
      EXPECT_EQ(got.nothing_allowed != 0, want.nothing_allowed);
      if (!want.nothing_allowed) {
        EXPECT_EQ(got.token, want.token);
        EXPECT_NEAR(got.logprob, want.logprob, 1e-4);
      }
      for (size_t k = 0; k < want.top.size(); ++k) {
        const TokenLogprob& t = top.as<TokenLogprob>()[size_t(i) * kMostDeviceTop + k];
        EXPECT_EQ(t.token, want.top[k].token) << k;
        EXPECT_NEAR(t.logprob, want.top[k].logprob, 1e-4) << k;
      }
    }
  }
}

// A mask that is there already is not copied again, and one that has changed is.
TEST_F(CudaChanges, MasksFollowTheirRows) {
  Bits one(size_t(kVocab + 31) / 32, 0), other = one, third = one;
  one[0] = 1u << 5, other[0] = 1u << 6, third[0] = 1u << 7;
  SamplingParams greedy;
  greedy.temperature = 0;
  DeviceMemory logits, tokens;
  PinnedMemory drawn;
  ASSERT_TRUE(tokens.allocate(2 * 4).ok());
  ASSERT_TRUE(drawn.allocate(2 * sizeof(DeviceDraw)).ok());
  cuda::DeviceChanges there;
  auto tokens_under = [&](const std::vector<const uint32_t*>& masks) {
    const std::vector<float> flat(size_t(2 * kVocab), 1.0f);
    EXPECT_TRUE(logits.upload(flat.data(), flat.size() * 4).ok());
    cuda::Changes changes;
    const auto n = std::ssize(masks);
    for (int64_t i = 0; i < n; ++i) changes.add(i, n, {.params = &greedy, .mask = masks[size_t(i)]}, kVocab);
    EXPECT_TRUE(there.make_room(changes, 2, kVocab, nullptr).ok());
    EXPECT_TRUE(there.upload(changes, nullptr).ok());
    auto* out = drawn.as<DeviceDraw>();
    cuda::launch_greatest(logits.as<float>(), out, tokens.as<int32_t>(), n, kVocab, nullptr);
    EXPECT_TRUE(there.before_draw(changes, logits.as<float>(), out, nullptr, nullptr, 0, n, kVocab, nullptr).ok());
    cuda::launch_greatest(logits.as<float>(), out, tokens.as<int32_t>(), n, kVocab, nullptr);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    Ids ids;
    for (int64_t i = 0; i < n; ++i) ids.push_back(out[i].token);
    return ids;
  };
  EXPECT_EQ(tokens_under({one.data(), other.data()}), (Ids{5, 6}));
  EXPECT_EQ(tokens_under({other.data(), one.data()}), (Ids{6, 5}));
  EXPECT_EQ(tokens_under({one.data(), one.data()}), (Ids{5, 5}));
  EXPECT_EQ(tokens_under({third.data()}), (Ids{7}));
  one[0] = 1u << 9;  // the same place, another mask
  EXPECT_EQ(tokens_under({one.data(), nullptr}), (Ids{9, 0}));
  EXPECT_EQ(tokens_under({third.data(), one.data()}), (Ids{7, 9}));
}

}  // namespace
}  // namespace kvasir::model
