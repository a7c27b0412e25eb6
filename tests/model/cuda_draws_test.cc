// Tokens that a GPU draws of rows of logits, against the host's.
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

#include "attention/cuda/memory.h"
#include "core/cat.h"
#include "model/cuda/draw.h"
#include "model/cuda/kernels.h"
#include "model/draws.h"
#include "model/sampler.h"
#include "tests/model/cuda_case.h"

namespace kvasir::model {
namespace {

using CudaDraws = NeedsDevice;

TEST_F(CudaDraws, TheGreatestIsTheOneThatTheHostFinds) {
  constexpr int32_t kRows = 64;
  std::mt19937 random(11);
  std::normal_distribution<float> normal(0, 4);
  for (int32_t vocab : {1, 31, 1000, 1024, 49152}) {
    std::vector<float> logits(size_t(kRows * vocab));
    for (float& x : logits) x = std::round(normal(random) * 4) / 4;  // equal ones are common
    for (int32_t row = 0; row < kRows; ++row) {
      float* x = logits.data() + int64_t(row) * vocab;
      const auto at = size_t(random() % size_t(vocab));
      if (row % 8 == 1) x[at] = std::numeric_limits<float>::quiet_NaN();
      if (row % 8 == 2) x[at] = std::numeric_limits<float>::infinity();
      if (row % 8 == 3) x[at] = -std::numeric_limits<float>::infinity();
      if (row % 8 == 4)
        for (int32_t i = 0; i < vocab; ++i) x[i] = random() % 2 ? 0.0f : -0.0f;
      if (row % 8 == 5) std::fill_n(x, vocab, -3000.0f);
      if (row % 8 == 6)
        for (int32_t i = 0; i < vocab; ++i) x[i] -= 1000;
    }
    attention::cuda::DeviceMemory there, tokens;
    attention::cuda::PinnedMemory found;
    ASSERT_TRUE(tokens.allocate(kRows * sizeof(int32_t)).ok());
    ASSERT_TRUE(there.upload(logits.data(), logits.size() * 4).ok());
    ASSERT_TRUE(found.allocate(kRows * sizeof(DeviceDraw)).ok());
    cuda::launch_greatest(there.as<float>(), found.as<DeviceDraw>(), tokens.as<int32_t>(), kRows, vocab, nullptr);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    std::vector<int32_t> next(kRows);
    ASSERT_EQ(cudaMemcpy(next.data(), tokens.get(), kRows * sizeof(int32_t), cudaMemcpyDefault), cudaSuccess);
    Sampler sampler(vocab);
    SamplingParams params;
    params.temperature = 0;
    for (int32_t row = 0; row < kRows; ++row) {
      const DeviceDraw& got = found.as<DeviceDraw>()[row];
      Sampled want;
      Sampler::Refused refused;
      sampler.sample({logits.data() + int64_t(row) * vocab, size_t(vocab)}, {.params = &params}, want, refused);
      ASSERT_EQ(bool(got.bad_logits), want.bad_logits) << "row " << row << " of " << vocab;
      EXPECT_EQ(next[size_t(row)], want.bad_logits ? 0 : want.token);
      if (want.bad_logits) continue;
      EXPECT_EQ(got.token, want.token) << "row " << row << " of " << vocab;
      EXPECT_NEAR(got.logprob, want.logprob, 1e-3) << "row " << row << " of " << vocab;
    }
  }
}

// Draws by temperature, top-k, top-n-sigma, typical-p, top-p and min-p, of rows with many equal logits, sharp ones and
// flat ones. The host weighs with other roundings, so that a random number next to a border may fall on its other side.
TEST_F(CudaDraws, DrawsAreTheOnesOfTheHost) {
  constexpr int32_t kRows = 192;
  std::mt19937 random(23);
  std::normal_distribution<float> normal;
  int64_t all = 0, other = 0;
  for (int32_t vocab : {1, 33, 1000, 49152, 128256}) {
    std::vector<float> logits(size_t(kRows) * size_t(vocab));
    std::vector<SamplingParams> params(kRows);
    std::vector<cuda::Wish> wishes(kRows);
    std::vector<SampleRow> rows(kRows);
    for (int32_t row = 0; row < kRows; ++row) {
      const float spread = std::array{0.3f, 1.0f, 3.0f, 8.0f}[size_t(row % 4)];
      for (int32_t i = 0; i < vocab; ++i) {
        float x = normal(random) * spread;
        if (row % 3 == 0) x = std::round(x);
        if (row == 5) x = -7;
        logits[size_t(row) * size_t(vocab) + size_t(i)] = x;
      }
      SamplingParams& p = params[size_t(row)];
      p.seed = random();
      p.temperature = std::array{1.0f, 0.7f, 1.5f, 1e-9f, 0.05f}[size_t(row % 5)];
      p.top_p = std::array{1.0f, 0.9f, 0.3f, 0.999f}[size_t(row / 5 % 4)];
      p.top_k = std::array{0, 0, 1, 40, 1000, 1024, 3}[size_t(row / 2 % 7)];
      if (row >= kRows / 2) {
        p.typical_p = std::array{1.0f, 0.9f, 0.2f, 0.999f, 1.0f}[size_t(row / 3 % 5)];
        p.top_n_sigma = std::array{0.0f, 0.0f, 1.5f, 0.5f, 4.0f}[size_t(row / 7 % 5)];
        if (row % 6 == 0) p.top_k = 3000;  // more than are sorted
      }
      p.min_p = std::array{0.0f, 0.1f, 0.0f, 0.5f}[size_t(row / 4 % 4)];
      rows[size_t(row)].params = &p, rows[size_t(row)].choice = row % 3, rows[size_t(row)].position = row * 7;
      if (row % 11 != 10) wishes[size_t(row)] = cuda::wish_of(rows[size_t(row)], vocab);
    }
    logits[size_t(7) * size_t(vocab)] = std::numeric_limits<float>::quiet_NaN();
    attention::cuda::DeviceMemory there, tokens, asked;
    attention::cuda::PinnedMemory found;
    ASSERT_TRUE(there.upload(logits.data(), logits.size() * 4).ok());
    ASSERT_TRUE(asked.upload(wishes.data(), wishes.size() * sizeof(cuda::Wish)).ok());
    ASSERT_TRUE(tokens.allocate(kRows * sizeof(int32_t)).ok());
    ASSERT_TRUE(found.allocate(kRows * sizeof(DeviceDraw)).ok());
    cuda::launch_greatest(there.as<float>(), found.as<DeviceDraw>(), tokens.as<int32_t>(), kRows, vocab, nullptr);
    cuda::launch_draw(there.as<float>(), asked.as<cuda::Wish>(), found.as<DeviceDraw>(), tokens.as<int32_t>(), kRows,
                      vocab, nullptr);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    std::vector<int32_t> next(kRows);
    ASSERT_EQ(cudaMemcpy(next.data(), tokens.get(), kRows * sizeof(int32_t), cudaMemcpyDefault), cudaSuccess);
    Sampler sampler(vocab);
    for (int32_t row = 0; row < kRows; ++row) {
      SCOPED_TRACE(cat("row ", row, " of ", vocab));
      const DeviceDraw& got = found.as<DeviceDraw>()[row];
      if (row % 11 == 10) params[size_t(row)].temperature = 0;  // without a wish: the greatest
      Sampled want;
      Sampler::Refused refused;
      std::vector<float> copy(logits.begin() + int64_t(row) * vocab, logits.begin() + int64_t(row + 1) * vocab);
      sampler.sample(copy, rows[size_t(row)], want, refused);
      ASSERT_EQ(bool(got.bad_logits), want.bad_logits);
      if (want.bad_logits) continue;
      EXPECT_EQ(next[size_t(row)], got.token);
      ASSERT_GE(got.token, 0);
      ASSERT_LT(got.token, vocab);
      ++all, other += got.token != want.token;
      if (got.token == want.token)
        EXPECT_NEAR(got.logprob, want.logprob, 2e-3);
      else
        std::printf("another token: row %d of %d, %d instead of %d\n", row, vocab, got.token, want.token);
    }
  }
  EXPECT_LE(other, all / 100) << "of " << all;
}

}  // namespace
}  // namespace kvasir::model
