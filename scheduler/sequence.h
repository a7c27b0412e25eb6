// A request and its sequences. A sequence is in exactly one state, and the state owns its pages: leaving
// it gives them on or gives them back.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "core/clock.h"
#include "kvcache/kv_space.h"
#include "scheduler/plan.h"

namespace kvasir::scheduler {

// Waits to be admitted. After a preemption `leaving` holds the pages that a plan in flight still names.
struct Waiting {
  kvcache::Lease leaving;
};
// Its tokens are being put into the cache, chunk by chunk.
struct Prefilling {
  kvcache::Lease kv;
};
// One token a step (or a verified draft).
struct Decoding {
  kvcache::Lease kv;
  std::vector<int32_t> draft;
};
// Waits with its K/V in the second tier; `leaving` as above.
struct Swapped {
  kvcache::HostLease kv;
  kvcache::Lease leaving;
};
// Over, but a plan in flight still names its pages, and one that is being made its draft.
struct Ended {
  kvcache::Lease kv;
  std::vector<int32_t> draft;
};
using SeqState = std::variant<Waiting, Prefilling, Decoding, Swapped, Ended>;

struct RequestState;

struct Sequence {
  SeqId id = 0;
  RequestState* request = nullptr;
  int32_t choice = 0;
  int32_t in_flight = 0;              // plans that name it and have not retired
  int32_t awaiting = 0;               // tokens sampled by plans in flight
  bool mask_ready = true;             // its grammar allows the next sampling step to be planned
  bool verifying = false;             // a draft is in flight
  bool queued = false;                // in the policy's queue: it waits, and its request is not paused
  int32_t slot = -1;                  // its place there
  int32_t matched = 0;                // lpm: tokens of its prompt that were cached when last looked
  Time admitted{};                    // the last time it was
  double key = 0;                     // the policy's order, least first
  double rank = 0;                    // its place among the running
  uint64_t last_step = 0;             // the last plan that names it
  uint64_t preempted = 0;             // the pass that last preempted it
  uint64_t claimed = 0, ordered = 0;  // the call of next_step that gave it pages, or listed a copy for it
  int64_t computed = 0;               // [0, computed) is written by retired plans
  int64_t planned = 0;                // [0, planned) is written once all plans in flight have retired
  int64_t met = 0;                    // its prefix that others had too, but no state at its end: one is kept there
  int64_t queued_tokens = 0;          // what it counts for while it waits; 0: it does not
  int32_t queued_slots = 0;           // the same in the policy's queue
  int64_t stop_limit = -1;            // output tokens, once a late stop is known
  std::vector<int32_t> tokens;        // prompt and known output
  SeqState state;

  kvcache::Lease* lease() {
    if (auto* d = std::get_if<Decoding>(&state)) return &d->kv;
    if (auto* p = std::get_if<Prefilling>(&state)) return &p->kv;
    return nullptr;
  }
  bool running() const { return std::holds_alternative<Prefilling>(state) || std::holds_alternative<Decoding>(state); }
  bool waits() const { return std::holds_alternative<Waiting>(state) || std::holds_alternative<Swapped>(state); }
  bool over() const { return std::holds_alternative<Ended>(state); }
  int64_t outputs() const;
};

struct RequestState {
  RequestId id = 0;
  int32_t tenant = 0;
  int32_t priority = 0;
  int32_t n = 1;
  int32_t displaced = 0;  // how often it had to make room
  bool beam = false, needs_mask = false, no_prefix_read = false, whole = false, paused = false;
  bool forked = false;     // its choices all exist
  bool announced = false;  // admitted was said
  int32_t alive = 0;       // sequences not over
  int64_t prompt_tokens = 0, max_new = 0, cached_tokens = 0;
  uint64_t ordinal = 0;     // of arrival
  uint64_t beams_pass = 0;  // the pass that found out whether all beams can go, and what it found
  bool beams_go = false;
  SeqId first = 0;
  Time arrival{};
  std::optional<Time> deadline;
  std::string cache_key;             // empty: outside the prefix cache
  std::vector<Sequence*> sequences;  // not yet forgotten ones, by choice
};

// The order of the running: the policy's rank, then arrival.
inline bool before(const Sequence* a, const Sequence* b) {
  if (a->rank != b->rank) return a->rank < b->rank;
  if (a->request->ordinal != b->request->ordinal) return a->request->ordinal < b->request->ordinal;
  return a->choice < b->choice;
}

inline int64_t Sequence::outputs() const { return static_cast<int64_t>(tokens.size()) - request->prompt_tokens; }

}  // namespace kvasir::scheduler
