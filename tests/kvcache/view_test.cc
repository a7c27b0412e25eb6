// Section 3: each layout's strides are those of its published shape.
#include "kvcache/view.h"

#include <gtest/gtest.h>

#include <functional>

namespace kvasir::kvcache {
namespace {

constexpr int64_t T = 7, L = 3, H = 5, D = 16;

struct Layout {
  int revision, layout;
  // Row-major offset of (token, layer, k or v, head), written from the shape.
  std::function<int64_t(int64_t, int64_t, int64_t, int64_t)> at;
};

TEST(LayoutStrides, EachPublishedShape) {
  const Layout layouts[] = {
      {2, 0, [](auto t, auto l, auto v, auto h) { return (((t * L + l) * 2 + v) * H + h) * D; }},
      {2, 1, [](auto t, auto l, auto v, auto h) { return (((l * T + t) * 2 + v) * H + h) * D; }},
      {2, 2, [](auto t, auto l, auto v, auto h) { return (((l * 2 + v) * T + t) * H + h) * D; }},
      {2, 3, [](auto t, auto l, auto v, auto h) { return (((l * 2 + v) * H + h) * T + t) * D; }},
      {1, 0, [](auto t, auto l, auto v, auto h) { return (((t * L + l) * 2 + v) * H + h) * D; }},
      {1, 1, [](auto t, auto l, auto v, auto h) { return (((l * T + t) * 2 + v) * H + h) * D; }},
      {1, 2, [](auto t, auto l, auto v, auto h) { return (((l * H + h) * T + t) * 2 + v) * D; }},
      {1, 3, [](auto t, auto l, auto v, auto h) { return (((v * L + l) * H + h) * T + t) * D; }},
  };
  for (const Layout& x : layouts) {
    const Strides s = layout_strides(x.revision, x.layout, T, L, H, D).value();
    for (int64_t t = 0; t < T; ++t)
      for (int64_t l = 0; l < L; ++l)
        for (int64_t v = 0; v < 2; ++v)
          for (int64_t h = 0; h < H; ++h)
            ASSERT_EQ(t * s.token + l * s.layer + v * s.kv + h * s.head, x.at(t, l, v, h))
                << "revision " << x.revision << " layout " << x.layout;
  }
}

TEST(LayoutStrides, AreSixtyFourBitAndRefuseWhatIsNot) {
  const Strides s = layout_strides(2, 3, 20'000'000, 80, 8, 128).value();
  EXPECT_EQ(s.layer, int64_t(2) * 8 * 20'000'000 * 128);
  EXPECT_EQ(layout_strides(2, 4, 1, 1, 1, 1).status().field(), "cache_layout");
  EXPECT_EQ(layout_strides(3, 0, 1, 1, 1, 1).status().field(), "revision");
  EXPECT_FALSE(layout_strides(2, 0, int64_t(1) << 60, 8, 8, 8).ok());
  EXPECT_FALSE(layout_strides(2, 0, 0, 1, 1, 1).ok());
}

TEST(PhysicalToken, ThreeModes) {
  const int64_t starts[] = {100, 512, 256, 0}, kvstarts[] = {0, 2, 4};
  EXPECT_EQ(physical_token({IndexMode::offset, 1, starts, 0}, kvstarts, 1, 3), 515);
  EXPECT_EQ(physical_token({IndexMode::page_table, 128, starts, 2}, kvstarts, 0, 130), 514);
  EXPECT_EQ(physical_token({IndexMode::token_table, 1, starts, 0}, kvstarts, 1, 1), 0);
  EXPECT_EQ(physical_token({IndexMode::page_table, 24, starts, 2}, kvstarts, 0, 30), 518);
}

TEST(PageSize, ShiftsAndDividesAlike) {
  for (int32_t tokens : {1, 2, 3, 12, 16, 24, 255, 256, 257, 1000, kMostPageTokens}) {
    const PageSize page(tokens);
    EXPECT_EQ(page.tokens(), tokens);
    for (int64_t t : {int64_t(0), int64_t(1), int64_t(23), int64_t(24), int64_t(4095), int64_t(1) << 40}) {
      EXPECT_EQ(page.page(t), t / tokens);
      EXPECT_EQ(page.within(t), t % tokens);
      EXPECT_EQ(page.left(t), tokens - t % tokens);
    }
  }
}

}  // namespace
}  // namespace kvasir::kvcache
