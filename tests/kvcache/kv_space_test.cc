// The block manager by itself: who holds which page, what is shared, what is copied or moved and in which order, and
// that every page comes back.
#include "kvcache/kv_space.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

namespace kvasir::kvcache {
namespace {

using testing::ElementsAre;

constexpr int32_t kPage = 4;

KvSpaceOptions space_of(std::vector<GroupShape> groups, int64_t host_pages = 0) {
  KvSpaceOptions o;
  o.page_size = kPage;
  o.groups = std::move(groups);
  o.host_pages = host_pages;
  return o;
}

std::vector<int32_t> text(int64_t n, int32_t first = 1) {
  std::vector<int32_t> t(static_cast<size_t>(n));
  std::iota(t.begin(), t.end(), first);
  return t;
}

class Space : public testing::Test {
 protected:
  void make(const KvSpaceOptions& o) {
    kv = std::make_unique<KvSpace>(o);
    kv->begin_step(step = 1);
  }
  // The step that is being made is made, and has run.
  void pass() {
    kv->take_orders(copies, moves);
    kv->begin_step(step + 1);
    kv->retire_step(step++);
  }
  Lease start(const std::vector<int32_t>& tokens, const std::string& key = "a", int32_t tenant = 0) {
    const Match m = kv->match(key, tokens, int64_t(tokens.size()) - 1);
    Lease lease = kv->acquire(key, tenant, m);
    found = kv->lease_tokens(lease, m);
    EXPECT_TRUE(kv->grow(lease, int64_t(tokens.size())));
    return lease;
  }
  // A request that comes, computes all of its tokens and goes.
  void serve(const std::vector<int32_t>& tokens, const std::string& key = "a", int32_t tenant = 0) {
    Lease lease = start(tokens, key, tenant);
    pass();
    kv->finish(std::move(lease), tokens, int64_t(tokens.size()));
  }
  void expect_all_back() {
    kv->check_integrity({}, {});
    for (int g = 0; g < kv->groups(); ++g)
      EXPECT_EQ(kv->pool(g).free_pages() + kv->pool(g).idle_pages(), kv->pool(g).size()) << g;
    kv->flush();
    kv->check_integrity({}, {});
    for (int g = 0; g < kv->groups(); ++g) EXPECT_EQ(kv->pool(g).free_pages(), kv->pool(g).size()) << g;
    EXPECT_EQ(kv->host_pool().free_pages(), kv->host_pool().size());
  }

