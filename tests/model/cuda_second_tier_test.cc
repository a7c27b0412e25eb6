// Moves between the tiers on their own stream, in any order, beside a host that makes them one after another: what a
// later move or a later kernel reads is what the order says.
#include "model/cuda/second_tier.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "tests/model/cuda_case.h"

namespace kvasir::model::cuda {
namespace {

using attention::cuda::DeviceMemory;
using kvcache::PageMove;
using CudaSecondTier = NeedsDevice;

struct Sizes {
  int64_t stretches, page;                      // of elements
  int64_t scale_stretches = 0, scale_page = 0;  // of scales
};

// Both tiers on the host, and the device's pages as the arrays have them.
class Tiers {
 public:
  Tiers(const Sizes& sizes, int device_pages, int host_pages)
      : device_(size_t(device_pages)), host_(size_t(host_pages)) {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    PagedArrays arrays;
    arrays[0] = {nullptr, sizes.stretches, sizes.page * device_pages, sizes.page};
    arrays[1] = {nullptr, sizes.scale_stretches, sizes.scale_page * device_pages, sizes.scale_page};
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(memory_[i].allocate(size_t(arrays[i].stretches * arrays[i].pitch)).ok());
      arrays[i].base = memory_[i].as<uint8_t>();
    }
    arrays_ = arrays;
    auto made = SecondTier::make(arrays, host_pages);
    EXPECT_TRUE(made.ok()) << made.status().to_string();
    tier_ = std::move(*made);
    for (int p = 0; p < device_pages; ++p) write(p, p);
    for (int p = 0; p < host_pages; ++p) move({{p % device_pages, p, true}});
  }
  ~Tiers() { cudaStreamDestroy(stream_); }

  // As a step would: all of a page, on the stream.
  void write(int page, int value) {
    device_[size_t(page)] = value;
    for (const PagedArray& a : arrays_)
      for (int64_t s = 0; s < a.stretches; ++s)
        EXPECT_EQ(cudaMemsetAsync(a.base + s * a.pitch + page * a.page, byte_of(value, s), size_t(a.page), stream_),
                  cudaSuccess);
  }

  void move(const std::vector<PageMove>& moves) {
    for (const PageMove& m : moves)
      (m.to_host ? host_[size_t(m.host)] : device_[size_t(m.device)]) =
          m.to_host ? device_[size_t(m.device)] : host_[size_t(m.host)];
    const Status s = tier_->move(moves, stream_);
    EXPECT_TRUE(s.ok()) << s.to_string();
  }

  void expect_alike() {
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    for (const PagedArray& a : arrays_) {
      std::vector<uint8_t> all(size_t(a.stretches * a.pitch));
      ASSERT_EQ(cudaMemcpy(all.data(), a.base, all.size(), cudaMemcpyDeviceToHost), cudaSuccess);
      for (int64_t s = 0; s < a.stretches; ++s)
        for (size_t p = 0; p < device_.size(); ++p)
          for (int64_t i : {int64_t(0), a.page - 1})
            ASSERT_EQ(all[size_t(s * a.pitch + int64_t(p) * a.page + i)], byte_of(device_[p], s))
                << "page " << p << ", stretch " << s;
    }
  }

 private:
  static uint8_t byte_of(int value, int64_t stretch) { return uint8_t(value * 7 + stretch * 31); }

  std::vector<int> device_, host_;  // what each page holds
  cudaStream_t stream_ = nullptr;
  DeviceMemory memory_[2];
  PagedArrays arrays_;
  std::unique_ptr<SecondTier> tier_;
};

TEST_F(CudaSecondTier, AnyOrderOfMovesIsKept) {
  const Sizes all[] = {{6, 2048}, {4, 96, 4, 12}, {3, 33, 3, 5}, {2, 4096, 2, 256}};
  std::mt19937 random(5);
  for (const Sizes& sizes : all) {
    const int device = 23, host = 17;
    Tiers tiers(sizes, device, host);
    int value = 100;
    for (int step = 0; step < 60; ++step) {
      std::vector<PageMove> moves(random() % 40);
      for (PageMove& m : moves) m = {int32_t(random() % device), int32_t(random() % host), random() % 2 == 0};
      tiers.move(moves);
      for (int i = int(random() % 6); i > 0; --i) tiers.write(int(random() % device), value++);
      if (step % 7 == 0) tiers.expect_alike();
    }
    tiers.expect_alike();
  }
}

// More in one step than the staging memory holds: pages of 16 MiB.
TEST_F(CudaSecondTier, MoreMovesThanFitAtOnce) {
  const int pages = 48;
  Tiers tiers({2, 8 << 20}, pages, pages);
  std::vector<PageMove> out, in;
  for (int p = 0; p < pages; ++p) out.push_back({p, pages - 1 - p, true}), in.push_back({p, p, false});
  tiers.move(out);
  for (int p = 0; p < pages; ++p) tiers.write(p, 200 + p);
  tiers.move(in);
  tiers.expect_alike();
}

}  // namespace
}  // namespace kvasir::model::cuda
