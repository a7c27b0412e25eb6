// Mixtures of experts on the GPU against the host's choice of experts and plain sums of what the rounded operands give.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "model/cuda/experts.h"
#include "model/formats/weight_type.h"
#include "tests/model/cuda_case.h"

namespace kvasir::model {
namespace {

using attention::cuda::DeviceMemory;
using cuda::ExpertLayers;
using CudaExperts = NeedsDevice;

float rounded(float x) { return bf16_to_f32(f32_to_bf16(x)); }

struct Case {
  Routing routing;
  int64_t hidden, ffn;
  Activation activation = Activation::silu;
  float limit = 0;
  bool bias = false, mxfp4 = false;
};

float joined(const Case& c, float gate, float up) {
  if (c.limit > 0) {
    gate = std::min(gate, c.limit), up = std::clamp(up, -c.limit, c.limit);
    return (up + 1) * gate / (1 + std::exp(-1.702f * gate));
  }
  if (c.activation == Activation::gelu_tanh)
    return 0.5f * gate * (1 + std::tanh(0.7978845608f * (gate + 0.044715f * gate * gate * gate))) * up;
  return gate / (1 + std::exp(-gate)) * up;
}

struct Matrices {
  std::vector<std::vector<float>> values, biases;  // by expert
  std::vector<std::unique_ptr<cuda::Weight>> weights;
  std::vector<std::unique_ptr<DeviceMemory>> device_biases;
  std::vector<ExpertLayers::Part> parts;