  std::unique_ptr<KvSpace> kv;
  uint64_t step = 0;
  int64_t found = 0;
  std::vector<PageCopy> copies;
  std::vector<PageMove> moves;
};

TEST(Pool, CountsWhoRefersToAPage) {
  PagePool pool(3);
  EXPECT_EQ(pool.take(), 0);
  EXPECT_EQ(pool.take(), 1);
  pool.ref(0);
  EXPECT_FALSE(pool.unref(0));
  pool.keep(0);
  EXPECT_TRUE(pool.unref(0));
  EXPECT_EQ(pool.idle_pages(), 1);
  EXPECT_EQ(pool.free_pages(), 1);
  EXPECT_EQ(pool.take(), 2);
  EXPECT_EQ(pool.take(), -1);  // what is kept is not free
  pool.forget(0);
  EXPECT_EQ(pool.take(), 0);
  pool.check_integrity();
}

TEST(Pool, RunsAreContiguousAndFirstFit) {
  PagePool pool(10, true);
  EXPECT_EQ(pool.take_run(3), 0);
  EXPECT_EQ(pool.take_run(4), 3);
  EXPECT_EQ(pool.take_run(4), -1);
  for (int32_t p = 0; p < 3; ++p) pool.unref(p);
  EXPECT_EQ(pool.take_run(4), -1);  // six are free, but not in one piece
  EXPECT_EQ(pool.take_run(2), 0);
  pool.check_integrity();
}

TEST_F(Space, AHitIsWholePagesAndACopiedPartOfOne) {
  make(space_of({{16, 0}}));
  serve(text(10));
  Lease b = start(text(14));
  EXPECT_EQ(found, 10);
  EXPECT_THAT(std::vector<int32_t>(b.pages().begin(), b.pages().begin() + 2), ElementsAre(0, 1));
  pass();
  ASSERT_EQ(copies.size(), 1u);  // the third page had two of its tokens
  EXPECT_EQ(copies[0].from, 2);
  EXPECT_EQ(copies[0].to, b.pages()[2]);
  EXPECT_EQ(copies[0].tokens, 2);
  kv->finish(std::move(b), text(14), 14);
  expect_all_back();
}

TEST_F(Space, AHitIsNeverTheWholePrompt) {
  make(space_of({{16, 0}}));
  serve(text(8));
  EXPECT_EQ(kv->match("a", text(8), 7).tokens, 7);
  EXPECT_EQ(kv->match("a", text(9), 8).tokens, 8);
  expect_all_back();
}

TEST_F(Space, APageIsSharedWhenItsStepHasRetiredAndNotBefore) {
  make(space_of({{16, 0}}));
  Lease a = start(text(8));
  EXPECT_EQ(kv->match("a", text(8), 7).tokens, 0);
  pass();
  kv->commit(a, text(8), 8, true);
  EXPECT_EQ(kv->match("a", text(9), 8).tokens, 8);
  kv->finish(std::move(a), text(8), 8);
  expect_all_back();
}

TEST_F(Space, TwoThatComputedTheSameKeepOneOfThePages) {
  make(space_of({{16, 0}}));
  Lease a = start(text(8)), b = start(text(8));
  const uint64_t version = b.version();
  pass();
  kv->commit(a, text(8), 8, true);
  EXPECT_EQ(b.version(), version);
  kv->commit(b, text(8), 8, true);
  EXPECT_THAT(b.pages(), testing::ElementsAreArray(a.pages()));
  EXPECT_NE(b.version(), version);  // its table has changed otherwise than by growing
  EXPECT_EQ(kv->pool(0).free_pages(), 14);
  kv->finish(std::move(a), text(8), 8);
  kv->finish(std::move(b), text(8), 8);
  expect_all_back();
}

TEST_F(Space, KeysShareNothing) {
  make(space_of({{32, 0}}));
  serve(text(12), "a", 0);
  EXPECT_EQ(kv->match("b", text(12), 11).tokens, 0);
  EXPECT_EQ(kv->match("", text(12), 11).tokens, 0);
  serve(text(12), "b", 1);
  EXPECT_EQ(kv->match("b", text(12), 11).tokens, 11);
  expect_all_back();
}

TEST_F(Space, ForksShareUntilTheyWrite) {
  make(space_of({{16, 0}}));
  Lease a = start(text(6));
  pass();
  Lease b = kv->fork(a, 6, 100);
  EXPECT_THAT(b.pages(), testing::ElementsAreArray(a.pages()));
  ASSERT_TRUE(kv->make_writable(a, 6));
  EXPECT_EQ(b.pages()[0], a.pages()[0]);
  EXPECT_NE(b.pages()[1], a.pages()[1]);
  pass();
  EXPECT_EQ(copies.size(), 1u);
  ASSERT_TRUE(kv->make_writable(b, 6));  // alone now: nothing to copy
  pass();
  EXPECT_TRUE(copies.empty());
  const Lease* both[] = {&a, &b};
  kv->check_integrity(both, {});
  kv->release(a);
  kv->release(b);
  expect_all_back();
}

TEST_F(Space, ForksHaveOneStateUntilTheyGoOn) {
  KvSpaceOptions o = space_of({{16, 0}});
  o.prefix_cache = false, o.states = 3;
  make(o);
  Lease first = start(text(6)), other = start(text(5, 40));
  const int32_t state = kv->own_state(first), alone = kv->own_state(other);
  EXPECT_NE(state, alone);
  EXPECT_EQ(kv->own_state(first), state) << "a later step writes the same";
  EXPECT_EQ(kv->orders(), 0u);
  pass();
  Lease second = kv->fork(first, 6, 0);
  kv->check_integrity(std::vector<const Lease*>{&first, &second, &other}, {});
  const int32_t copy = kv->own_state(second);
  EXPECT_EQ(kv->own_state(first), state) << "the last one keeps the slot";
  pass();
  ASSERT_EQ(copies.size(), 1u);
  EXPECT_EQ(copies[0].from, state);
  EXPECT_EQ(copies[0].to, copy);
  EXPECT_EQ(copies[0].group, kStateGroup);
  kv->release(second);
  Lease third = start(text(3));
  EXPECT_EQ(kv->own_state(third), copy) << "the slot has come back";
  kv->check_integrity(std::vector<const Lease*>{&first, &third, &other}, {});
  for (Lease* l : {&first, &third, &other}) kv->release(*l);
  expect_all_back();
}

TEST_F(Space, WhatAStepInFlightCopiesFromComesBackWhenItRetires) {
  make(space_of({{4, 0}}));
  Lease a = start(text(6));
  pass();
  Lease b = kv->fork(a, 6, 100);
  ASSERT_TRUE(kv->make_writable(b, 6));
  kv->release(a);
  EXPECT_EQ(kv->pool(0).free_pages(), 1);  // the copy's source is still named
  pass();
  EXPECT_EQ(kv->pool(0).free_pages(), 2);
  kv->release(b);
  expect_all_back();
}

TEST_F(Space, RejectedDraftsGiveTheirPagesBack) {
  make(space_of({{16, 0}}));
  Lease a = start(text(6));
  ASSERT_TRUE(kv->grow(a, 13));
  EXPECT_EQ(a.pages().size(), 4u);
  const uint64_t version = a.version();
  kv->trim_back(a, 7);
  EXPECT_EQ(a.pages().size(), 2u);
  EXPECT_NE(a.version(), version);
  kv->release(a);
  expect_all_back();
}

TEST_F(Space, LeavesGoFirstAndWhatIsHeldStays) {
  make(space_of({{6, 0}}));
  serve(text(8));                    // two pages
  serve(text(8, 100));               // two others
  Lease held = start(text(9, 100));  // holds these, and one more
  pass();
  Lease big = kv->acquire("a", 0, Match{});
  ASSERT_TRUE(kv->grow(big, 2 * kPage));
  EXPECT_EQ(kv->match("a", text(9), 8).tokens, 4);  // of the idle prefix the leaf went
  EXPECT_EQ(kv->match("a", text(9, 100), 8).tokens, 8);
  EXPECT_FALSE(kv->grow(big, 4 * kPage));  // all or nothing
  EXPECT_EQ(big.pages().size(), 2u);
  kv->release(big);
  kv->release(held);
  expect_all_back();
}

// Of two that nobody holds the one used last stays; but a page far into a prompt is dear to compute again.
TEST_F(Space, WhatIsDearToComputeAgainStaysALittleLonger) {
  for (const double slope : {0.0, 0.2}) {
    KvSpaceOptions o = space_of({{256, 0}});
    o.recompute_slope = slope;
    make(o);
    serve(text(32));
    serve(text(4, 500));  // used later
    Lease other = kv->acquire("b", 1, Match{});
    ASSERT_TRUE(kv->grow(other, (256 - 9 + 1) * kPage));  // one page more than is free
    EXPECT_EQ(kv->match("a", text(33), 32).tokens, slope > 0 ? 32 : 28) << slope;
    EXPECT_EQ(kv->match("a", text(5, 500), 4).tokens, slope > 0 ? 0 : 4) << slope;
    kv->release(other);
    expect_all_back();
  }
}

TEST_F(Space, ATenantHasAShareAndCannotEvictAll) {
  KvSpaceOptions o = space_of({{10, 0}});
  o.tenant_share = 0.5;
  make(o);
  serve(text(20), "a", 0);
  EXPECT_EQ(kv->idle_pages(0), 5);
  Lease loud = kv->acquire("b", 1, Match{});
  EXPECT_TRUE(kv->grow(loud, 5 * kPage));
  EXPECT_FALSE(kv->grow(loud, 6 * kPage));  // half of the pool is others' prefixes, and stays
  EXPECT_EQ(kv->idle_pages(0), 5);
  EXPECT_TRUE(kv->grow(loud, 6 * kPage, true));  // unless nothing runs at all
  kv->release(loud);
  serve(text(24, 500), "b", 1);
  EXPECT_LE(kv->idle_pages(1), 5);  // nor may it keep more
  expect_all_back();
}

TEST_F(Space, WindowPagesComeBackBehindTheWindow) {
  make(space_of({{16, 0}, {8, 6}}));  // two pools: full attention, and a window of 6 tokens
  Lease a = start(text(20));
  EXPECT_EQ(kv->pool(1).free_pages(), 3);
  kv->trim_front(a, 20);
  EXPECT_EQ(a.first_held(1), 3);  // the query at 20 sees 15 and later: page 3 is the first
  EXPECT_EQ(kv->pool(1).free_pages(), 6);
  EXPECT_EQ(kv->pool(0).free_pages(), 11);  // the other pool keeps all
  EXPECT_TRUE(kv->grow(a, 40));
  const Lease* one[] = {&a};
  kv->check_integrity(one, {});
  kv->release(a);
  expect_all_back();
}

TEST_F(Space, AHitNeedsThePagesOfTheWindowToo) {
  make(space_of({{32, 0}, {16, 6}}));
  Lease a = start(text(20));
  pass();
  kv->commit(a, text(20), 20, true);
  kv->trim_front(a, 20);
  kv->finish(std::move(a), text(20), 20);
  EXPECT_EQ(kv->match("a", text(21), 20).tokens, 20);
  Lease other = kv->acquire("a", 0, Match{});
  ASSERT_TRUE(kv->grow(other, 15 * kPage));  // takes window pages of the prefix; the full ones have room
  EXPECT_LT(kv->match("a", text(21), 20).tokens, 20);
  kv->release(other);
  expect_all_back();
}

TEST_F(Space, MovesToTheHostAndBackKeepTheirOrder) {
  make(space_of({{8, 0}}, 8));
  Lease a = start(text(10));
  const std::vector<int32_t> pages(a.pages().begin(), a.pages().end());
  pass();
  ASSERT_TRUE(kv->can_move_out(a));
  HostLease away = kv->move_out(a, 10);
  ASSERT_EQ(away.pages().size(), 3u);
  kv->release(a);
  kv->take_orders(copies, moves);
  ASSERT_EQ(moves.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(moves[i].to_host);
    EXPECT_EQ(moves[i].device, pages[i]);
    EXPECT_EQ(moves[i].host, away.pages()[i]);
  }
  kv->begin_step(++step);
  kv->retire_step(step - 1);
  Lease back;
  ASSERT_TRUE(kv->move_in(away, back, "a", 0, false));
  EXPECT_EQ(kv->host_pool().free_pages(), 5);  // until the step that reads them has run
  pass();
  ASSERT_EQ(moves.size(), 3u);
  EXPECT_FALSE(moves[0].to_host);
  EXPECT_EQ(kv->host_pool().free_pages(), 8);
  kv->release(back);
  expect_all_back();
}

TEST_F(Space, WhatIsEvictedIsFoundInTheHost) {
  make(space_of({{4, 0}}, 8));
  serve(text(16));
  Lease other = start(text(16, 100), "b", 1);  // needs all four pages
  pass();
  EXPECT_EQ(moves.size(), 4u);
  kv->finish(std::move(other), text(16, 100), 16);
  const Match m = kv->match("a", text(17), 16);
  EXPECT_EQ(m.pages, 4);
  EXPECT_EQ(m.host_pages, 4);
  Lease again = kv->acquire("a", 0, m);
  EXPECT_EQ(kv->lease_tokens(again, m), 16);
  pass();
  int back = 0;
  for (const PageMove& move : moves) back += !move.to_host;
  EXPECT_EQ(back, 4);
  const Lease* one[] = {&again};
  kv->check_integrity(one, {});
  kv->release(again);
  expect_all_back();
}

// A host that is never full lets nobody go, and what it listed as such must not grow with every page that ever came.
TEST_F(Space, TheHostForgetsWhatWentByItself) {
  make(space_of({{4, 0}}, 64));
  for (int round = 0; round < 200; ++round) {
    serve(text(16));
    Lease other = start(text(16, 100), "b", 1);
    pass();
    ASSERT_GE(moves.size(), 3u);
    kv->finish(std::move(other), text(16, 100), 16);
    if (round % 2) kv->flush();
    kv->check_integrity({}, {});
  }
  expect_all_back();
}

TEST_F(Space, RunsAreReservedOnceAndForkByCopy) {
  KvSpaceOptions o = space_of({{16, 0}});
  o.contiguous = true;
  o.prefix_cache = false;
  make(o);
  Lease a = kv->acquire("", 0, Match{});
  ASSERT_TRUE(kv->grow(a, 20));
  EXPECT_THAT(a.pages(), ElementsAre(0, 1, 2, 3, 4));
  Lease b = kv->fork(a, 6, 20);
  EXPECT_THAT(b.pages(), ElementsAre(5, 6, 7, 8, 9));
  pass();
  ASSERT_EQ(copies.size(), 2u);
  EXPECT_EQ(copies[1].tokens, 2);
  EXPECT_TRUE(kv->fork(a, 6, 40).empty());  // no run of ten is left
  kv->release(a);
  kv->release(b);
  expect_all_back();
}

TEST_F(Space, RoutersHearOfWholePagesOnly) {
  KvSpaceOptions o = space_of({{4, 0}});
  o.events = std::make_shared<CacheEvents>(100);
  o.events->name(0, "x");
  o.events->name(1, "y");
  make(o);
  serve(text(10), "a", 0);
  bool lost = false;
  auto seen = o.events->since("x", 0, &lost);
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_EQ(seen[0].kind, CacheEvent::Kind::stored);
  EXPECT_EQ(seen[0].parent, 0u);
  EXPECT_EQ(seen[1].parent, seen[0].hash);
  EXPECT_THAT(seen[1].tokens, ElementsAre(5, 6, 7, 8));
  EXPECT_TRUE(o.events->since("y", 0, &lost).empty());
  serve(text(16, 50), "b", 1);  // evicts the other's
  seen = o.events->since("x", 2, &lost);
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_EQ(seen[0].kind, CacheEvent::Kind::removed);
  for (const CacheEvent& e : o.events->since("y", 0, &lost)) EXPECT_EQ(e.kind, CacheEvent::Kind::stored);
}

}  // namespace
}  // namespace kvasir::kvcache
