#include <map>

#include "core/check.h"
#include "scheduler/state.h"

namespace kvasir::scheduler {

void Scheduler::check_integrity() const {
  const State& st = *state_;
  std::vector<const kvcache::Lease*> leases;
  std::vector<const kvcache::HostLease*> host_leases;
  std::map<const Sequence*, int32_t> named;
  for (const State::Flight& f : st.flights)
    for (const State::Named& n : f.named) ++named[n.seq];
  size_t queued = 0, running = 0;
  Queued in_queue;
  int64_t waiting = 0, waiting_tokens = 0, leaving = 0, paused = 0, in_requests = 0;
  for (const auto& [id, s] : st.sequences) {
    KVASIR_CHECK(s->id == id && s->request != nullptr && st.requests.contains(s->request->id), "sequence ", id,
                 " has no request");
    KVASIR_CHECK(s->in_flight == (named.contains(s.get()) ? named[s.get()] : 0), "sequence ", id, " is in ",
                 s->in_flight, " plans, or is not");
    KVASIR_CHECK(s->over() ? s->in_flight > 0 : true, "sequence ", id, " is over and still there");
    KVASIR_CHECK(s->queued == (s->waits() && !s->request->paused), "sequence ", id, " waits and is not queued");
    KVASIR_CHECK(s->computed <= s->planned || s->verifying || s->waits() || s->over(), "sequence ", id, " computed ",
                 s->computed, " of ", s->planned);
    queued += s->queued;
    if (s->queued) in_queue.slots += s->queued_slots, in_queue.tokens += s->queued_tokens;
    running += s->running();
    KVASIR_CHECK((s->queued_tokens > 0) == s->waits(), "sequence ", id, " waits and is not counted, or the reverse");
    waiting_tokens += s->queued_tokens;
    waiting += s->waits();
    if (const kvcache::Lease* l = s->lease()) leases.push_back(l);
    const kvcache::Lease* left = nullptr;
    if (auto* w = std::get_if<Waiting>(&s->state)) left = &w->leaving;
    if (auto* x = std::get_if<Swapped>(&s->state)) {
      left = &x->leaving;
      host_leases.push_back(&x->kv);
    }
    if (auto* e = std::get_if<Ended>(&s->state)) {
      leases.push_back(&e->kv);
      ++leaving;
    }
    if (left != nullptr && !left->empty()) {
      leases.push_back(left);
      ++leaving;
    }
  }
  for (const auto& [id, r] : st.requests) {
    KVASIR_CHECK(!r->sequences.empty(), "request ", id, " has nothing left and is still there");
    in_requests += static_cast<int64_t>(r->sequences.size());
    paused += r->paused;
    int32_t alive = 0;
    for (const Sequence* s : r->sequences) alive += !s->over();
    KVASIR_CHECK(alive == r->alive, "request ", id, " has ", alive, " choices alive, counted ", r->alive);
  }
  KVASIR_CHECK(static_cast<int64_t>(running) <= st.options.max_running, running, " sequences run, at most ",
               st.options.max_running, " may");
  KVASIR_CHECK(in_requests == static_cast<int64_t>(st.sequences.size()), "sequences without a request");
  KVASIR_CHECK(queued == st.policy->size(), "queued ", queued, ", the policy has ", st.policy->size());
  KVASIR_CHECK(waiting == st.waiting && waiting_tokens == st.stats.waiting_tokens, "waiting ", waiting, " with ",
               waiting_tokens, " tokens, counted ", st.waiting, " with ", st.stats.waiting_tokens);
  KVASIR_CHECK(in_queue.slots == st.queued.slots && in_queue.tokens == st.queued.tokens, "queued for ", in_queue.slots,
               " slots with ", in_queue.tokens, " tokens, counted ", st.queued.slots, " with ", st.queued.tokens);
  KVASIR_CHECK(leaving == st.leaving, "leaving ", leaving, ", counted ", st.leaving);
  KVASIR_CHECK(paused == st.paused_requests, "paused ", paused, ", counted ", st.paused_requests);
  size_t listed = 0;
  for (const Sequence* s : st.running) listed += s->running();
  KVASIR_CHECK(listed == running, "running ", running, ", listed ", listed);
  st.kv.check_integrity(leases, host_leases);
}

}  // namespace kvasir::scheduler
