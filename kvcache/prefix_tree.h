// Which token prefixes have their K/V in pages: a tree whose edges are whole pages of tokens.
// A child is found by hash and believed only when its tokens are equal; a node's identity includes its
// parent, so a path is a prefix exactly. Each (tenant, salt, adapter, cache type) has a root of its own:
// nobody can meet another's prompts. The last, partly filled page of a finished sequence is a leaf, too.
//
// The tree names pages and owns none: KvSpace pairs it with the pools and keeps them in step.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

namespace kvasir::kvcache {

constexpr int kMaxGroups = 4;
using NodeId = int32_t;
constexpr NodeId kNoNode = -1;

struct PrefixNode {
  NodeId parent = kNoNode, first_child = kNoNode, next = kNoNode, prev = kNoNode;
  std::array<int32_t, kMaxGroups> page{-1, -1, -1, -1};  // on the device, by group
  int32_t host = -1;                                     // in the second tier (group 0)
  int32_t state = -1;                                    // the slot of what a recurrent model's state is at its end
  int32_t children = 0, resident_children = 0;           // resident: with a device page in group 0
  int32_t pins = 0;                                      // sequences that stand here
  int32_t fill = 0;                                      // tokens; less than a page only in a leaf, 0 in a root
  int32_t depth = 0;                                     // pages from the root to its end
  int32_t tenant = 0;
  uint32_t hits = 0;
  uint32_t generation = 0;  // grows when the id is given to another node
  bool live = false;
  uint64_t tokens_hash = 0;
  uint64_t chain_hash = 0;  // names the prefix to routers
  std::array<uint64_t, kMaxGroups> last_use{};
  uint64_t host_ready = 0;  // the step whose retiring makes `host` readable
};

class PrefixTree {
 public:
  explicit PrefixTree(int32_t page_size) : page_size_(page_size) {}

  NodeId find_root(const std::string& key) const;
  NodeId root(const std::string& key, int32_t tenant);  // made when missing
  NodeId child(NodeId parent, std::span<const int32_t> page_tokens) const;
  // The child that shares most leading tokens with `tokens`, of those `usable` says yes to, and how many.
  template <class Usable>
  NodeId best_partial(NodeId parent, std::span<const int32_t> tokens, int32_t* shared, const Usable& usable) const;

  NodeId insert(NodeId parent, std::span<const int32_t> tokens);
  // A node nothing needs: no child, no page, no pin. Then its parent, as far as that holds.
  void prune(NodeId node);

  PrefixNode& operator[](NodeId id) { return nodes_[id]; }
  const PrefixNode& operator[](NodeId id) const { return nodes_[id]; }
  std::span<const int32_t> tokens(NodeId id) const {
    return {tokens_.data() + int64_t(id) * page_size_, size_t(nodes_[id].fill)};
  }
  int32_t page_size() const { return page_size_; }
  int64_t live_nodes() const { return live_; }
  int64_t capacity() const { return static_cast<int64_t>(nodes_.size()); }
  void check_integrity() const;

  static uint64_t hash_tokens(std::span<const int32_t> tokens);

 private:
  static constexpr int kMaxSiblingsTried = 64;  // bounds the search for a partial page

  NodeId make(NodeId parent, std::span<const int32_t> tokens);
  bool disposable(const PrefixNode& n) const;
  void index(NodeId id);
  void unindex(NodeId id);
  void grow_index();
  size_t slot(NodeId parent, uint64_t hash) const;

  int32_t page_size_;
  int64_t live_ = 0;
  std::vector<PrefixNode> nodes_;
  std::vector<int32_t> tokens_;  // page_size a node
  std::vector<NodeId> free_;
  std::vector<NodeId> index_;  // open addressing over full nodes, keyed by (parent, tokens_hash)
  int64_t indexed_ = 0;
  std::unordered_map<std::string, NodeId> roots_;
  std::unordered_map<NodeId, std::string> root_keys_;
};

template <class Usable>
NodeId PrefixTree::best_partial(NodeId parent, std::span<const int32_t> tokens, int32_t* shared,
                                const Usable& usable) const {
  NodeId best = kNoNode;
  *shared = 0;
  int tried = 0;
  for (NodeId c = nodes_[parent].first_child; c != kNoNode && tried < kMaxSiblingsTried; c = nodes_[c].next, ++tried) {
    const int32_t* theirs = tokens_.data() + int64_t(c) * page_size_;
    int32_t n = 0, limit = static_cast<int32_t>(std::min<size_t>(tokens.size(), nodes_[c].fill));
    while (n < limit && theirs[n] == tokens[n]) ++n;
    if (n > *shared && usable(c)) {
      *shared = n;
      best = c;
    }
  }
  return best;
}

}  // namespace kvasir::kvcache
