// Where every sequence's K/V lives: the pools, the prefix tree over them, the second tier, and the
// leases through which sequences hold pages. Every page is free, held by leases, or kept for a prefix.
//
// Nothing here moves data. What must be copied or moved is listed in order, for the plan of the step
// that is being made; a page that a step in flight still names comes back when that step retires.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvcache/cache_events.h"
#include "kvcache/orders.h"
#include "kvcache/page_pool.h"
#include "kvcache/prefix_tree.h"

namespace kvasir::kvcache {

struct GroupShape {
  int64_t pages = 0;
  int32_t window = 0;  // 0: full attention
  int32_t sinks = 0;   // first tokens that stay visible; counted inside the window
};

struct KvSpaceOptions {
  int32_t page_size = 16;
  std::vector<GroupShape> groups;  // group 0 alone may be full attention
  bool contiguous = false;         // offset mode: a sequence's pages are one run
  bool prefix_cache = true;
  int64_t host_pages = 0;
  int64_t states = 0;          // slots for recurrent states, of as many leases as may have one; 0: the model has none
  int64_t kept_states = 0;     // more of them, so that states may be kept for prefixes
  double tenant_share = 1.0;   // of a pool, that one tenant's kept pages may fill
  double recompute_slope = 0;  // how much dearer each page is to recompute than the one before it
  std::shared_ptr<CacheEvents> events;  // null: nobody wants to know
};

class KvSpace;

// What one sequence holds. It gives everything back when it goes.
class Lease {
 public:
  Lease() = default;
  Lease(Lease&& o) noexcept { swap(o); }
  Lease& operator=(Lease&& o) noexcept {
    Lease gone(std::move(*this));
    swap(o);
    return *this;
  }
  ~Lease();

  std::span<const int32_t> pages(int group = 0) const { return tables_[group]; }
  std::span<const std::vector<int32_t>> more_pages(int groups) const {
    return {tables_.data() + 1, size_t(groups - 1)};
  }
  // Entries before it are stale, but for those of sinks (KvSpace::sink_pages).
  int32_t first_held(int group) const { return first_held_[group]; }
  bool empty() const { return space_ == nullptr; }
  // Changes whenever a table does otherwise than by growing, and is never that of another lease.
  uint64_t version() const { return version_; }

 private:
  friend class KvSpace;
  void swap(Lease& o) noexcept;

  KvSpace* space_ = nullptr;
  std::array<std::vector<int32_t>, kMaxGroups> tables_;
  std::array<int32_t, kMaxGroups> first_held_{};
  int32_t tenant_ = 0;
  uint64_t version_ = 0;
  int32_t committed_ = 0;     // pages that are in the tree
  int32_t state_ = -1;        // its slot, of a model that has states
  NodeId at_ = kNoNode;       // where in the tree: the node of the last of them, pinned
  bool shared_tail_ = false;  // after a fork, until the first write tells
};

// Pages in the second tier that one sequence was moved to.
class HostLease {
 public:
  HostLease() = default;
  HostLease(HostLease&& o) noexcept : space_(std::exchange(o.space_, nullptr)), pages_(std::move(o.pages_)) {}
  HostLease& operator=(HostLease&& o) noexcept {
    HostLease gone(std::move(*this));
    std::swap(space_, o.space_);
    std::swap(pages_, o.pages_);
    return *this;
  }
  ~HostLease();
  std::span<const int32_t> pages() const { return pages_; }

