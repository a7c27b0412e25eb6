// What a Scheduler is made of. Calls from outside are in scheduler.cc and submit.cc, retiring a plan in retire.cc;
// making one is an object of its own (plan_maker.h).
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvcache/kv_space.h"
#include "scheduler/learned_cost.h"
#include "scheduler/policy.h"
#include "scheduler/scheduler.h"
#include "scheduler/sequence.h"

namespace kvasir::scheduler {

struct Scheduler::State {
  State(const Settings& o, const kvcache::KvSpaceOptions& k, std::unique_ptr<Policy> p)
      : options(o), kv(k), policy(std::move(p)), learned(o.cost) {}

  struct Named {  // a sequence in a plan in flight
    Sequence* seq = nullptr;
    int64_t begin = 0;
    int32_t count = 0;
    bool samples = false, verify = false;
  };
  struct Flight {
    uint64_t step = 0;
    Time planned{};
    int64_t tokens = 0;
    StepTime work;
    std::vector<Named> named;
  };
  struct TenantLoad {
    std::string name;
    int64_t waiting = 0, waiting_tokens = 0;
    Queued queued;
  };
  // What has been measured so far.
  struct Load {
    double tokens_per_second = 0;  // computed, all sequences together; 0: nothing measured yet
    double outputs_per_second = 0;
    int64_t steps = 0;           // that were measured
    double step_seconds = 0;     // from one step's end to the next one's
    double decodes_seconds = 0;  // what the decodes of the last plan surely take of it; 0: there were none
    double slot_seconds = 0;     // that a sequence runs, from admission to its end
    double output_tokens = 64;   // of a request, on average
    int64_t slots = 0;           // that sequences may run in: fewer than max_running when the pages do not go round
  };

  // submit.cc
  int64_t most_tokens(int32_t beams = 1) const;
  Status check(const Submission& s) const;
  Status check_load(const Submission& s, int32_t tenant) const;
  Result<SeqId> submit(Submission submission, Time now);
  Sequence* make_sequence(RequestState* r, int32_t choice);

  // overload.cc
  bool knows() const;
  double answer_seconds(int64_t max_new) const;
  double prompt_seconds(int64_t tokens) const;
  double wait_behind(const Queued& ahead, int64_t slots, int64_t max_new) const;
  double expected_wait(const Sequence& s) const;
  double expected_work(const Sequence& s) const;
  double wait_bound(int64_t max_new) const;
  bool hopeless(const Sequence& s, Time now) const;
  Status check_wait(const Sequence& s, Time now) const;

  // scheduler.cc
  int32_t tenant_index(const std::string& name);
  RequestState* find_request(RequestId id);
  Sequence* find_sequence(SeqId id) const;
  void enqueue(Sequence* s);  // it waits from now on: in the policy's queue, unless its request is paused
  void dequeue(Sequence* s);  // and does no longer
  void leave_queue(Sequence* s);
  void count_waiting(const Sequence& s, int sign);
  void count_queued(const Sequence& s, int sign);
  void event(Notice::Kind kind, const Sequence& s, Notice::Reason reason = Notice::Reason::none);
  // The one exit. Its pages come back now, or when the last plan that names it retires.
  void end_sequence(Sequence* s, Notice::Reason reason);
  void end_request(RequestState* r, Notice::Kind why);
  void forget(Sequence* s);                   // nothing of it is left
  int64_t limit_of(const Sequence& s) const;  // output tokens it may have

  const StepCost& planning_cost() const { return options.max_step_ms > 0 ? learned.cost() : options.cost; }

  void expire(Time now);
  void compact();
  void lose_pages(Sequence* s, kvcache::Lease lease, kvcache::HostLease host);  // it waits from now on

  // retire.cc
  void take_tokens(Sequence* s, SeqResult& r, const Named& n);
  void settle(Sequence* s);
  bool keeps_state_at(const Sequence& s, int64_t position) const;
  void regroup_beams(RequestState* r, std::span<SeqResult> results);
  void retire(std::span<SeqResult> results, Time now);

  Settings options;
  kvcache::KvSpace kv;
  std::unique_ptr<Policy> policy;

  std::unordered_map<RequestId, std::unique_ptr<RequestState>> requests;
  std::unordered_map<SeqId, std::unique_ptr<Sequence>> sequences;
  std::unordered_map<std::string, int32_t> tenant_ids;
  std::vector<TenantLoad> tenants;
  std::vector<Sequence*> running;                    // in the policy's rank; ended and preempted ones until compact()
  std::vector<std::unique_ptr<Sequence>> forgotten;  // until compact(), because `running` may name them
  std::deque<Flight> flights;
  std::vector<Flight> spare_flights;
  std::map<std::pair<Time, uint64_t>, RequestId> expiries;  // by deadline and ordinal, of those that are not over
  std::vector<Notice> events;

  Time clock{};        // the latest time it was told
  bool dirty = false;  // `running` has entries that do not run
  uint64_t next_ordinal = 1;
  SeqId next_seq = 1;
  uint64_t step = 0;    // the last plan made
  uint64_t passes = 0;  // of all plans, over those who could run
  LearnedCost learned;  // from options.cost on: what plans go by with max_step_ms (planning_cost), waits always
  Time last_advance{};
  int64_t growth_pages = 0;  // what those running will want soon
  int64_t paused_requests = 0;
  int64_t waiting = 0;  // sequences, those of paused requests too
  Queued queued;        // in the policy's queue
  int64_t leaving = 0;  // sequences whose pages come back when a plan in flight retires
  Load load;
  Stats stats;
};

}  // namespace kvasir::scheduler
