// What goes to a device by stages arrives whole, in its place and in the stream's order.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "model/cuda/upload.h"
#include "tests/model/cuda_case.h"

namespace kvasir::model {
namespace {

using CudaUpload = NeedsDevice;  // skipped without a device

uint8_t byte_at(int64_t i) { return uint8_t(i * 131 + (i >> 16)); }

TEST_F(CudaUpload, ManyStagesOfUnevenUnits) {
  constexpr int64_t kBytes = (int64_t(150) << 20) + 12345, kUnit = 1000003;
  attention::cuda::DeviceMemory to;
  ASSERT_TRUE(to.allocate(size_t(kBytes)).ok());
  cuda::Upload upload(3, nullptr);
  ASSERT_TRUE(upload
                  .write(to.get(), kBytes, kUnit,
                         [&](int64_t at, int64_t size, std::byte* out) {
                           ASSERT_EQ(at % kUnit, 0);
                           ASSERT_EQ(size, std::min(kUnit, kBytes - at));
                           for (int64_t i = 0; i < size; ++i) out[i] = std::byte(byte_at(at + i));
                         })
                  .ok());
  std::vector<uint8_t> back(static_cast<size_t>(kBytes));
  ASSERT_EQ(cudaMemcpy(back.data(), to.get(), back.size(), cudaMemcpyDefault), cudaSuccess);
  for (int64_t i = 0; i < kBytes; ++i) ASSERT_EQ(back[size_t(i)], byte_at(i)) << i;
}

TEST_F(CudaUpload, AUnitWiderThanAStage) {
  constexpr int64_t kBytes = int64_t(80) << 20;
  std::vector<uint8_t> from(kBytes);
  for (int64_t i = 0; i < kBytes; ++i) from[size_t(i)] = byte_at(i);
  attention::cuda::DeviceMemory to;
  ASSERT_TRUE(to.allocate(size_t(kBytes)).ok());
  cuda::Upload upload(2, nullptr);
  ASSERT_TRUE(upload
                  .write(to.get(), kBytes, kBytes / 2,
                         [&](int64_t at, int64_t size, std::byte* out) {
                           std::copy_n(reinterpret_cast<const std::byte*>(from.data()) + at, size, out);
                         })
                  .ok());
  std::vector<uint8_t> back(kBytes);
  ASSERT_EQ(cudaMemcpy(back.data(), to.get(), back.size(), cudaMemcpyDefault), cudaSuccess);
  EXPECT_EQ(back, from);
}

TEST_F(CudaUpload, EveryOtherBlock) {
  constexpr int64_t kBlock = 48, kUnit = 10 * kBlock, kBytes = 3 * kUnit;
  attention::cuda::DeviceMemory to;
  ASSERT_TRUE(to.allocate(2 * kBytes).ok());
  cuda::Upload upload(2, nullptr);
  for (int64_t which : {0, 1})
    ASSERT_TRUE(upload
                    .write_spaced(to.bytes() + which * kBlock, kBytes, kUnit, kBlock,
                                  [&](int64_t at, int64_t size, std::byte* out) {
                                    for (int64_t i = 0; i < size; ++i) out[i] = std::byte(byte_at(at + i) ^ which);
                                  })
                    .ok());
  std::vector<uint8_t> back(2 * kBytes);
  ASSERT_EQ(cudaMemcpy(back.data(), to.get(), back.size(), cudaMemcpyDefault), cudaSuccess);
  for (int64_t i = 0; i < 2 * kBytes; ++i) {
    const int64_t block = i / kBlock;
    ASSERT_EQ(back[size_t(i)], byte_at(block / 2 * kBlock + i % kBlock) ^ (block % 2)) << i;
  }
}

}  // namespace
}  // namespace kvasir::model
