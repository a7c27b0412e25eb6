// The tree of prefixes: found by hash, believed by tokens, pruned when nothing needs it.
#include "kvcache/prefix_tree.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace kvasir::kvcache {
namespace {

using Tokens = std::vector<int32_t>;

TEST(PrefixTree, AChildIsItsParentsAndItsTokens) {
  PrefixTree tree(2);
  const NodeId a = tree.root("a", 0), b = tree.root("b", 1);
  ++tree[a].pins, ++tree[b].pins;
  EXPECT_EQ(tree.root("a", 0), a);
  EXPECT_EQ(tree.find_root("c"), kNoNode);
  const NodeId x = tree.insert(a, Tokens{1, 2}), y = tree.insert(x, Tokens{1, 2});
  ++tree[y].pins;
  EXPECT_EQ(tree.child(a, Tokens{1, 2}), x);
  EXPECT_EQ(tree.child(x, Tokens{1, 2}), y);
  EXPECT_EQ(tree.child(a, Tokens{2, 1}), kNoNode);
  EXPECT_EQ(tree.child(b, Tokens{1, 2}), kNoNode);
  EXPECT_EQ(tree[y].depth, 2);
  EXPECT_EQ(tree[y].tenant, 0);
  EXPECT_NE(tree[x].chain_hash, tree[y].chain_hash);  // the same tokens after something else
  tree.check_integrity();
}

TEST(PrefixTree, ThePartialPageThatSharesMostIsFound) {
  PrefixTree tree(4);
  const NodeId root = tree.root("a", 0);
  const NodeId one = tree.insert(root, Tokens{1, 2, 9, 9}), two = tree.insert(root, Tokens{1, 2, 3});
  ++tree[one].pins, ++tree[two].pins;
  int32_t shared = 0;
  auto any = [](NodeId) { return true; };
  EXPECT_EQ(tree.best_partial(root, Tokens{1, 2, 3, 4}, &shared, any), two);
  EXPECT_EQ(shared, 3);
  EXPECT_EQ(tree.best_partial(root, Tokens{1, 2, 9}, &shared, any), one);
  EXPECT_EQ(shared, 3);
  EXPECT_EQ(tree.best_partial(root, Tokens{1, 2, 3, 4}, &shared, [&](NodeId n) { return n != two; }), one);
  EXPECT_EQ(shared, 2);
  EXPECT_EQ(tree.best_partial(root, Tokens{7}, &shared, any), kNoNode);
  EXPECT_EQ(tree.child(root, Tokens{1, 2, 3}), kNoNode);  // a part of a page is no page
}

TEST(PrefixTree, ABranchNobodyNeedsGoesUpToWhereSomebodyDoes) {
  PrefixTree tree(1);
  const NodeId root = tree.root("a", 0);
  const NodeId x = tree.insert(root, Tokens{1}), y = tree.insert(x, Tokens{2}), z = tree.insert(y, Tokens{3});
  ++tree[x].pins;
  tree.prune(z);
  EXPECT_FALSE(tree[z].live);
  EXPECT_FALSE(tree[y].live);
  EXPECT_TRUE(tree[x].live);
  EXPECT_EQ(tree.child(x, Tokens{2}), kNoNode);
  const uint32_t generation = tree[z].generation;
  const NodeId again = tree.insert(x, Tokens{5});  // takes over an id, under another generation
  EXPECT_TRUE(again == y || again == z);
  EXPECT_GE(tree[again].generation, generation);
  --tree[x].pins;
  tree.prune(again);
  EXPECT_EQ(tree.live_nodes(), 0);
  EXPECT_EQ(tree.find_root("a"), kNoNode);
  tree.check_integrity();
}

// Against a map of whole prefixes, through growth of the index and many removals from its chains.
TEST(PrefixTree, RandomTreesAreWhatAMapSaysTheyAre) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 rng(seed);
    PrefixTree tree(2);
    std::map<Tokens, NodeId> truth;  // the whole prefix
    std::vector<Tokens> leaves;
    const NodeId root = tree.root("a", 0);
    ++tree[root].pins;
    auto walk = [&](const Tokens& prefix) {
      NodeId node = root;
      for (size_t i = 0; i < prefix.size() && node != kNoNode; i += 2)
        node = tree.child(node, std::span(prefix).subspan(i, 2));
      return node;
    };
    for (int op = 0; op < 3000; ++op) {
      if (rng() % 3 != 0 || truth.empty()) {
        Tokens prefix;
        NodeId node = root;
        for (size_t depth = 1 + rng() % 5; depth > 0; --depth) {
          prefix.push_back(static_cast<int32_t>(rng() % 3));
          prefix.push_back(static_cast<int32_t>(rng() % 3));
          const auto page = std::span(prefix).last(2);
          NodeId next = tree.child(node, page);
          ASSERT_EQ(next != kNoNode, truth.contains(prefix));
          if (next == kNoNode) {
            next = tree.insert(node, page);
            ++tree[next].pins;  // it stays until it is taken out below
            truth[prefix] = next;
          }
          node = next;
        }
      } else {
        auto it = truth.begin();
        std::advance(it, rng() % truth.size());
        if (tree[it->second].children > 0) continue;
        --tree[it->second].pins;
        tree.prune(it->second);
        truth.erase(it);
      }
      if (op % 100 == 0) tree.check_integrity();
    }
    for (const auto& [prefix, node] : truth) EXPECT_EQ(walk(prefix), node);
    EXPECT_EQ(tree.live_nodes(), int64_t(truth.size()) + 1);
    tree.check_integrity();
  }
}

}  // namespace
}  // namespace kvasir::kvcache