 private:
  friend class KvSpace;
  KvSpace* space_ = nullptr;
  std::vector<int32_t> pages_;
};

// How much of a prompt is there already, and where: good until the space changes.
struct Match {
  int64_t tokens = 0;          // pages * page_size + partial_tokens
  int32_t pages = 0;           // whole ones, found in the tree
  int32_t partial_tokens = 0;  // of one page more, to be copied
  NodeId partial = kNoNode;
  int32_t idle_pages = 0;    // of group 0's whole pages, how many nobody holds now
  int32_t host_pages = 0;    // how many have to come from the second tier
  std::vector<NodeId> path;  // the whole pages' nodes, from the root on
  // Of a recurrent model: whole pages that are cached, though no state at the end of the last of them is.
  int32_t met_pages = 0;
};

inline void drop_partial(Match& m) {
  m.tokens -= m.partial_tokens;
  m.partial_tokens = 0;
  m.partial = kNoNode;
}

class KvSpace {
 public:
  explicit KvSpace(const KvSpaceOptions& options);

  int groups() const { return static_cast<int>(pools_.size()); }
  const PagePool& pool(int group) const { return pools_[group]; }
  const PagePool& host_pool() const { return host_; }
  int64_t pages_for(int64_t tokens) const { return (tokens + options_.page_size - 1) / options_.page_size; }
  // What `tenant` may take now: free pages and those it may evict.
  int64_t available(int group, int32_t tenant, bool urgent = false) const;

  // The longest cached prefix of `tokens`, at most `limit` tokens of it.
  Match match(const std::string& key, std::span<const int32_t> tokens, int64_t limit);

  // A lease that starts with what was found (as far as room allows: lease_tokens says).
  // `key` empty: outside the tree.
  Lease acquire(const std::string& key, int32_t tenant, const Match& match);
  int64_t lease_tokens(const Lease& lease, const Match& match) const {
    int64_t pages = static_cast<int64_t>(lease.tables_[0].size());
    return pages > match.pages ? match.tokens : std::min<int64_t>(pages, match.pages) * options_.page_size;
  }
  // Room for `tokens` tokens in every group: all or nothing.
  bool grow(Lease& lease, int64_t tokens, bool urgent = false);
  // Pages at the front that stay while the window moves on.
  int32_t sink_pages(int group) const { return static_cast<int32_t>(pages_for(options_.groups[group].sinks)); }
  int64_t pages_missing(const Lease& lease, int64_t tokens) const;  // group 0
  // The page of this position may be written: a shared one is copied first. False: no page for that.
  bool make_writable(Lease& lease, int64_t position, bool urgent = false);
  // The slot of its state, which the plan being made writes: forks have one together until the first of them goes on,
  // and that one's is copied first. -1: the model has none.
  int32_t own_state(Lease& lease);
  // Whoever has all of the lease's `computed` tokens in front, whole and committed pages, may begin with its state.
  void keep_state(const Lease& lease, int64_t computed);
  // The same pages for another sequence; `used` tokens of them are written, offset mode reserves `reserve`.
  // Empty when offset mode has no run for it.
  Lease fork(Lease& lease, int64_t used, int64_t reserve);
  void trim_front(Lease& lease, int64_t next_position);  // what no later query can see
  void trim_back(Lease& lease, int64_t tokens);          // what rejected drafts had reserved
  // [0, computed) of `tokens` is written by retired steps: whole pages become shareable. `may_swap`:
  // no step in flight names this lease, so an equal page of somebody else's may take the place of its own.
  void commit(Lease& lease, std::span<const int32_t> tokens, int64_t computed, bool may_swap);
  // Commit, keep the last part of a page too, and give everything back.
  void finish(Lease lease, std::span<const int32_t> tokens, int64_t computed);
  void release(Lease& lease);

  // Moves a sequence to the second tier and back; without room for it, nothing is moved.
  bool can_move_out(const Lease& lease) const;
  HostLease move_out(const Lease& lease, int64_t tokens);
  bool move_in(HostLease& from, Lease& to, const std::string& key, int32_t tenant, bool urgent);

  // Everything listed since the last call belongs to the plan `step`.
  void begin_step(uint64_t step) { step_ = step; }
  void take_orders(std::vector<PageCopy>& copies, std::vector<PageMove>& moves);
  void abandon_orders();  // nobody is left who wants them, and no plan is in flight
  size_t orders() const { return copies_.size() + moves_.size(); }
  size_t moves() const { return moves_.size(); }
  void retire_step(uint64_t step);
  void flush();  // forget every prefix that nobody holds

