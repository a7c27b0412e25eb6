#include "kvcache/prefix_tree.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"

namespace kvasir::kvcache {
namespace {

uint64_t mix(uint64_t a, uint64_t b) {
  __uint128_t m = static_cast<__uint128_t>(a ^ 0x9e3779b97f4a7c15ull) * (b ^ 0xd1b54a32d192ed03ull);
  return static_cast<uint64_t>(m) ^ static_cast<uint64_t>(m >> 64);
}

uint64_t hash_key(const std::string& key) {
  uint64_t h = key.size();
  for (unsigned char c : key) h = mix(h, c + 1);
  return h;
}

}  // namespace

uint64_t PrefixTree::hash_tokens(std::span<const int32_t> tokens) {
  uint64_t h = tokens.size();
  size_t i = 0;
  for (; i + 4 <= tokens.size(); i += 4) {
    uint64_t a, b;
    std::memcpy(&a, &tokens[i], 8);
    std::memcpy(&b, &tokens[i + 2], 8);
    h = mix(h + a, b + 0x2545f4914f6cdd1dull);
  }
  for (; i < tokens.size(); ++i) h = mix(h, static_cast<uint32_t>(tokens[i]));
  return h;
}

NodeId PrefixTree::find_root(const std::string& key) const {
  auto it = roots_.find(key);
  return it == roots_.end() ? kNoNode : it->second;
}

NodeId PrefixTree::root(const std::string& key, int32_t tenant) {
  if (NodeId id = find_root(key); id != kNoNode) return id;
  NodeId id = make(kNoNode, {});
  nodes_[id].tenant = tenant;
  nodes_[id].chain_hash = hash_key(key);
  roots_[key] = id;
  root_keys_[id] = key;
  return id;
}

size_t PrefixTree::slot(NodeId parent, uint64_t hash) const {
  return mix(hash, static_cast<uint64_t>(parent) + 1) & (index_.size() - 1);
}

NodeId PrefixTree::child(NodeId parent, std::span<const int32_t> page_tokens) const {
  if (index_.empty()) return kNoNode;
  uint64_t hash = hash_tokens(page_tokens);
  for (size_t s = slot(parent, hash);; s = (s + 1) & (index_.size() - 1)) {
    NodeId id = index_[s];
    if (id == kNoNode) return kNoNode;
    const PrefixNode& n = nodes_[id];
    if (n.parent == parent && n.tokens_hash == hash &&
        std::memcmp(tokens_.data() + int64_t(id) * page_size_, page_tokens.data(), page_tokens.size_bytes()) == 0)
      return id;
  }
}

NodeId PrefixTree::make(NodeId parent, std::span<const int32_t> tokens) {
  NodeId id;
  if (!free_.empty()) {
    id = free_.back();
    free_.pop_back();
  } else {
    id = static_cast<NodeId>(nodes_.size());
    nodes_.emplace_back();
    tokens_.resize(tokens_.size() + page_size_);
  }
  uint32_t generation = nodes_[id].generation;
  nodes_[id] = PrefixNode{};
  PrefixNode& n = nodes_[id];
  n.generation = generation;
  n.live = true;
  n.parent = parent;
  n.fill = static_cast<int32_t>(tokens.size());
  std::copy(tokens.begin(), tokens.end(), tokens_.begin() + int64_t(id) * page_size_);
  ++live_;
  return id;
}

NodeId PrefixTree::insert(NodeId parent, std::span<const int32_t> tokens) {
  KVASIR_CHECK(!tokens.empty() && int64_t(tokens.size()) <= page_size_, "a node holds 1 to ", page_size_, " tokens");
  NodeId id = make(parent, tokens);
  PrefixNode& n = nodes_[id];
  PrefixNode& p = nodes_[parent];
  n.depth = p.depth + 1;
  n.tenant = p.tenant;
  n.tokens_hash = hash_tokens(tokens);
  n.chain_hash = mix(p.chain_hash, n.tokens_hash);
  n.next = p.first_child;
  if (n.next != kNoNode) nodes_[n.next].prev = id;
  p.first_child = id;
  ++p.children;
  if (n.fill == page_size_) index(id);
  return id;
}

bool PrefixTree::disposable(const PrefixNode& n) const {
  if (n.children > 0 || n.pins > 0 || n.host >= 0) return false;
  return std::all_of(n.page.begin(), n.page.end(), [](int32_t p) { return p < 0; });
}

void PrefixTree::prune(NodeId id) {
  while (id != kNoNode && nodes_[id].live && disposable(nodes_[id])) {
    PrefixNode& n = nodes_[id];
    NodeId parent = n.parent;
    if (parent == kNoNode) {
      auto it = root_keys_.find(id);
      roots_.erase(it->second);
      root_keys_.erase(it);
    } else {
      if (n.fill == page_size_) unindex(id);
      PrefixNode& p = nodes_[parent];
      (n.prev == kNoNode ? p.first_child : nodes_[n.prev].next) = n.next;
      if (n.next != kNoNode) nodes_[n.next].prev = n.prev;
      --p.children;
    }
    n.live = false;
    ++n.generation;
    free_.push_back(id);
    --live_;
    id = parent;
  }
}

void PrefixTree::index(NodeId id) {
  if ((indexed_ + 1) * 2 > static_cast<int64_t>(index_.size())) grow_index();
  size_t s = slot(nodes_[id].parent, nodes_[id].tokens_hash);
  while (index_[s] != kNoNode) s = (s + 1) & (index_.size() - 1);
  index_[s] = id;
  ++indexed_;
}

// Linear probing without tombstones: entries after the hole move back into it.
void PrefixTree::unindex(NodeId id) {
  size_t mask = index_.size() - 1, s = slot(nodes_[id].parent, nodes_[id].tokens_hash);
  while (index_[s] != id) s = (s + 1) & mask;
  index_[s] = kNoNode;
  --indexed_;
  for (size_t t = (s + 1) & mask; index_[t] != kNoNode; t = (t + 1) & mask) {
    size_t home = slot(nodes_[index_[t]].parent, nodes_[index_[t]].tokens_hash);
    if (((t - home) & mask) < ((t - s) & mask)) continue;
    index_[s] = index_[t];
    index_[t] = kNoNode;
    s = t;
  }
}

void PrefixTree::grow_index() {
  std::vector<NodeId> old = std::move(index_);
  index_.assign(std::max<size_t>(64, old.size() * 2), kNoNode);
  indexed_ = 0;
  for (NodeId id : old)
    if (id != kNoNode) index(id);
}

void PrefixTree::check_integrity() const {
  int64_t live = 0, full = 0;
  for (NodeId id = 0; id < static_cast<NodeId>(nodes_.size()); ++id) {
    const PrefixNode& n = nodes_[id];
    if (!n.live) continue;
    ++live;
    int32_t children = 0, resident = 0;
    for (NodeId c = n.first_child; c != kNoNode; c = nodes_[c].next) {
      KVASIR_CHECK(nodes_[c].live && nodes_[c].parent == id, "node ", c, " is not a child of ", id);
      ++children;
      resident += nodes_[c].page[0] >= 0;
    }
    KVASIR_CHECK(children == n.children && resident == n.resident_children, "node ", id,
                 " counts its children wrongly");
    KVASIR_CHECK(!disposable(n) || n.parent == kNoNode, "node ", id, " is kept for nothing");
    if (n.parent == kNoNode) continue;
    if (n.fill < page_size_) KVASIR_CHECK(n.children == 0, "partial node ", id, " has children");
    if (n.fill == page_size_) {
      ++full;
      KVASIR_CHECK(child(n.parent, tokens(id)) == id, "node ", id, " cannot be found, or is there twice");
    }
  }
  KVASIR_CHECK(live == live_ && full == indexed_, "live nodes ", live, " of ", live_, ", indexed ", full, " of ",
               indexed_);
}

}  // namespace kvasir::kvcache
