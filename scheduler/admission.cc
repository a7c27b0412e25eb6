// Who comes in: by the policy's order, when there are pages for it and for what those running will grow.
#include <algorithm>

#include "core/check.h"
#include "scheduler/plan_maker.h"

namespace kvasir::scheduler {
namespace {

// A request gives way to a policy's favourites so often, then it is left to run: work done twice must end.
constexpr int32_t kMostDisplaced = 2;

}  // namespace

// Slots that those who run will take when their prompts are in and their choices part.
int64_t Scheduler::PlanMaker::forks_to_come() const {
  int64_t forks = 0;
  for (const Sequence* s : running)
    if (!s->request->forked) forks += s->request->n - 1;
  return forks;
}

void Scheduler::PlanMaker::make_room() {
  for (int tries = 0; tries < 4; ++tries) {
    Sequence* cand = policy->best(now);
    if (cand == nullptr || cand->in_flight > 0 || state.leaving > 0 || running.empty()) return;
    const int64_t slots = options.max_running - static_cast<int64_t>(running.size()) - forks_to_come();
    const int64_t need = kv.pages_for(static_cast<int64_t>(cand->tokens.size()) + 1);
    if (slots >= (cand->request->forked ? 1 : cand->request->n) &&
        kv.available(0, cand->request->tenant) >= need + state.growth_pages)
      return;
    Sequence* victim = nullptr;
    for (size_t i = running.size(); i-- > 0 && victim == nullptr;) {
      Sequence* v = running[i];
      if (v->running() &&
          (v->request->paused || (v->request->displaced < kMostDisplaced && policy->displaces(*cand, *v))))
        victim = v;
      if (i + 64 < running.size()) break;  // a bounded look
    }
    if (victim == nullptr) return;
    if (!victim->request->paused) ++victim->request->displaced;
    preempt(victim);
    state.compact();
  }
}

bool Scheduler::PlanMaker::admit(Sequence* s, bool urgent) {
  state.compact();  // it may have been preempted in this very plan
  RequestState& r = *s->request;
  const int32_t sequences_wanted = r.forked ? 1 : r.n;
  const int64_t states_leaving = options.recurrent ? state.leaving : 0;  // their slots come back with their pages
  const int64_t left = options.max_running - states_leaving - static_cast<int64_t>(running.size()) - sequences_wanted;
  if (left < 0 || left < forks_to_come()) return false;
  if (!(std::holds_alternative<Swapped>(s->state) ? admit_swapped(s, urgent) : admit_waiting(s, urgent))) return false;
  state.growth_pages += kv.pages_missing(*s->lease(), std::ssize(s->tokens) + options.lookahead_tokens);
  if (!r.announced) {
    r.announced = true;
    state.event(Notice::Kind::admitted, *s);
  } else {
    state.event(Notice::Kind::resumed, *s);
  }
  moved = true;
  start_running(s);
  return true;
}

bool Scheduler::PlanMaker::admit_swapped(Sequence* s, bool urgent) {
  const RequestState& r = *s->request;
  const int64_t size = std::ssize(s->tokens);
  const int64_t need = urgent ? kv.pages_for(s->planned) : kv.pages_for(size + 1) + state.growth_pages;
  if (kv.available(0, r.tenant, urgent) < need) {
    load.slots = static_cast<int64_t>(running.size());
    return false;
  }
  state.dequeue(s);
  kvcache::Lease lease;
  bool in = kv.move_in(std::get<Swapped>(s->state).kv, lease, r.cache_key, r.tenant, urgent);
  KVASIR_CHECK(in, "pages were available and did not come");
  if (s->planned + 1 < size || s->outputs() == 0) {
    s->state = Prefilling{std::move(lease)};
  } else {
    s->state = Decoding{std::move(lease), {}};
  }
  return true;
}

bool Scheduler::PlanMaker::admit_waiting(Sequence* s, bool urgent) {
  RequestState& r = *s->request;
  const bool offset = options.index_mode == kvcache::IndexMode::offset;
  kvcache::Match m;
  if (!r.no_prefix_read || s->outputs() > 0) m = kv.match(r.cache_key, s->tokens, std::ssize(s->tokens) - 1);
  if (!has_room(*s, urgent, m)) {
    load.slots = static_cast<int64_t>(running.size());
    return false;
  }
  kvcache::Lease lease = kv.acquire(r.cache_key, r.tenant, m);
  if (offset && !kv.grow(lease, r.prompt_tokens + r.max_new)) return false;
  state.dequeue(s);
  s->computed = s->planned = kv.lease_tokens(lease, m);
  s->met = int64_t(m.met_pages) * options.page_size;
  if (!r.announced) {
    r.cached_tokens = s->planned;
    state.stats.cached_tokens += s->planned;
    state.stats.prompt_tokens += r.prompt_tokens;
  }
  s->state = Prefilling{std::move(lease)};
  return true;
}

bool Scheduler::PlanMaker::has_room(const Sequence& s, bool urgent, kvcache::Match& m) const {
  const RequestState& r = *s.request;
  const int64_t size = std::ssize(s.tokens);
  const bool offset = options.index_mode == kvcache::IndexMode::offset;
  for (int g = 0; g < kv.groups(); ++g) {
    // When nothing runs, what it needs to start is enough: it will have all there is.
    int64_t want = urgent ? kv.pages_for(size) : kv.pages_for(size + 1) + (r.forked ? 1 : r.n) - 1;
    if (offset) want = kv.pages_for(r.prompt_tokens + r.max_new);
    int64_t growth = urgent || offset ? 0 : state.growth_pages;
    if (options.groups[g].window > 0 && !offset) {
      // When nothing else runs, a chunk of one page will do (plan_chunk).
      const int64_t window = options.groups[g].window;
      want = std::min(want,
                      urgent ? pages_in_window(window)
                             : kv.pages_for(window + options.max_tokens_per_step) + 1 + (options.groups[g].sinks > 0));
    } else {
      want += m.idle_pages - (m.pages - m.host_pages);
    }
    const int64_t available = kv.available(g, r.tenant, urgent);
    if (available < want + growth) return false;
    if (available == want + growth) kvcache::drop_partial(m);  // its source would have to stay, too
  }
  return true;
}

// `before`: only those that go before this prefill.
void Scheduler::PlanMaker::plan_admissions(const Sequence* before) {
  while (budget > 0 && !waits_whole) {
    state.compact();
    Sequence* s = policy->best(now);
    if (s == nullptr || s->in_flight > 0 || s->preempted == state.passes) return;
    if (before != nullptr && !policy->goes_first(*s, *before)) return;
    if (lead != nullptr && !policy->may_join(*lead, *s)) return;
    if (state.hopeless(*s, now)) {
      state.end_request(s->request, Notice::Kind::expired);
      continue;
    }
    const int64_t room = prompt_room(0), size = static_cast<int64_t>(s->tokens.size());
    if (room < options.page_size && size > room) {
      cut |= room < std::min(budget, size);
      return;
    }
    if (s->request->beam && s->request->forked) {  // all of them or none: half a search only holds pages
      if (!admit_beams(*s->request)) return;
    } else if (!admit_and_start(s, running.empty())) {
      return;
    }
  }
}

bool Scheduler::PlanMaker::admit_beams(RequestState& r) {
  std::vector<Sequence*> beams;
  int64_t pages = 0;
  for (Sequence* s : r.sequences) {
    if (!s->waits()) continue;
    if (s->in_flight > 0) return false;
    beams.push_back(s);
    const int64_t all = kv.pages_for(static_cast<int64_t>(s->tokens.size())), window = options.groups[0].window;
    pages += window > 0 ? std::min(all, pages_in_window(window)) : all;
  }
  state.compact();
  const int64_t others = static_cast<int64_t>(running.size());
  if (others + static_cast<int64_t>(beams.size()) > options.max_running) return false;
  const bool alone = others + static_cast<int64_t>(beams.size()) == r.alive;
  if (kv.available(0, r.tenant, alone) < pages + (alone ? 0 : state.growth_pages)) return false;
  // All of them first: a chunk of one could take the pages that another is let in for.
  std::vector<bool> ordered;
  for (Sequence* s : beams) {
    const size_t orders = kv.orders();
    const bool in = admit(s, alone);
    ordered.push_back(in && kv.orders() != orders);
    if (!in) break;
  }
  for (size_t i = 0; i < ordered.size(); ++i)
    if (beams[i]->running()) start_chunk(beams[i], ordered[i]);
  return ordered.size() == beams.size() && beams.back()->running();
}

// Admits, and gives its first chunk a place while there is budget.
bool Scheduler::PlanMaker::admit_and_start(Sequence* s, bool urgent) {
  const size_t orders = kv.orders();
  if (!admit(s, urgent)) return false;
  start_chunk(s, kv.orders() != orders);
  return true;
}

// `ordered`: this plan already fills pages of its.
void Scheduler::PlanMaker::start_chunk(Sequence* s, bool ordered) {
  const size_t orders = kv.orders();
  if (budget > 0 && std::holds_alternative<Prefilling>(s->state) && plan_chunk(s)) return;
  if (!ordered && kv.orders() == orders) return;
  making.named.push_back({s, s->planned, 0, false, false});
  ++s->in_flight;
  s->last_step = state.step;
}

// The pages that hold a window wherever it begins, and one to go on.
int64_t Scheduler::PlanMaker::pages_in_window(int64_t window) const {
  return kv.pages_for(window) + 2 + (options.groups[0].sinks > 0);
}

void Scheduler::PlanMaker::start_running(Sequence* s) {
  s->rank = policy->rank(*s);
  s->admitted = state.clock;
  policy->started(*s);
  running.insert(std::upper_bound(running.begin(), running.end(), s, before), s);
}

}  // namespace kvasir::scheduler
