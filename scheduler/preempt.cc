// Pages for those that run; and when there are none, who gives up theirs, and where these go.
#include <algorithm>

#include "core/check.h"
#include "scheduler/plan_maker.h"

namespace kvasir::scheduler {

bool Scheduler::PlanMaker::secure(Sequence* s, int64_t tokens) {
  while (s->running()) {
    kvcache::Lease& lease = *s->lease();
    if (make_writable(s, false) && kv.grow(lease, tokens)) {
      s->claimed = state.passes;
      return true;
    }
    if (state.leaving > 0) return false;  // pages are on their way back
    if (Sequence* victim = victim_for(s)) {
      preempt(victim);
      continue;
    }
    // Before nothing runs at all, other tenants' idle prefixes give way.
    if (making.named.empty() && make_writable(s, true) && kv.grow(lease, tokens, true)) return true;
    // Those before it run and will give way; meanwhile its pages may be what they need.
    if (running.front() != s && !std::holds_alternative<Prefilling>(s->state)) preempt(s);
    return false;
  }
  return false;
}

// Beams go together or not at all: found out once a pass, for all of them.
bool Scheduler::PlanMaker::secure_beams(RequestState& r) {
  if (r.beams_pass == state.passes) return r.beams_go;
  r.beams_pass = state.passes;
  const auto is_waiting = [](const Sequence* s) { return s->waits(); };
  if (std::any_of(r.sequences.begin(), r.sequences.end(), is_waiting)) {  // half a search only holds pages
    for (Sequence* s : r.sequences)
      if (s->running()) preempt_one(s);
    return r.beams_go = false;
  }
  r.beams_go = r.alive <= budget && std::all_of(r.sequences.begin(), r.sequences.end(), [](const Sequence* s) {
                 return s->over() || (std::holds_alternative<Decoding>(s->state) && s->in_flight == 0 && s->mask_ready);
               });
  for (Sequence* s : r.sequences)
    if (r.beams_go && !s->over()) r.beams_go = secure(s, s->planned + 1);
  return r.beams_go;
}

bool Scheduler::PlanMaker::make_writable(Sequence* s, bool urgent) {
  const size_t orders = kv.orders();
  const bool done = kv.make_writable(*s->lease(), s->planned, urgent);
  if (kv.orders() != orders) s->ordered = state.passes;
  return done;
}

// The last of those after `s` that this plan does not name; a paused one wherever it stands.
Sequence* Scheduler::PlanMaker::victim_for(const Sequence* s) const {
  const Sequence* paused = nullptr;
  for (size_t i = running.size(); i-- > 0;) {
    Sequence* v = running[i];
    if (v == s || !v->running() || v->last_step == state.step || v->claimed == state.passes ||
        (v->request == s->request && v->request->beam))
      continue;
    if (before(s, v)) return v;
    if (state.paused_requests == 0) return nullptr;
    if (v->request->paused) {
      paused = v;
      break;
    }
  }
  return const_cast<Sequence*>(paused);
}

void Scheduler::PlanMaker::preempt(Sequence* s) {
  if (!s->request->beam) return preempt_one(s);
  for (Sequence* b : s->request->sequences)
    if (b->running()) preempt_one(b);
}

void Scheduler::PlanMaker::preempt_one(Sequence* s) {
  kvcache::Lease lease = std::move(*s->lease());
  kvcache::HostLease host;
  if (s->ordered == state.passes) {  // this plan copies into its pages: they are not free before it has run
    making.named.push_back({s, s->planned, 0, false, false});
    ++s->in_flight;
    s->last_step = state.step;
  } else if (s->last_step !=
                 state.step &&  // a beam this plan names, whose others give way: moves come before its writes
             !s->verifying &&
             !(s->request->needs_mask && s->awaiting > 0) && cheaper_to_move(*s, lease)) {
    host = kv.move_out(lease, s->planned);
  }
  s->preempted = state.passes;
  moved = true;
  state.lose_pages(s, std::move(lease), std::move(host));
}

// `lease` was its own; `host`: where the pages go, if they are not to be computed again.
void Scheduler::State::lose_pages(Sequence* s, kvcache::Lease lease, kvcache::HostLease host) {
  policy->stopped(*s);
  ++stats.preemptions;
  event(Notice::Kind::preempted, *s);
  const bool move = !host.pages().empty();
  if (move) {
    ++stats.swaps;
  } else {
    stats.recomputed_tokens += s->computed;
  }
  if (s->in_flight == 0) {
    kv.finish(std::move(lease), s->tokens, s->computed);
    lease = kvcache::Lease();
    if (!move) s->planned = s->computed = 0;
  } else {
    ++leaving;
  }
  if (move) {
    s->state = Swapped{std::move(host), std::move(lease)};
  } else {
    s->state = Waiting{std::move(lease)};
  }
  dirty = true;
  enqueue(s);
}

bool Scheduler::PlanMaker::cheaper_to_move(const Sequence& s, const kvcache::Lease& lease) const {
  if (options.host_pages == 0 || s.planned == 0 || !kv.can_move_out(lease)) return false;
  const StepCost& cost = state.planning_cost();
  const double tokens = static_cast<double>(s.planned);
  const double again = tokens * cost.token_us + 0.5 * tokens * tokens * cost.context_us;
  return 2.0 * static_cast<double>(kv.pages_for(s.planned)) * cost.page_move_us < again;
}

}  // namespace kvasir::scheduler
