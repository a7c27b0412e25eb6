#include "core/dtype.h"

#include <gtest/gtest.h>

#include <cmath>

namespace kvasir {
namespace {

// The nearest of all finite values of a format, ties to the even code, found by looking at each.
template <class Decode>
int nearest(float x, int codes, Decode decode) {
  int best = 0;
  double best_distance = INFINITY;
  for (int c = 0; c < codes; ++c) {
    float v = decode(c);
    if (!std::isfinite(v)) continue;
    double d = std::fabs(double(v) - double(x));
    if (d < best_distance || (d == best_distance && (c & 1) == 0)) best = c, best_distance = d;
  }
  return best;
}

TEST(DType, Float16RoundTripsEveryCode) {
  for (int c = 0; c < 65536; ++c) {
    float f = f16_to_f32(uint16_t(c));
    if (std::isnan(f))
      EXPECT_TRUE(std::isnan(f16_to_f32(f32_to_f16(f))));
    else
      EXPECT_EQ(f32_to_f16(f), c);
  }
}

TEST(DType, Bfloat16RoundTripsEveryCode) {
  for (int c = 0; c < 65536; ++c) {
    float f = bf16_to_f32(uint16_t(c));
    if (std::isnan(f))
      EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(f))));
    else
      EXPECT_EQ(f32_to_bf16(f), c);
  }
}

TEST(DType, E4m3RoundsToTheNearestAndSaturates) {
  for (int c = 0; c < 128; ++c) {
    float f = e4m3_to_f32(uint8_t(c));
    if (c == 0x7f) {
      EXPECT_TRUE(std::isnan(f));
      continue;
    }
    EXPECT_EQ(f32_to_e4m3(f), c);
    EXPECT_EQ(f32_to_e4m3(-f), c | 0x80);
  }
  for (float x = 0; x < 460; x += 0.00731f)
    ASSERT_EQ(f32_to_e4m3(x), nearest(x, 127, [](int c) { return e4m3_to_f32(uint8_t(c)); })) << x;
  for (float x = 0; x < 0.04f; x += 0.00000731f)
    ASSERT_EQ(f32_to_e4m3(x), nearest(x, 127, [](int c) { return e4m3_to_f32(uint8_t(c)); })) << x;
  EXPECT_EQ(e4m3_to_f32(f32_to_e4m3(1e9f)), 448.0f);
  EXPECT_EQ(e4m3_to_f32(f32_to_e4m3(-INFINITY)), -448.0f);
  EXPECT_TRUE(std::isnan(e4m3_to_f32(f32_to_e4m3(NAN))));
}

TEST(DType, Float16SubnormalsAndTiesGoToEven) {
  EXPECT_EQ(f32_to_f16(0x1p-25f), 0);  // a tie between 0 and the smallest
  EXPECT_EQ(f32_to_f16(std::nextafter(0x1p-25f, 1.0f)), 1);
  EXPECT_EQ(f32_to_f16(2049.0f), f32_to_f16(2048.0f));
  EXPECT_EQ(f32_to_f16(2051.0f), f32_to_f16(2052.0f));
  EXPECT_EQ(f32_to_f16(65519.0f), 0x7bff);
  EXPECT_EQ(f32_to_f16(65520.0f), 0x7c00);
}

TEST(DType, NamesAreRead) {
  DType t;
  EXPECT_TRUE(parse_dtype("bf16", &t) && t == DType::bf16);
  EXPECT_TRUE(parse_dtype("float8_e4m3", &t) && t == DType::f8_e4m3);
  EXPECT_FALSE(parse_dtype("float12", &t));
}

}  // namespace
}  // namespace kvasir
