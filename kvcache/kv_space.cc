// Leases: how sequences hold pages. What the tree keeps and gives up is in kv_prefix.cc.
#include "kvcache/kv_space.h"

#include <algorithm>

#include "core/check.h"

namespace kvasir::kvcache {

KvSpace::KvSpace(const KvSpaceOptions& options)
    : options_(options),
      host_(options.host_pages),
      states_(options.states + options.kept_states),
      tree_(options.page_size) {
  KVASIR_CHECK(!options.groups.empty() && options.groups.size() <= kMaxGroups, "1 to ", kMaxGroups, " groups");
  KVASIR_CHECK(!(options.contiguous && options.prefix_cache), "runs are not shared");
  KVASIR_CHECK(options.states == 0 || options.host_pages == 0, "states are not moved");
  KVASIR_CHECK(options.states == 0 || !options.prefix_cache || options.kept_states > 0, "no state can be kept");
  for (const GroupShape& g : options.groups) {
    pools_.emplace_back(g.pages, options.contiguous);
    node_of_.emplace_back(g.pages, kNoNode);
  }
  node_of_host_.assign(options.host_pages, kNoNode);
  node_of_state_.assign(states_.size(), kNoNode);
  state_use_.assign(states_.size(), 0);
}

Lease::~Lease() {
  if (space_) space_->release(*this);
}

void Lease::swap(Lease& o) noexcept {
  std::swap(space_, o.space_);
  std::swap(tables_, o.tables_);
  std::swap(first_held_, o.first_held_);
  std::swap(tenant_, o.tenant_);
  std::swap(version_, o.version_);
  std::swap(committed_, o.committed_);
  std::swap(state_, o.state_);
  std::swap(at_, o.at_);
  std::swap(shared_tail_, o.shared_tail_);
}

HostLease::~HostLease() {
  if (!space_) return;
  for (int32_t h : pages_) space_->host_.unref(h);
}

Lease KvSpace::acquire(const std::string& key, int32_t tenant_id, const Match& m) {
  Lease lease;
  lease.space_ = this;
  lease.version_ = ++versions_;
  lease.tenant_ = tenant_id;
  tenant(tenant_id);
  if (!options_.prefix_cache || key.empty()) return lease;
  pin(lease, tree_.root(key, tenant_id));
  if (m.tokens == 0) return lease;

  // All that was found is held before anything is taken: taking may evict.
  hold_found(lease, m);
  const bool room = move_found_in(lease, m);
  if (m.partial != kNoNode) copy_partial(lease, m, room);
  return lease;
}

void KvSpace::hold_found(Lease& lease, const Match& m) {
  const int32_t whole = m.pages;
  for (int g = 0; g < groups(); ++g) {
    lease.first_held_[g] =
        static_cast<int32_t>(hidden_before(g, int64_t(whole) * options_.page_size) / options_.page_size);
    lease.tables_[g].assign(whole, 0);
    for (int32_t k = 0; k < whole; ++k) {
      if (!holds(lease, g, k)) continue;
      int32_t page = lease.tables_[g][k] = tree_[m.path[k]].page[g];
      if (page >= 0) {
        ref(g, page);
      } else {
        host_.ref(tree_[m.path[k]].host);
      }
    }
  }
  if (m.partial != kNoNode) {
    ++tree_[m.partial].hits;
    for (int g = 0; g < groups(); ++g) ref(g, tree_[m.partial].page[g]);
  }
  for (int32_t k = 0; k < whole; ++k) ++tree_[m.path[k]].hits;
  if (recurrent() && whole > 0) {
    lease.state_ = tree_[m.path[whole - 1]].state;
    states_.ref(lease.state_);
    state_use_[lease.state_] = ++tick_;
  }
  int32_t resident = 0;  // commit() gives what is moved in to its nodes once the move is done
  while (resident < whole && (lease.tables_[0][resident] >= 0 || resident < lease.first_held_[0])) ++resident;
  if (resident > 0) pin(lease, m.path[resident - 1]);
  lease.committed_ = resident;
}

bool KvSpace::move_found_in(Lease& lease, const Match& m) {
  std::vector<int32_t>& table = lease.tables_[0];
  bool room = true;
  int32_t whole_taken = m.pages;
  for (int32_t k = lease.committed_; k < m.pages; ++k) {
    if (table[k] >= 0) continue;
    const int32_t host = tree_[m.path[k]].host, page = room ? take(0, lease.tenant_, false) : -1;
    if (page < 0) {  // the hit ends where room does
      if (room) whole_taken = k;
      room = false;
      host_.unref(host);
      continue;
    }
    moves_.push_back({page, host, false});
    deferred_.push_back({step_, host, -1});  // until the move is done
    table[k] = page;
  }
  for (; !room && static_cast<int32_t>(table.size()) > whole_taken; table.pop_back())
    if (table.back() >= 0) unref(0, table.back());
  return room;
}

void KvSpace::copy_partial(Lease& lease, const Match& m, bool room) {
  const std::array<int32_t, kMaxGroups> from = tree_[m.partial].page;
  std::array<int32_t, kMaxGroups> to{};
  int got = 0;
  while (room && got < groups() && (to[got] = take(got, lease.tenant_, false)) >= 0) ++got;
  const bool copied = got == groups();
  for (int g = 0; g < groups(); ++g) {
    if (copied) {
      copies_.push_back({from[g], to[g], m.partial_tokens, g});
      deferred_.push_back({step_, from[g], g});  // until the copy is done
      lease.tables_[g].push_back(to[g]);
    } else {
      if (g < got) unref(g, to[g]);
      unref(g, from[g]);
    }
  }
}

int64_t KvSpace::pages_missing(const Lease& lease, int64_t tokens) const {
  return std::max<int64_t>(0, pages_for(tokens) - static_cast<int64_t>(lease.tables_[0].size()));
}

bool KvSpace::grow(Lease& lease, int64_t tokens, bool urgent) {
  if (lease.space_ == nullptr) {
    lease.space_ = this;
    lease.version_ = ++versions_;
  }
  int64_t want = pages_for(tokens);
  bool enough = true;
  for (int g = 0; g < groups(); ++g) {
    int64_t missing = want - static_cast<int64_t>(lease.tables_[g].size());
    if (missing > 0 && available(g, lease.tenant_, urgent) < missing) enough = false;
  }
  if (!enough) return false;
  for (int g = 0; g < groups(); ++g) {
    auto& table = lease.tables_[g];
    int64_t missing = want - static_cast<int64_t>(table.size());
    if (missing <= 0) continue;
    if (options_.contiguous) {
      KVASIR_CHECK(table.empty(), "a run is reserved once, not grown");
      int32_t first = pools_[g].take_run(missing);
      if (first < 0) return false;
      for (int64_t i = 0; i < missing; ++i) table.push_back(static_cast<int32_t>(first + i));
      continue;
    }
    for (; missing > 0; --missing) {
      int32_t page = take(g, lease.tenant_, urgent);
      KVASIR_CHECK(page >= 0, "group ", g, " had pages to take and gave none");
      table.push_back(page);
    }
  }
  return true;
}

bool KvSpace::make_writable(Lease& lease, int64_t position, bool urgent) {
  if (!lease.shared_tail_) return true;
  size_t k = position / options_.page_size;
  if (lease.tables_[0].size() <= k) {
    lease.shared_tail_ = false;  // the next write opens a page of its own
    return true;
  }
  int32_t used = static_cast<int32_t>(position % options_.page_size);
  std::array<int32_t, kMaxGroups> fresh{};
  for (int g = 0; g < groups(); ++g) {
    int32_t page = lease.tables_[g][k];
    fresh[g] = -1;
    if (pools_[g].refs(page) == 1 && !pools_[g].kept(page)) continue;
    fresh[g] = take(g, lease.tenant_, urgent);
    if (fresh[g] >= 0) continue;
    for (int h = 0; h < g; ++h)
      if (fresh[h] >= 0) unref(h, fresh[h]);
    return false;
  }
  for (int g = 0; g < groups(); ++g) {
    if (fresh[g] < 0) continue;
    int32_t page = lease.tables_[g][k];
    if (used > 0) {
      copies_.push_back({page, fresh[g], used, g});
      deferred_.push_back({step_, page, g});  // its reference lives until the copy is done
    } else {
      unref(g, page);
    }
    lease.tables_[g][k] = fresh[g];
    lease.version_ = ++versions_;
  }
  lease.shared_tail_ = false;
  return true;
}

int32_t KvSpace::own_state(Lease& lease) {
  if (options_.states == 0) return -1;
  const int32_t shared = lease.state_;
  if (shared >= 0 && states_.refs(shared) == 1 && !states_.kept(shared)) return shared;
  lease.state_ = take_state();
  if (shared >= 0) {
    copies_.push_back({shared, lease.state_, 0, kStateGroup});
    states_.unref(shared);  // whoever writes it does so after the copy
  }
  return lease.state_;
}

void KvSpace::share_state(const Lease& lease, Lease& with) {
  with.state_ = lease.state_;
  if (lease.state_ >= 0) states_.ref(lease.state_);
}

Lease KvSpace::fork(Lease& lease, int64_t used, int64_t reserve) {
  Lease copy;
  copy.space_ = this;
  copy.version_ = ++versions_;
  copy.tenant_ = lease.tenant_;
  if (options_.contiguous) {
    if (!grow(copy, reserve)) return Lease();
    for (int64_t k = 0; k < pages_for(used); ++k) {
      int32_t n = static_cast<int32_t>(std::min<int64_t>(options_.page_size, used - k * options_.page_size));
      for (int g = 0; g < groups(); ++g) {
        copies_.push_back({lease.tables_[g][k], copy.tables_[g][k], n, g});
        ref(g, lease.tables_[g][k]);
        deferred_.push_back({step_, lease.tables_[g][k], g});
      }
    }
    share_state(lease, copy);
    return copy;
  }
  share_state(lease, copy);
  copy.first_held_ = lease.first_held_;
  copy.committed_ = lease.committed_;
  if (lease.at_ != kNoNode) pin(copy, lease.at_);
  int64_t pages = pages_for(used);
  for (int g = 0; g < groups(); ++g) {
    copy.tables_[g].assign(lease.tables_[g].begin(), lease.tables_[g].begin() + pages);
    for (int64_t k = 0; k < pages; ++k)
      if (holds(copy, g, k)) ref(g, copy.tables_[g][k]);
  }
  copy.shared_tail_ = lease.shared_tail_ = true;
  return copy;
}

void KvSpace::trim_front(Lease& lease, int64_t next_position) {
  for (int g = 0; g < groups(); ++g) {
    if (!window_group(g) || options_.contiguous) continue;
    const int64_t visible = hidden_before(g, next_position + 1);
    int32_t first = static_cast<int32_t>(
        std::min<int64_t>(visible / options_.page_size, static_cast<int64_t>(lease.tables_[g].size())));
    for (int32_t& k = lease.first_held_[g]; k < first; ++k)
      if (k >= sink_pages(g)) unref(g, lease.tables_[g][k]);
  }
}

void KvSpace::trim_back(Lease& lease, int64_t tokens) {
  if (options_.contiguous) return;
  size_t want = pages_for(tokens);
  for (int g = 0; g < groups(); ++g)
    while (lease.tables_[g].size() > want) {
      unref(g, lease.tables_[g].back());
      lease.tables_[g].pop_back();
      lease.version_ = ++versions_;
    }
}

// From the tail to the head: the end of a prefix is older than what it stands on.
void KvSpace::release(Lease& lease) {
  for (int g = 0; g < groups(); ++g) {
    auto& table = lease.tables_[g];
    for (int64_t k = static_cast<int64_t>(table.size()); k-- > 0;)
      if (holds(lease, g, k)) unref(g, table[k]);
    table.clear();
    lease.first_held_[g] = 0;
  }
  if (lease.at_ != kNoNode) {
    NodeId at = std::exchange(lease.at_, kNoNode);
    --tree_[at].pins;
    tree_.prune(at);
  }
  if (lease.state_ >= 0) states_.unref(std::exchange(lease.state_, -1));
  lease.committed_ = 0;
  lease.shared_tail_ = false;
  lease.space_ = nullptr;
}

bool KvSpace::can_move_out(const Lease& lease) const {
  return groups() == 1 && !options_.contiguous &&
         host_.free_pages() + host_.idle_pages() >= static_cast<int64_t>(lease.tables_[0].size());
}

HostLease KvSpace::move_out(const Lease& lease, int64_t tokens) {
  HostLease out;
  out.space_ = this;
  const int64_t n = pages_for(tokens);
  while (static_cast<int64_t>(out.pages_.size()) < n) {
    int32_t host = take_host();
    if (host < 0) return HostLease();
    out.pages_.push_back(host);
  }
  for (int64_t k = 0; k < n; ++k) moves_.push_back({lease.tables_[0][k], out.pages_[k], true});
  return out;
}

bool KvSpace::move_in(HostLease& from, Lease& to, const std::string& key, int32_t tenant_id, bool urgent) {
  int64_t n = static_cast<int64_t>(from.pages_.size());
  if (available(0, tenant_id, urgent) < n) return false;
  to = acquire(key, tenant_id, Match{});
  bool grown = grow(to, n * options_.page_size, urgent);
  KVASIR_CHECK(grown, "pages were available and did not come");
  for (int64_t k = 0; k < n; ++k) {
    moves_.push_back({to.tables_[0][k], from.pages_[k], false});
    deferred_.push_back({step_, from.pages_[k], -1});
  }
  from.pages_.clear();
  from.space_ = nullptr;
  return true;
}

void KvSpace::take_orders(std::vector<PageCopy>& copies, std::vector<PageMove>& moves) {
  copies.clear();
  moves.clear();
  std::swap(copies, copies_);
  std::swap(moves, moves_);
}

void KvSpace::abandon_orders() {
  KVASIR_CHECK(moves_.empty(), "moves are made while a plan is made");
  copies_.clear();
  retire_step(step_);
  retired_ = step_ - 1;
}

void KvSpace::retire_step(uint64_t step) {
  retired_ = step;
  for (; !deferred_.empty() && deferred_.front().step <= step; deferred_.pop_front()) {
    const Deferred d = deferred_.front();
    if (d.group < 0) {
      host_.unref(d.page);
    } else {
      unref(d.group, d.page);
    }
  }
}

void KvSpace::check_integrity(std::span<const Lease* const> leases,
                              std::span<const HostLease* const> host_leases) const {
  tree_.check_integrity();
  std::vector<int32_t> pins(tree_.capacity(), 0);
  for (int g = 0; g < groups(); ++g) {
    pools_[g].check_integrity();
    std::vector<int32_t> refs(pools_[g].size(), 0);
    for (const Lease* l : leases) {
      const auto& table = l->tables_[g];
      for (size_t k = 0; k < table.size(); ++k)
        if (holds(*l, g, int64_t(k))) ++refs[table[k]];
    }
    for (const Deferred& d : deferred_)
      if (d.group == g) ++refs[d.page];
    for (int64_t p = 0; p < pools_[g].size(); ++p) {
      KVASIR_CHECK(refs[p] == pools_[g].refs(p), "page ", p, " of group ", g, " has ", pools_[g].refs(p),
                   " references, held ", refs[p], " times");
      NodeId n = node_of_[g][p];
      KVASIR_CHECK((n != kNoNode) == pools_[g].kept(p), "page ", p, " is kept and no node's, or the reverse");
      if (n != kNoNode) KVASIR_CHECK(tree_[n].live && tree_[n].page[g] == p, "page ", p, " is not its node's");
    }
  }
  for (const Lease* l : leases)
    if (l->at_ != kNoNode) ++pins[l->at_];
  int64_t resident[kMaxGroups] = {};
  std::vector<std::array<int64_t, kMaxGroups>> idle(tenants_.size());
  for (NodeId id = 0; id < tree_.capacity(); ++id) {
    if (!tree_[id].live) continue;
    KVASIR_CHECK(tree_[id].pins == pins[id], "node ", id, " has ", tree_[id].pins, " pins, held ", pins[id]);
    for (int g = 0; g < groups(); ++g) {
      int32_t p = tree_[id].page[g];
      if (p < 0) continue;
      ++resident[g];
      KVASIR_CHECK(node_of_[g][p] == id, "node ", id, " names page ", p, " of another node");
      if (pools_[g].refs(p) == 0) ++idle[tree_[id].tenant][g];
    }
  }
  for (int g = 0; g < groups(); ++g)
    for (size_t t = 0; t < tenants_.size(); ++t)
      KVASIR_CHECK(idle[t][g] == tenants_[t].idle[g], "tenant ", t, " has ", idle[t][g], " idle pages, counted ",
                   tenants_[t].idle[g]);
  states_.check_integrity();
  std::vector<int32_t> states(states_.size(), 0);
  for (const Lease* l : leases)
    if (l->state_ >= 0) ++states[l->state_];
  for (int64_t s = 0; s < states_.size(); ++s) {
    KVASIR_CHECK(states[s] == states_.refs(s), "state ", s, " has ", states_.refs(s), " references, held ", states[s]);
    const NodeId n = node_of_state_[s];
    KVASIR_CHECK((n != kNoNode) == states_.kept(s), "state ", s, " is kept and no node's, or the reverse");
    if (n != kNoNode)
      KVASIR_CHECK(tree_[n].live && tree_[n].state == s && tree_[n].page[0] >= 0, "state ", s, " is not its node's");
  }
  host_.check_integrity();
  KVASIR_CHECK(static_cast<int64_t>(host_heap_.size()) <= 2 * host_.size() + 65, "the second tier has ", host_.size(),
               " pages and lists ", host_heap_.size(), " that may go");
  std::vector<int32_t> refs(host_.size(), 0);
  for (const HostLease* l : host_leases)
    for (int32_t h : l->pages_) ++refs[h];
  for (const Deferred& d : deferred_)
    if (d.group < 0) ++refs[d.page];
  for (int64_t h = 0; h < host_.size(); ++h) {
    KVASIR_CHECK(refs[h] == host_.refs(h), "host page ", h, " has ", host_.refs(h), " references, held ", refs[h]);
    NodeId n = node_of_host_[h];
    KVASIR_CHECK((n != kNoNode) == host_.kept(h), "host page ", h, " is kept and no node's, or the reverse");
    if (n != kNoNode) KVASIR_CHECK(tree_[n].live && tree_[n].host == h, "host page ", h, " is not its node's");
  }
}

}  // namespace kvasir::kvcache
