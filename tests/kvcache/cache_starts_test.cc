// Tables kept from step to step are what tables made anew would be.
#include "kvcache/cache_starts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

namespace kvasir::kvcache {
namespace {

using testing::ElementsAre;

TEST(CacheStarts, AreTokensOfPagesOfRunsAndOfTokens) {
  const std::vector<int32_t> one{3, 5}, two{7};
  auto starts_of = [&](IndexMode mode) {
    CacheStarts starts(mode, 4);
    std::vector<int64_t> out;
    starts.begin(2, 2, 2, out);
    starts.add(1, one, 6, out);
    starts.add(2, two, 3, out);
    return out;
  };
  EXPECT_THAT(starts_of(IndexMode::offset), ElementsAre(12, 28));
  EXPECT_THAT(starts_of(IndexMode::token_table), ElementsAre(12, 13, 14, 15, 20, 21, 28, 29, 30));
  const auto pages = starts_of(IndexMode::page_table);
  EXPECT_EQ(pages.size(), 4u);  // rows are no longer than the longest table there can be
  EXPECT_EQ(pages[0], 12);
  EXPECT_EQ(pages[1], 20);
  EXPECT_EQ(pages[2], 28);
}

TEST(CacheStarts, OnlyWhatIsNewIsWritten) {
  CacheStarts starts(IndexMode::page_table, 4);
  std::vector<int64_t> out;
  std::vector<int32_t> table{1, 2};
  starts.begin(1, 2, 100, out);
  starts.add(9, table, 8, out);
  out[0] = -1;  // nobody else may touch it: so this tells whether it is written again
  table.push_back(3);
  starts.begin(1, 3, 100, out);
  starts.add(9, table, 12, out);
  EXPECT_EQ(out[0], -1);
  EXPECT_EQ(out[2], 12);
  starts.begin(1, 3, 100, out);
  starts.add(10, table, 12, out);  // another version: all of it
  EXPECT_EQ(out[0], 4);
  out[0] = -1;
  starts.begin(1, 40, 100, out);  // longer rows lie elsewhere
  starts.add(10, std::vector<int32_t>(40, 6), 160, out);
  EXPECT_EQ(out[0], 24);
  out[0] = -1;
  starts.begin(1, 40, 100, out);
  starts.add(0, std::vector<int32_t>(40, 7), 160, out);  // nothing is known of it
  EXPECT_EQ(out[0], 28);
}

TEST(CacheStarts, RandomBatchesAreAsIfMadeAnew) {
  std::mt19937 rng(5);
  struct Sequence {
    uint64_t version;
    std::vector<int32_t> pages;
  };
  for (IndexMode mode : {IndexMode::page_table, IndexMode::token_table, IndexMode::offset}) {
    CacheStarts kept(mode, 4);
    std::vector<int64_t> out;
    std::vector<Sequence> all;
    uint64_t versions = 0;
    for (int step = 0; step < 2000; ++step) {
      if (all.empty() || rng() % 4 == 0)
        all.insert(all.begin() + int64_t(rng() % (all.size() + 1)), {++versions, {int32_t(rng() % 1000)}});
      if (rng() % 5 == 0) all.erase(all.begin() + int64_t(rng() % all.size()));
      size_t longest = 0;
      for (Sequence& s : all) {
        if (rng() % 3 == 0 && s.pages.size() < 60) s.pages.push_back(int32_t(rng() % 1000));
        if (rng() % 20 == 0) {
          s.version = ++versions;
          s.pages[rng() % s.pages.size()] = int32_t(rng() % 1000);
        }
        longest = std::max(longest, s.pages.size());
      }
      kept.begin(int64_t(all.size()), int64_t(longest), 64, out);
      std::vector<int64_t> kvstarts{0};
      for (const Sequence& s : all) {
        const int64_t kvlen = int64_t(s.pages.size()) * 4 - int64_t(rng() % 4);
        kept.add(s.version, s.pages, kvlen, out);
        kvstarts.push_back(kvstarts.back() + kvlen);
      }
      const CacheIndex index{mode, 4, out.data(), kept.row_length()};
      for (size_t b = 0; b < all.size(); ++b)
        for (int64_t t = 0; t < kvstarts[b + 1] - kvstarts[b]; ++t) {
          const int64_t page = mode == IndexMode::offset ? all[b].pages[0] : all[b].pages[size_t(t / 4)];
          const int64_t within = mode == IndexMode::offset ? t : t % 4;
          ASSERT_EQ(physical_token(index, kvstarts.data(), int64_t(b), t), page * 4 + within) << step;
        }
    }
  }
}

}  // namespace
}  // namespace kvasir::kvcache
