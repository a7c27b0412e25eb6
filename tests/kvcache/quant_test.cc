// Section 5: the quantization rule, number by number.
#include "kvcache/quant.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace kvasir::kvcache {
namespace {

struct Row {
  CacheView view;
  std::vector<uint8_t> data = std::vector<uint8_t>(64, 0xee), scale = std::vector<uint8_t>(64, 0xee);
  Row(DType type, QuantKind kind, int dim, int group, DType scale_type = DType::f32) {
    view.dtype = type, view.quant = kind, view.head_dim = dim, view.quant_group = group, view.scale_dtype = scale_type;
    view.data = data.data(), view.scale = scale.data();
  }
  std::vector<float> round_trip(const std::vector<float>& x) {
    store_row(view, 0, 0, 0, false, x.data());
    std::vector<float> y(x.size());
    load_row(view, 0, 0, 0, false, y.data());
    return y;
  }
  float stored_scale(int group) const {
    float f;
    std::memcpy(&f, scale.data() + group * 4, 4);
    return f;
  }
};

TEST(Quant, Int8ScaleIsAbsmaxOver127AndRoundsHalfToEven) {
  Row r(DType::i8, QuantKind::group, 16, 8);
  r.round_trip({127, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -127, 3, 0, 0, 0, 0, 0, 0, 0, 254});
  EXPECT_EQ(r.stored_scale(0), 1.0f);
  EXPECT_EQ(r.stored_scale(1), 2.0f);
  const int8_t want[] = {127, 0, 2, 2, 0, -2, -127, 3};
  EXPECT_EQ(std::memcmp(r.data.data(), want, 8), 0);
  EXPECT_EQ(r.data[16], 0xee) << "no byte past the row";
}

TEST(Quant, ScaleHasAFloor) {
  Row r(DType::i8, QuantKind::group, 8, 8);
  EXPECT_EQ(r.round_trip(std::vector<float>(8, 0.0f)), std::vector<float>(8, 0.0f));
  EXPECT_EQ(r.stored_scale(0), 1e-5f);
  r.round_trip(std::vector<float>(8, 1e-6f));
  EXPECT_EQ(r.stored_scale(0), 1e-5f);
}

TEST(Quant, Int4PutsEvenElementsInTheLowNibble) {
  Row r(DType::i4, QuantKind::group, 8, 8);
  std::vector<float> y = r.round_trip({7, -7, 1, 2, -1, 3.4f, 0, -2});
  EXPECT_EQ(r.stored_scale(0), 1.0f);
  EXPECT_EQ(r.data[0], 0x97) << "7 below, -7 = 0x9 above";
  EXPECT_EQ(r.data[1], 0x21);
  EXPECT_EQ(y, (std::vector<float>{7, -7, 1, 2, -1, 3, 0, -2}));
  EXPECT_EQ(r.data[4], 0xee);
}

TEST(Quant, Float16ScaleSaturatesAndIsWhatQuantizes) {
  Row r(DType::i8, QuantKind::group, 8, 8, DType::f16);
  std::vector<float> x(8, 1e9f), y = r.round_trip(x);
  uint16_t half;
  std::memcpy(&half, r.scale.data(), 2);
  EXPECT_EQ(f16_to_f32(half), 65504.0f);
  EXPECT_EQ(y[0], 127 * 65504.0f);
  // 1/127 is not a float16: the stored one must be the divisor, so that read-back is q * scale exactly.
  x.assign(8, 0.0f), x[0] = 1.0f, x[1] = 0.5f;
  y = r.round_trip(x);
  std::memcpy(&half, r.scale.data(), 2);
  const float scale = f16_to_f32(half);
  EXPECT_NE(scale, 1.0f / 127);
  EXPECT_EQ(y[1], float(round_clamp(0.5f / scale, 127)) * scale);
  EXPECT_EQ(r.scale[2], 0xee);
}

TEST(Quant, PerTensorInt8AndFp8) {
  Row i(DType::i8, QuantKind::per_tensor, 8, 0);
  i.view.k_scale = 0.5f;
  EXPECT_EQ(i.round_trip({1, 0.25f, 0.75f, -100, 100, 0, 0, 0}), (std::vector<float>{1, 0, 1, -63.5f, 63.5f, 0, 0, 0}));
  Row f(DType::f8_e4m3, QuantKind::per_tensor, 8, 0);
  f.view.k_scale = 2.0f;
  std::vector<float> y = f.round_trip({2000, -2000, 2, NAN, 0, 0, 0, 0});
  EXPECT_EQ(y[0], 896.0f);
  EXPECT_EQ(y[1], -896.0f);
  EXPECT_EQ(y[2], 2.0f);
  EXPECT_TRUE(std::isnan(y[3]));
}

TEST(Quant, PlainTypesRoundOnce) {
  Row h(DType::f16, QuantKind::none, 4, 0);
  EXPECT_EQ(h.round_trip({1.0f, 2049.0f, 1e-8f, -3.5f}), (std::vector<float>{1.0f, 2048.0f, 0.0f, -3.5f}));
  Row b(DType::bf16, QuantKind::none, 4, 0);
  EXPECT_EQ(b.round_trip({1.0f, 257.0f, 2.0f, -3.5f}), (std::vector<float>{1.0f, 256.0f, 2.0f, -3.5f}));
}

}  // namespace
}  // namespace kvasir::kvcache