  Matrices(const Case& c, int64_t rows, int64_t cols, std::mt19937& random) {
    std::normal_distribution<float> normal(0, 1 / std::sqrt(float(cols)));
    for (int32_t e = 0; e < c.routing.experts; ++e) {
      if (c.mxfp4) {
        add_mxfp4(rows, cols, random);
        continue;
      }
      std::vector<uint16_t> half;
      for (int64_t i = 0; i < rows * cols; ++i) half.push_back(f32_to_bf16(normal(random)));
      std::vector<float>& v = values.emplace_back();
      for (uint16_t h : half) v.push_back(bf16_to_f32(h));
      cuda::Weight& w = *weights.emplace_back(std::make_unique<cuda::Weight>());
      w.rows = rows, w.cols = cols;
      EXPECT_TRUE(w.data.upload(half.data(), half.size() * 2).ok());
      std::vector<float>& b = biases.emplace_back(size_t(rows), 0.0f);
      parts.push_back({&w, nullptr});
      if (!c.bias) continue;
      for (float& x : b) x = normal(random);
      DeviceMemory& on = *device_biases.emplace_back(std::make_unique<DeviceMemory>());
      EXPECT_TRUE(on.upload(b.data(), b.size() * 4).ok());
      parts.back().bias = on.as<float>();
    }
  }
  void add_mxfp4(int64_t rows, int64_t cols, std::mt19937& random) {
    std::vector<uint8_t> blocks(size_t(rows * cols / 32 * 17));
    for (uint8_t& b : blocks) b = uint8_t(random());
    // Scales about 1/sqrt(cols), and of each matrix a few that are far from it.
    for (size_t i = 0; i < blocks.size(); i += 17) blocks[i] = uint8_t(120 + random() % 4);
    blocks[17] = 90, blocks[34] = 0;
    std::vector<float>& v = values.emplace_back(size_t(rows * cols));
    for (int64_t r = 0; r < rows; ++r)
      dequantize(WeightType::mxfp4, blocks.data() + r * cols / 32 * 17, cols, v.data() + r * cols);
    cuda::Weight& w = *weights.emplace_back(std::make_unique<cuda::Weight>());
    w.packing = cuda::Packing::mxfp4, w.rows = rows, w.cols = cols;
    EXPECT_TRUE(w.data.upload(blocks.data(), blocks.size()).ok());
    biases.emplace_back(size_t(rows), 0.0f);
    parts.push_back({&w, nullptr});
  }
  float dot(int32_t e, int64_t row, const float* x, int64_t cols) const {
    double sum = biases[size_t(e)][size_t(row)];
    for (int64_t i = 0; i < cols; ++i) sum += double(values[size_t(e)][size_t(row * cols + i)]) * double(x[i]);
    return float(sum);
  }
};

void check(const Case& c, std::initializer_list<int64_t> row_counts) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const Routing& r = c.routing;
  const Matrices up(c, 2 * c.ffn, c.hidden, random), down(c, c.hidden, c.ffn, random);
  ExpertLayers layers(*std::max_element(row_counts.begin(), row_counts.end()), false, nullptr);
  Experts experts{.routing = r, .activation = c.activation, .limit = c.limit, .slope = 1.702f};
  cuda::Upload upload(1, nullptr);
  auto id = layers.add(experts, 0, up.parts, down.parts, upload);
  ASSERT_TRUE(id.ok()) << id.status().message();
  std::vector<float> correction;
  for (int32_t e = 0; e < r.experts; ++e) correction.push_back(normal(random));
  DeviceMemory correction_there, in_there, logits_there, out_there;
  ASSERT_TRUE(correction_there.upload(correction.data(), correction.size() * 4).ok());
  for (int64_t rows : row_counts) {
    SCOPED_TRACE(cat(rows, " rows"));
    std::vector<uint16_t> in;
    std::vector<float> x, logits, before, got(size_t(rows * c.hidden));
    for (int64_t i = 0; i < rows * c.hidden; ++i)
      in.push_back(f32_to_bf16(normal(random))), x.push_back(bf16_to_f32(in.back()));
    // The first experts are chosen more often, the last one never by most rows.
    for (int64_t i = 0; i < rows * r.experts; ++i)
      logits.push_back(normal(random) - 3 * float(i % r.experts) / float(r.experts));
    for (int64_t i = 0; i < rows * c.hidden; ++i) before.push_back(normal(random));
    ASSERT_TRUE(in_there.upload(in.data(), in.size() * 2).ok());
    ASSERT_TRUE(logits_there.upload(logits.data(), logits.size() * 4).ok());
    ASSERT_TRUE(out_there.upload(before.data(), before.size() * 4).ok());
    const float* corrected = r.corrected ? correction.data() : nullptr;
    const Status ran =
        layers.run(*id, in_there.get(), logits_there.as<float>(), r.corrected ? correction_there.as<float>() : nullptr,
                   nullptr, rows, false, out_there.get());
    ASSERT_TRUE(ran.ok()) << ran.message();
    ASSERT_EQ(cudaMemcpy(got.data(), out_there.get(), got.size() * 4, cudaMemcpyDefault), cudaSuccess);
    std::vector<int32_t> chosen(static_cast<size_t>(r.used));
    std::vector<float> weights(static_cast<size_t>(r.used)), between(static_cast<size_t>(c.ffn));
    double worst = 0;
    for (int64_t t = 0; t < rows; ++t) {
      // All of a step's rows to the end of what is compared, in less time: every row of few, some of many.
      if (rows > 40 && t % 7 != 0 && t != rows - 1) continue;
      r.choose(logits.data() + t * r.experts, corrected, chosen.data(), weights.data());
      std::vector<float> want(before.begin() + t * c.hidden, before.begin() + (t + 1) * c.hidden);
      for (size_t k = 0; k < chosen.size(); ++k) {
        for (int64_t f = 0; f < c.ffn; ++f)
          between[size_t(f)] = rounded(joined(c, up.dot(chosen[k], f, x.data() + t * c.hidden, c.hidden),
                                              up.dot(chosen[k], c.ffn + f, x.data() + t * c.hidden, c.hidden)));
        for (int64_t i = 0; i < c.hidden; ++i)
          want[size_t(i)] += weights[k] * down.dot(chosen[k], i, between.data(), c.ffn);
      }
      for (int64_t i = 0; i < c.hidden; ++i)
        worst = std::max(worst, double(std::fabs(want[size_t(i)] - got[size_t(t * c.hidden + i)])));
    }
    EXPECT_LT(worst, 0.02);  // of numbers about 1: where rounding to bfloat16 fell on the other side
  }
}

constexpr std::initializer_list<int64_t> kRows = {1, 2, 5, 8, 9, 31, 64, 300};

TEST_F(CudaExperts, SumsAreThoseOfTheChosenOnes) {
  check({.routing = {.experts = 32, .used = 4, .normalized = true}, .hidden = 128, .ffn = 192}, kRows);
}

// Some experts here, the others elsewhere: the parts of both, rounded to bfloat16, add up to the sum of all.
TEST_F(CudaExperts, PartsOfTheExpertsAddUp) {
  for (bool mxfp4 : {false, true}) {
    const Case c{.routing = {.experts = 12, .used = 4, .normalized = true}, .hidden = 64, .ffn = 96, .mxfp4 = mxfp4};
    constexpr int64_t kMost = 300;
    auto layer = [&](int32_t first, int32_t count, std::unique_ptr<ExpertLayers>* to) {
      std::mt19937 random(7);  // the same matrices each time
      const Matrices up(c, 2 * c.ffn, c.hidden, random), down(c, c.hidden, c.ffn, random);
      *to = std::make_unique<ExpertLayers>(kMost, false, nullptr);
      auto of = [&](const Matrices& m) { return std::span(m.parts).subspan(size_t(first), size_t(count)); };
      cuda::Upload upload(1, nullptr);
      ASSERT_TRUE((*to)->add({.routing = c.routing}, first, of(up), of(down), upload).ok());
    };
    std::unique_ptr<ExpertLayers> all, parts[3];
    layer(0, 12, &all), layer(0, 5, &parts[0]), layer(5, 1, &parts[1]), layer(6, 6, &parts[2]);
    for (int64_t rows : {1, 3, 8, 40, 300}) {
      SCOPED_TRACE(rows);
      std::mt19937 random(9);
      std::normal_distribution<float> normal;
      std::vector<uint16_t> in, part(size_t(rows * c.hidden));
      std::vector<float> logits, want(part.size()), got(part.size());
      for (size_t i = 0; i < part.size(); ++i) in.push_back(f32_to_bf16(normal(random)));
      for (int64_t i = 0; i < rows * c.routing.experts; ++i) logits.push_back(normal(random));
      DeviceMemory in_there, logits_there, out;
      ASSERT_TRUE(in_there.upload(in.data(), in.size() * 2).ok());
      ASSERT_TRUE(logits_there.upload(logits.data(), logits.size() * 4).ok());
      ASSERT_TRUE(out.upload(want.data(), want.size() * 4).ok());
      auto run = [&](ExpertLayers& of, bool apart) {
        ASSERT_TRUE(of.run(0, in_there.get(), logits_there.as<float>(), nullptr, nullptr, rows, apart, out.get()).ok());
      };
      run(*all, false);
      ASSERT_EQ(cudaMemcpy(want.data(), out.get(), want.size() * 4, cudaMemcpyDefault), cudaSuccess);
      for (auto& one : parts) {
        run(*one, true);
        ASSERT_EQ(cudaMemcpy(part.data(), out.get(), part.size() * 2, cudaMemcpyDefault), cudaSuccess);
        for (size_t i = 0; i < part.size(); ++i) got[i] += bf16_to_f32(part[i]);
      }
      for (size_t i = 0; i < part.size(); ++i) EXPECT_NEAR(got[i], want[i], 0.02) << i;
    }
  }
}

TEST_F(CudaExperts, ShapesThatFillNoTile) {
  check({.routing = {.experts = 6, .used = 3}, .hidden = 72, .ffn = 80, .activation = Activation::gelu_tanh}, kRows);
  check({.routing = {.experts = 130, .used = 8, .normalized = true}, .hidden = 32, .ffn = 16}, kRows);
}

TEST_F(CudaExperts, FewExpertsOfManyRows) {
  check({.routing = {.experts = 4, .used = 2, .normalized = true}, .hidden = 96, .ffn = 112}, {300, 700});
}

TEST_F(CudaExperts, ScoresOfTheChosenBiasesAndLimits) {
  check({.routing = {.experts = 32, .used = 4, .scores_of = ExpertScores::of_chosen},
         .hidden = 64,
         .ffn = 96,
         .limit = 1,
         .bias = true},
        kRows);
}

TEST_F(CudaExperts, Mxfp4StaysPacked) {
  check({.routing = {.experts = 32, .used = 4, .normalized = true}, .hidden = 128, .ffn = 192, .mxfp4 = true}, kRows);
  check({.routing = {.experts = 8, .used = 2, .scores_of = ExpertScores::of_chosen},
         .hidden = 96,
         .ffn = 160,
         .limit = 2,
         .mxfp4 = true},
        {1, 8, 64, 700});
}

TEST_F(CudaExperts, SigmoidsCorrectedInGroups) {
  check({.routing = {.experts = 64,
                     .used = 6,
                     .scores_of = ExpertScores::sigmoid,
                     .normalized = true,
                     .corrected = true,
                     .scale = 2.5f,
                     .groups = 8,
                     .used_groups = 3},
         .hidden = 64,
         .ffn = 32},
        kRows);
}

// As DeepSeek V2 has it: a group is as good as its best expert.
TEST_F(CudaExperts, InGroupsByTheBestOfEach) {
  check({.routing = {.experts = 64, .used = 6, .group_best = 1, .scale = 16, .groups = 8, .used_groups = 3},
         .hidden = 64,
         .ffn = 32},
        kRows);
}

}  // namespace
}  // namespace kvasir::model
