// What the tree keeps and gives up: matching, committing, eviction, the second tier.
#include <algorithm>

#include "core/check.h"
#include "kvcache/kv_space.h"

namespace kvasir::kvcache {

KvSpace::Tenant& KvSpace::tenant(int32_t id) {
  if (static_cast<size_t>(id) >= tenants_.size()) tenants_.resize(id + 1);
  return tenants_[id];
}

int64_t KvSpace::idle_pages(int32_t id) const {
  return static_cast<size_t>(id) < tenants_.size() ? tenants_[id].idle[0] : 0;
}

// Pages of others' prefixes that one tenant may not evict.
int64_t KvSpace::floor_pages(int g) const {
  return static_cast<int64_t>((1.0 - options_.tenant_share) * static_cast<double>(pools_[g].size()));
}

int64_t KvSpace::available(int g, int32_t id, bool urgent) const {
  const PagePool& pool = pools_[g];
  if (urgent) return pool.free_pages() + pool.idle_pages();
  int64_t own = static_cast<size_t>(id) < tenants_.size() ? tenants_[id].idle[g] : 0;
  int64_t others = std::max<int64_t>(0, pool.idle_pages() - own - floor_pages(g));
  return pool.free_pages() + own + others;
}

void KvSpace::ref(int g, int32_t page) {
  if (pools_[g].refs(page) == 0) --tenants_[tree_[node_of_[g][page]].tenant].idle[g];
  pools_[g].ref(page);
}

void KvSpace::unref(int g, int32_t page) {
  if (!pools_[g].unref(page)) return;
  NodeId node = node_of_[g][page];
  if (node == kNoNode) return;
  PrefixNode& n = tree_[node];
  n.last_use[g] = ++tick_;
  ++tenants_[n.tenant].idle[g];
  offer(g, node);
  enforce_share(g, n.tenant);
}

void KvSpace::enforce_share(int g, int32_t id) {
  int64_t most = pools_[g].size() - floor_pages(g);
  while (tenants_[id].idle[g] > most && evict_from(g, tenants_[id], false)) {
  }
}

bool KvSpace::valid(int g, const Candidate& c) const {
  const PrefixNode& n = tree_[c.node];
  return n.live && n.generation == c.generation && n.last_use[g] == c.last_use && n.page[g] >= 0 &&
         pools_[g].refs(n.page[g]) == 0 && (window_group(g) || n.resident_children == 0);
}

// A page that may be evicted joins its tenant's heap: least recently used first, the dear to recompute later.
void KvSpace::offer(int g, NodeId id) {
  const PrefixNode& n = tree_[id];
  if (!window_group(g) && n.resident_children > 0) return;
  Heap& heap = tenants_[n.tenant].heap[g];
  if (heap.size() > 64 && static_cast<int64_t>(heap.size()) > 2 * tenants_[n.tenant].idle[g] + 64) {
    std::erase_if(heap, [&](const Candidate& c) { return !valid(g, c); });
    std::make_heap(heap.begin(), heap.end());
  }
  double dear = std::min(options_.recompute_slope * n.depth, 1.0) + (n.hits > 1 ? 1.0 : 0.0);
  uint64_t grace = static_cast<uint64_t>(dear * 0.125 * static_cast<double>(pools_[g].size()));
  heap.push_back({n.last_use[g] + grace, id, n.generation, n.last_use[g]});
  std::push_heap(heap.begin(), heap.end());
}

const KvSpace::Candidate* KvSpace::top(int g, Tenant& t) {
  Heap& heap = t.heap[g];
  while (!heap.empty() && !valid(g, heap.front())) {
    std::pop_heap(heap.begin(), heap.end());
    heap.pop_back();
  }
  return heap.empty() ? nullptr : &heap.front();
}

bool KvSpace::evict_from(int g, Tenant& t, bool may_move) {
  const Candidate* c = top(g, t);
  if (c == nullptr) return false;
  NodeId node = c->node;
  if (may_move && g == 0 && groups() == 1) demote(node);
  drop_page(g, node);
  tree_.prune(node);
  return true;
}

bool KvSpace::evict_one(int g, int32_t id, bool urgent) {
  int64_t own = tenants_[id].idle[g], others = pools_[g].idle_pages() - own;
  bool may_others = urgent || others > floor_pages(g);
  Tenant* best = nullptr;
  uint64_t least = 0;
  for (Tenant& t : tenants_) {
    if (t.idle[g] == 0 || (&t != &tenants_[id] && !may_others)) continue;
    const Candidate* c = top(g, t);
    if (c == nullptr || (best != nullptr && c->key >= least)) continue;
    best = &t;
    least = c->key;
  }
  if (best != nullptr) return evict_from(g, *best, true);
  return (own > 0 || (may_others && others > 0)) && evict_below_held(g, id, may_others);
}

// Two sequences that both brought a page back from the second tier keep a copy each while steps are in flight, and
// hold the same page after it: when the one whose copy is the tree's goes, that page is idle below one in use. Rare
// enough to look everywhere. What continues it is found again only if it is in the second tier, too.
bool KvSpace::evict_below_held(int g, int32_t id, bool may_others) {
  NodeId oldest = kNoNode;
  for (NodeId n = 0; n < tree_.capacity(); ++n) {
    const PrefixNode& node = tree_[n];
    if (!node.live || node.page[g] < 0 || pools_[g].refs(node.page[g]) > 0) continue;
    if (node.tenant != id && !may_others) continue;
    if (oldest == kNoNode || node.last_use[g] < tree_[oldest].last_use[g]) oldest = n;
  }
  if (oldest == kNoNode) return false;
  drop_page(g, oldest);
  tree_.prune(oldest);
  return true;
}

int32_t KvSpace::take(int g, int32_t id, bool urgent) {
  tenant(id);
  int32_t page = pools_[g].take();
  while (page < 0 && evict_one(g, id, urgent)) page = pools_[g].take();
  return page;
}

void KvSpace::announce(CacheEvent::Kind kind, NodeId id) {
  if (!options_.events) return;
  const PrefixNode& n = tree_[id];
  if (n.fill < options_.page_size) return;
  CacheEvent e{0, kind, n.chain_hash, 0, {}};
  if (n.depth > 1) e.parent = tree_[n.parent].chain_hash;
  if (kind == CacheEvent::Kind::stored) e.tokens.assign(tree_.tokens(id).begin(), tree_.tokens(id).end());
  options_.events->add(n.tenant, std::move(e));
}

void KvSpace::attach(int g, NodeId id, int32_t page) {
  PrefixNode& n = tree_[id];
  pools_[g].keep(page);
  node_of_[g][page] = id;
  n.page[g] = page;
  if (g != 0) return;
  ++tree_[n.parent].resident_children;
  if (n.host < 0) announce(CacheEvent::Kind::stored, id);
}

// The device page goes; the node stays as long as something else needs it (prune it after).
void KvSpace::drop_page(int g, NodeId id) {
  PrefixNode& n = tree_[id];
  int32_t page = n.page[g];
  if (pools_[g].refs(page) == 0) --tenants_[n.tenant].idle[g];
  pools_[g].forget(page);
  node_of_[g][page] = kNoNode;
  n.page[g] = -1;
  if (g != 0) return;
  drop_state(id);
  PrefixNode& parent = tree_[n.parent];
  --parent.resident_children;
  if (n.host < 0) announce(CacheEvent::Kind::removed, id);
  if (parent.resident_children == 0 && parent.page[0] >= 0 && pools_[0].refs(parent.page[0]) == 0) offer(0, n.parent);
  if (n.host >= 0) return;
  // Without the prefix, what continues it in the second tier is of no use.
  for (NodeId c = n.first_child; c != kNoNode;) {
    NodeId next = tree_[c].next;
    if (tree_[c].host >= 0 && tree_[c].page[0] < 0) drop_host(c);
    c = next;
  }
}

// On its way out of the device: a whole page goes to the second tier, if that has or makes room.
bool KvSpace::demote(NodeId id) {
  if (host_.size() == 0) return false;
  if (tree_[id].host >= 0) return true;
  if (tree_[id].fill < options_.page_size) return false;
  ++tree_[id].pins;
  int32_t host = take_host();
  --tree_[id].pins;
  if (host < 0) return false;
  host_.keep(host);
  node_of_host_[host] = id;
  moves_.push_back({tree_[id].page[0], host, true});
  PrefixNode& n = tree_[id];
  n.host = host;
  n.host_ready = step_;
  if (host_heap_.size() > 2 * static_cast<size_t>(host_.size()) + 64) tidy_host_heap();
  host_heap_.push_back({n.last_use[0], id, n.generation, n.last_use[0]});
  std::push_heap(host_heap_.begin(), host_heap_.end());
  host_.unref(host);
  return true;
}

bool KvSpace::in_host(const Candidate& c) const {
  const PrefixNode& n = tree_[c.node];
  return n.live && n.generation == c.generation && n.host >= 0;
}

// Leaves what may still go, each once: pages went otherwise meanwhile, and some came again.
void KvSpace::tidy_host_heap() {
  std::erase_if(host_heap_, [&](const Candidate& c) { return !in_host(c); });
  std::sort(host_heap_.begin(), host_heap_.end(), [](const Candidate& a, const Candidate& b) {
    return a.node != b.node ? a.node < b.node : a.last_use > b.last_use;
  });
  auto same = [](const Candidate& a, const Candidate& b) { return a.node == b.node; };
  host_heap_.erase(std::unique(host_heap_.begin(), host_heap_.end(), same), host_heap_.end());
  std::make_heap(host_heap_.begin(), host_heap_.end());
}

int32_t KvSpace::take_host() {
  int32_t host = host_.take();
  if (host >= 0) return host;
  std::vector<Candidate> kept;
  while (host < 0 && !host_heap_.empty()) {
    Candidate c = host_heap_.front();
    std::pop_heap(host_heap_.begin(), host_heap_.end());
    host_heap_.pop_back();
    if (!in_host(c)) continue;
    const PrefixNode& n = tree_[c.node];
    bool last = n.page[0] >= 0 || n.children == 0;
    if (!last || host_.refs(n.host) > 0 || n.host_ready > retired_) {
      kept.push_back(c);
      if (kept.size() > 64) break;
      continue;
    }
    drop_host(c.node);
    host = host_.take();
  }
  for (const Candidate& c : kept) {
    host_heap_.push_back(c);
    std::push_heap(host_heap_.begin(), host_heap_.end());
  }
  return host;
}

void KvSpace::drop_host(NodeId id) {
  PrefixNode& n = tree_[id];
  int32_t host = std::exchange(n.host, -1);
  node_of_host_[host] = kNoNode;
  host_.forget(host);
  if (n.page[0] < 0) {
    announce(CacheEvent::Kind::removed, id);
    for (NodeId c = n.first_child; c != kNoNode;) {
      NodeId next = tree_[c].next;
      if (tree_[c].host >= 0 && tree_[c].page[0] < 0) drop_host(c);
      c = next;
    }
  }
  tree_.prune(id);
}

// A free slot, or that of the kept state which was of no use for longest. There is one: fewer leases have states than
// there are slots.
int32_t KvSpace::take_state() {
  if (const int32_t slot = states_.take(); slot >= 0) return slot;
  int32_t oldest = -1;
  for (int32_t s = 0; s < static_cast<int32_t>(states_.size()); ++s)
    if (states_.refs(s) == 0 && (oldest < 0 || state_use_[s] < state_use_[oldest])) oldest = s;
  KVASIR_CHECK(oldest >= 0, "more leases have states than the ", options_.states, " that may");
  drop_state(node_of_state_[oldest]);
  return states_.take();
}

void KvSpace::keep_state(const Lease& lease, int64_t computed) {
  if (lease.at_ == kNoNode || lease.state_ < 0 || computed == 0 || states_.kept(lease.state_)) return;
  PrefixNode& n = tree_[lease.at_];
  if (int64_t(lease.committed_) * options_.page_size != computed || n.page[0] < 0 || n.state >= 0) return;
  states_.keep(lease.state_);
  node_of_state_[lease.state_] = lease.at_;
  state_use_[lease.state_] = ++tick_;
  n.state = lease.state_;
}

// The node stays; a lease that begins with this state has it to itself from now on.
void KvSpace::drop_state(NodeId id) {
  const int32_t slot = std::exchange(tree_[id].state, -1);
  if (slot < 0) return;
  node_of_state_[slot] = kNoNode;
  states_.forget(slot);
}

void KvSpace::pin(Lease& lease, NodeId node) {
  ++tree_[node].pins;
  NodeId before = std::exchange(lease.at_, node);
  if (before == kNoNode) return;
  --tree_[before].pins;
  tree_.prune(before);
}

Match KvSpace::match(const std::string& key, std::span<const int32_t> tokens, int64_t limit) {
  Match m;
  if (!options_.prefix_cache || key.empty()) return m;
  NodeId node = tree_.find_root(key);
  if (node == kNoNode) return m;
  const int64_t size = options_.page_size;
  limit = std::min<int64_t>(limit, static_cast<int64_t>(tokens.size()));
  std::array<int64_t, kMaxGroups> run{};
  bool sinks_there = true;
  int32_t whole = 0;
  for (int64_t k = 0; (k + 1) * size <= limit; ++k) {
    NodeId c = tree_.child(node, tokens.subspan(k * size, size));
    if (c == kNoNode) break;
    const PrefixNode& n = tree_[c];
    if (!window_group(0) && n.page[0] < 0 && !readable_from_host(n)) break;
    m.path.push_back(node = c);
    bool covered = true;
    for (int g = 0; g < groups(); ++g) {
      if (!window_group(g)) continue;
      run[g] = n.page[g] >= 0 ? run[g] + 1 : 0;
      if (k < sink_pages(g) && n.page[g] < 0) sinks_there = false;
      covered = covered && sinks_there && run[g] >= k + 1 - hidden_before(g, (k + 1) * size) / size;
    }
    if (covered && (!recurrent() || n.state >= 0)) whole = static_cast<int32_t>(k + 1);
  }
  if (recurrent()) m.met_pages = static_cast<int32_t>(m.path.size());
  m.pages = whole;
  NodeId end = whole > 0 ? m.path[whole - 1] : tree_.find_root(key);
  for (int32_t k = 0; k < whole; ++k) {
    const PrefixNode& n = tree_[m.path[k]];
    if (n.page[0] < 0) {
      m.host_pages += !window_group(0);
    } else {
      m.idle_pages += pools_[0].refs(n.page[0]) == 0;
    }
  }
  if (!recurrent() && whole == static_cast<int32_t>(m.path.size()) && limit > whole * size) {
    auto rest = tokens.subspan(whole * size, std::min<int64_t>(size, limit - whole * size));
    m.partial = tree_.best_partial(end, rest, &m.partial_tokens, [&](NodeId c) {
      for (int g = 0; g < groups(); ++g)
        if (tree_[c].page[g] < 0) return false;
      return true;
    });
  }
  m.path.resize(whole);
  m.tokens = whole * size + m.partial_tokens;
  return m;
}

void KvSpace::commit(Lease& lease, std::span<const int32_t> tokens, int64_t computed, bool may_swap) {
  if (lease.at_ == kNoNode) return;
  const int64_t size = options_.page_size;
  for (; (lease.committed_ + 1) * size <= computed; ++lease.committed_) {
    const int32_t k = lease.committed_;
    auto page_tokens = tokens.subspan(k * size, size);
    NodeId node = node_of_[0][lease.tables_[0][k]];
    if (node == kNoNode || !holds(lease, 0, k) || tree_[node].parent != lease.at_ || tree_[node].fill < size)
      node = tree_.child(lease.at_, page_tokens);
    if (node == kNoNode) node = tree_.insert(lease.at_, page_tokens);
    for (int g = 0; g < groups(); ++g) {
      if (!holds(lease, g, k)) continue;
      int32_t& mine = lease.tables_[g][k];
      int32_t theirs = tree_[node].page[g];
      if (theirs == mine) continue;
      if (theirs < 0) {
        if (!pools_[g].kept(mine)) attach(g, node, mine);
        continue;
      }
      if (!may_swap) return;
      ref(g, theirs);
      unref(g, mine);
      mine = theirs;
      lease.version_ = ++versions_;
    }
    pin(lease, node);
  }
}

void KvSpace::finish(Lease lease, std::span<const int32_t> tokens, int64_t computed) {
  if (lease.empty()) return;
  commit(lease, tokens, computed, true);
  const int64_t size = options_.page_size;
  int64_t whole = computed / size;
  if (lease.at_ != kNoNode && lease.committed_ == whole && computed > whole * size) {
    auto rest = tokens.subspan(whole * size, computed - whole * size);
    int32_t shared = 0;
    tree_.best_partial(lease.at_, rest, &shared, [&](NodeId c) { return tree_[c].page[0] >= 0; });
    bool exclusive = true;
    for (int g = 0; g < groups(); ++g) {
      int32_t page = lease.tables_[g][whole];
      exclusive = exclusive && whole >= lease.first_held_[g] && pools_[g].refs(page) == 1 && !pools_[g].kept(page);
    }
    if (exclusive && shared < static_cast<int32_t>(rest.size())) {
      NodeId node = tree_.insert(lease.at_, rest);
      for (int g = 0; g < groups(); ++g) attach(g, node, lease.tables_[g][whole]);
    }
  }
  release(lease);
}

void KvSpace::flush() {
  for (NodeId id = 0; id < tree_.capacity(); ++id)
    if (tree_[id].live && tree_[id].host >= 0 && host_.refs(tree_[id].host) == 0) drop_host(id);
  for (bool more = true; more;) {
    more = false;
    for (int g = 0; g < groups(); ++g)
      for (Tenant& t : tenants_)
        while (const Candidate* c = top(g, t)) {
          NodeId node = c->node;
          drop_page(g, node);
          tree_.prune(node);
          more = true;
        }
  }
  tidy_host_heap();
}

}  // namespace kvasir::kvcache
