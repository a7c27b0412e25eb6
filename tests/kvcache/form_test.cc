// A page is the same stretches in every layout, of elements and of scales.
#include "kvcache/form.h"

#include <gtest/gtest.h>

#include <set>

#include "kvcache/quant.h"

namespace kvasir::kvcache {
namespace {

constexpr int64_t kTokens = 12, kPage = 4;
constexpr int32_t kLayers = 3, kHeads = 2, kDim = 32;

// Every byte of a page's tokens, and of no other's, is in its stretches.
TEST(Planes, HoldAPagesBytesAndNoOthers) {
  for (const std::string& layout : kLayoutNames)
    for (auto [dtype, group] : {std::pair{"float16", -1}, {"int8", 8}, {"int4", 16}, {"fp8", -1}}) {
      SCOPED_TRACE(layout + " " + dtype);
      FormWish wish;
      wish.dtype = dtype, wish.group = group, wish.layout = layout;
      auto form = cache_form(wish, kDim, DType::f16);
      ASSERT_TRUE(form.ok()) << form.status().message();
      auto view = view_of(*form, kTokens, kLayers, kHeads, kDim);
      ASSERT_TRUE(view.ok());
      const auto planes = planes_of(*view);
      int64_t bytes = 0;
      for (int part = 0; part < (group > 0 ? 2 : 1); ++part) {
        const DType type = part ? view->scale_dtype : view->dtype;
        const Strides& s = part ? view->scale_strides : view->strides;
        const int64_t row = dtype_bytes(type, part ? kDim / group : kDim);
        for (int64_t page = 0; page < kTokens / kPage; ++page) {
          std::set<int64_t> by_token, by_stretch;
          for (int64_t t = page * kPage; t < (page + 1) * kPage; ++t)
            for (int64_t layer = 0; layer < kLayers; ++layer)
              for (int64_t head = 0; head < kHeads; ++head)
                for (bool value : {false, true})
                  for (int64_t i = 0; i < row; ++i)
                    by_token.insert(dtype_bytes(type, row_element(s, t, layer, head, value)) + i);
          const Plane& p = planes[size_t(part)];
          for (int64_t i = 0; i < p.stretches; ++i)
            for (int64_t k = 0; k < kPage * p.token_bytes; ++k)
              by_stretch.insert(i * p.pitch + page * kPage * p.token_bytes + k);
          EXPECT_EQ(by_stretch, by_token) << "page " << page << " of plane " << part;
        }
        bytes += planes[size_t(part)].bytes();
      }
      EXPECT_EQ(bytes, kTokens * 2 * kLayers * kHeads * form->row_bytes(kDim));
      if (group <= 0) EXPECT_EQ(planes[1].bytes(), 0);
    }
}

// Half of the bytes, and every layer's, head's and token's key is in a place of its own.
TEST(Planes, OfKeysAloneAreHalfAsLarge) {
  for (const std::string& layout : kLayoutNames)
    for (auto [dtype, group] : {std::pair{"float16", -1}, {"int8", 8}}) {
      SCOPED_TRACE(layout + " " + dtype);
      FormWish wish;
      wish.dtype = dtype, wish.group = group, wish.layout = layout;
      auto form = cache_form(wish, kDim, DType::f16);
      ASSERT_TRUE(form.ok()) << form.status().message();
      for (int32_t heads : {1, kHeads}) {
        const auto view = view_of(*form, kTokens, kLayers, heads, kDim, false);
        ASSERT_TRUE(view.ok() && keys_alone(*view));
        const auto planes = planes_of(*view);
        EXPECT_EQ(planes[0].bytes() + planes[1].bytes(), kTokens * kLayers * heads * form->row_bytes(kDim));
        for (int part = 0; part < (group > 0 ? 2 : 1); ++part) {
          const int64_t row = part ? kDim / group : kDim;
          std::set<int64_t> elements;
          for (int64_t t = 0; t < kTokens; ++t)
            for (int64_t layer = 0; layer < kLayers; ++layer)
              for (int64_t head = 0; head < heads; ++head)
                for (int64_t i = 0; i < row; ++i)
                  elements.insert(row_element(part ? view->scale_strides : view->strides, t, layer, head, true) + i);
          EXPECT_EQ(std::ssize(elements), kTokens * kLayers * heads * row);
          EXPECT_EQ(*elements.rbegin() + 1, std::ssize(elements));
        }
      }
    }
}

TEST(CacheForm, TakesTheGroupThatSuitsTheHead) {
  auto group = [](const char* dtype, int32_t head_dim) {
    FormWish wish;
    wish.dtype = dtype;
    auto form = cache_form(wish, head_dim, DType::bf16);
    EXPECT_TRUE(form.ok()) << form.status().message();
    return form.ok() ? form->quant_group : -1;
  };
  EXPECT_EQ(group("int8", 128), 64);
  EXPECT_EQ(group("int8", 80), 16);
  EXPECT_EQ(group("int4", 128), 32);
  EXPECT_EQ(group("int4", 72), 8);
  EXPECT_EQ(group("auto", 72), 0);
  FormWish wish;
  wish.dtype = "int4";
  const Status odd = cache_form(wish, 20, DType::f16).status();
  EXPECT_EQ(odd.field(), "kv_group");
  EXPECT_NE(odd.message().find("take fp8, or int8 with kv_group 0"), std::string::npos) << odd.message();
}

}  // namespace
}  // namespace kvasir::kvcache