  int64_t idle_pages(int32_t tenant) const;
  const PrefixTree& tree() const { return tree_; }
  // Every reference is a lease's, a deferred release's or the tree's.
  void check_integrity(std::span<const Lease* const> leases, std::span<const HostLease* const> host_leases) const;

 private:
  friend class HostLease;
  struct Candidate {  // for eviction; a stale one is skipped
    uint64_t key = 0;
    NodeId node = kNoNode;
    uint32_t generation = 0;
    uint64_t last_use = 0;
    bool operator<(const Candidate& o) const {
      return key != o.key ? key > o.key : node > o.node;
    }  // heap: least first
  };
  using Heap = std::vector<Candidate>;
  struct Tenant {
    std::array<int64_t, kMaxGroups> idle{};
    std::array<Heap, kMaxGroups> heap;
  };
  struct Deferred {
    uint64_t step = 0;
    int32_t page = 0, group = 0;  // group -1: of the second tier
  };

  Tenant& tenant(int32_t id);
  int64_t floor_pages(int group) const;
  bool window_group(int g) const { return options_.groups[g].window > 0; }
  bool holds(const Lease& l, int g, int64_t k) const { return k >= l.first_held_[g] || k < sink_pages(g); }
  // The first of `tokens` that the query after them, or the one at this position, sees beside sinks.
  int64_t hidden_before(int g, int64_t position) const {
    const GroupShape& s = options_.groups[g];
    return s.window > 0 ? std::max<int64_t>(0, position - (s.window - s.sinks)) : 0;
  }
  bool recurrent() const { return options_.states > 0; }
  void share_state(const Lease& lease, Lease& with);
  int32_t take_state();
  void drop_state(NodeId node);
  void ref(int g, int32_t page);
  void unref(int g, int32_t page);
  int32_t take(int g, int32_t tenant, bool urgent);
  bool evict_one(int g, int32_t tenant, bool urgent);
  bool evict_from(int g, Tenant& t, bool may_move);
  bool evict_below_held(int g, int32_t tenant, bool may_others);
  const Candidate* top(int g, Tenant& t);
  bool valid(int g, const Candidate& c) const;
  void offer(int g, NodeId node);
  void drop_page(int g, NodeId node);
  bool demote(NodeId node);
  bool in_host(const Candidate& c) const;
  void tidy_host_heap();
  int32_t take_host();
  void drop_host(NodeId node);
  void attach(int g, NodeId node, int32_t page);
  void pin(Lease& lease, NodeId node);
  // The parts of acquire(). Pages of the second tier come in until there is no room, where the hit ends: false.
  void hold_found(Lease& lease, const Match& m);
  bool move_found_in(Lease& lease, const Match& m);
  void copy_partial(Lease& lease, const Match& m, bool room);
  void announce(CacheEvent::Kind kind, NodeId node);
  void enforce_share(int g, int32_t tenant);
  bool readable_from_host(const PrefixNode& n) const { return n.host >= 0 && n.host_ready <= retired_; }

  KvSpaceOptions options_;
  std::vector<PagePool> pools_;
  PagePool host_, states_;
  PrefixTree tree_;
  std::vector<std::vector<NodeId>> node_of_;  // by group and page
  std::vector<NodeId> node_of_host_, node_of_state_;
  std::vector<uint64_t> state_use_;  // when each kept state was last of use
  std::vector<Tenant> tenants_;
  Heap host_heap_;
  std::vector<PageCopy> copies_;
  std::vector<PageMove> moves_;
  std::deque<Deferred> deferred_;
  uint64_t step_ = 0, retired_ = 0, tick_ = 0, versions_ = 0;
};

}  // namespace kvasir::kvcache
