// Which sequences of a step are told to share what.
#include "model/shared_prefix.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace kvasir::model {
namespace {

constexpr int64_t kPage = 16;
using Table = std::vector<int64_t>;  // pages

struct One {
  Table pages;
  int64_t before;  // tokens before the step
};

Batch batch(const std::vector<One>& sequences) {
  Batch b;
  for (const One& s : sequences) b.max_pages = std::max(b.max_pages, int64_t(s.pages.size()));
  for (const One& s : sequences) {
    b.start_pos.push_back(s.before);
    for (int64_t p = 0; p < b.max_pages; ++p)
      b.cachestarts.push_back(size_t(p) < s.pages.size() ? s.pages[size_t(p)] * kPage : 0);
  }
  return b;
}

Table pages(int64_t n, int64_t first) {
  Table t;
  for (int64_t i = 0; i < n; ++i) t.push_back(first + i);
  return t;
}
Table operator+(Table a, const Table& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

SharedPrefixes found(const std::vector<One>& sequences) {
  SharedPrefixes s;
  s.find(batch(sequences), kPage);
  return s;
}

TEST(SharedPrefix, AllBeginAlike) {
  const Table prompt = pages(100, 7);
  std::vector<One> all;
  for (int64_t i = 0; i < 5; ++i) all.push_back({prompt + pages(i + 1, 1000 + 10 * i), 1600 + 16 * i + 3});
  all.push_back({pages(120, 5000), 1900});
  const SharedPrefixes s = found(all);
  EXPECT_EQ(s.lengths(), std::vector<int64_t>{1600});
  EXPECT_EQ(s.groups(), (std::vector<int32_t>{0, 0, 0, 0, 0, -1}));
}

TEST(SharedPrefix, NothingIsShared) {
  EXPECT_FALSE(found({}).any());
  EXPECT_FALSE(found({{pages(50, 0), 799}}).any());
  EXPECT_FALSE(found({{pages(50, 0), 799}, {pages(50, 50), 799}}).any());
  EXPECT_FALSE(found({{pages(15, 0) + pages(9, 100), 380}, {pages(15, 0) + pages(9, 200), 380}}).any()) << "too short";
  EXPECT_TRUE(found({{pages(16, 0) + pages(9, 100), 380}, {pages(16, 0) + pages(9, 200), 380}}).any());
}

// A page that the step writes to is no page that others may read at once.
TEST(SharedPrefix, OnlyWhatWasThereBefore) {
  const Table prompt = pages(100, 0);
  const SharedPrefixes s = found({{prompt, 1599}, {prompt, 1599}, {prompt, 400}});
  EXPECT_EQ(s.lengths(), std::vector<int64_t>{99 * kPage});
  EXPECT_EQ(s.groups(), (std::vector<int32_t>{0, 0, -1}));
}

// A short beginning of all, and long ones of some: what saves more is chosen.
TEST(SharedPrefix, WhatSavesMost) {
  const Table system = pages(20, 0), a = pages(200, 100), b = pages(200, 400);
  std::vector<One> some = {{system + a + pages(1, 1000), 3530},
                           {system + b + pages(1, 1001), 3530},
                           {system + a + pages(1, 1002), 3530},
                           {system + b + pages(1, 1003), 3530},
                           {system + pages(9, 1100), 450}};
  const SharedPrefixes two = found(some);
  EXPECT_EQ(two.lengths(), (std::vector<int64_t>{3520, 3520}));
  EXPECT_EQ(two.groups(), (std::vector<int32_t>{0, 1, 0, 1, -1}));
  for (int64_t i = 0; i < 30; ++i) some.push_back({system + pages(9, 2000 + 10 * i), 450});
  EXPECT_EQ(found(some).lengths(), std::vector<int64_t>{320});
}

TEST(SharedPrefix, RandomTrees) {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    std::vector<One> all;
    const int n = 1 + int(random() % 30);
    for (int i = 0; i < n; ++i) {
      Table t;
      if (!all.empty() && random() % 4 > 0) {
        const Table& from = all[random() % all.size()].pages;
        t.assign(from.begin(), from.begin() + random() % (from.size() + 1));
      }
      t = t + pages(1 + random() % 60, 1000 * (i + 1));
      all.push_back({t, int64_t(random() % (t.size() * kPage))});
    }
    const SharedPrefixes s = found(all);
    ASSERT_EQ(s.groups().size(), all.size());
    std::vector<int> members(s.lengths().size());
    for (size_t i = 0; i < all.size(); ++i) {
      const int32_t g = s.groups()[i];
      if (g < 0) continue;
      const int64_t shared = s.lengths()[size_t(g)];
      const size_t first = size_t(std::find(s.groups().begin(), s.groups().end(), g) - s.groups().begin());
      EXPECT_GE(shared, SharedPrefixes::kLeastTokens);
      ASSERT_LE(shared, all[i].before);
      EXPECT_TRUE(std::equal(all[i].pages.begin(), all[i].pages.begin() + shared / kPage, all[first].pages.begin()));
      ++members[size_t(g)];
    }
    for (int m : members) EXPECT_GE(m, 2);
  }
}

}  // namespace
}  // namespace kvasir::model
