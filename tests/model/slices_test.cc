// Parts of tensors, as ranks and fused projections have them.
#include "model/formats/slices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvasir::model {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// E4M3 with a scale for each 128 elements of a row: 100 * row + column block.
class BytesWithBlockScales : public ::testing::Test {
 protected:
  BytesWithBlockScales() : bytes_(4 * 320) {
    for (size_t i = 0; i < bytes_.size(); ++i) bytes_[i] = uint8_t(i / 320 * 16 + i % 320 / 32);
    t_ = {.name = "blk.0.ffn_down.weight",
          .type = WeightType::f8_e4m3,
          .rows = 4,
          .cols = 320,
          .data = bytes_.data(),
          .bytes = int64_t(bytes_.size())};
    for (int r = 0; r < 4; ++r)
      for (int c = 0; c < 3; ++c) t_.row_scales.push_back(float(100 * r + c));
  }
  std::vector<uint8_t> bytes_;
  HostTensor t_;
};

TEST_F(BytesWithBlockScales, RowsTakeTheirsAlong) {
  const HostTensor t = rows_of(t_, 1, 2);
  EXPECT_THAT(t.row_scales, ElementsAre(100, 101, 102, 200, 201, 202));
  EXPECT_EQ(t.scales_a_row(), 3);
  EXPECT_EQ(t.data[0], 16);
}

TEST_F(BytesWithBlockScales, ColumnsTakeTheirsAlong) {
  const auto t = columns_of(t_, {.first = 128, .count = 192, .all = 320});
  ASSERT_TRUE(t.ok()) << t.status().message();
  EXPECT_THAT(t->row_scales, ElementsAre(1, 2, 101, 102, 201, 202, 301, 302));
  EXPECT_EQ(t->data[0], 4);
  EXPECT_EQ(t->data[192], 20);
  const auto refused = columns_of(t_, {.first = 64, .count = 256, .all = 320});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().field(), "ranks");
  EXPECT_THAT(refused.status().message(), HasSubstr("columns 64 to 320"));
}

TEST_F(BytesWithBlockScales, ReorderedRowsTakeTheirsAlong) {
  const HostTensor t = reordered(t_, [](int64_t i) { return 3 - i; });
  EXPECT_THAT(t.row_scales, ElementsAre(300, 301, 302, 200, 201, 202, 100, 101, 102, 0, 1, 2));
  EXPECT_EQ(t.data[0], 48);
}

}  // namespace
}  // namespace kvasir::model
