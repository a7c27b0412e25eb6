// One plan: decodes first, then verifications, then prefill chunks, within the token budget.
#include <algorithm>

#include "core/check.h"
#include "scheduler/state.h"

namespace kvasir::scheduler {
namespace {

// A request gives way to a policy's favourites so often, then it is left to run: work done twice must end.
constexpr int32_t kMostDisplaced = 2;

bool before(const Sequence* a, const Sequence* b) {
  if (a->rank != b->rank) return a->rank < b->rank;
  if (a->request->ordinal != b->request->ordinal) return a->request->ordinal < b->request->ordinal;
  return a->choice < b->choice;
}

}  // namespace

void Scheduler::next_step(Time now, StepPlan& plan) {
  State& st = *state_;
  st.clock = std::max(st.clock, now);
  plan.step = 0;
  plan.items.clear();
  plan.copies.clear();
  plan.moves.clear();
  plan.decoding_batches = plan.tokens = 0;
  st.expire(now);
  st.compact();
  st.forgotten.clear();
  if (static_cast<int>(st.flights.size()) >= st.options.depth) return;
  ++st.step;
  if (!st.spare_flights.empty()) {
    st.making = std::move(st.spare_flights.back());
    st.spare_flights.pop_back();
  }
  st.making.named.clear();
  st.policy->refresh(st.kv);
  // An empty plan is to mean that there is nothing to do: if this look moved somebody, look again.
  int looks = 0;
  do {
    st.look(now, plan);
  } while (plan.empty() && st.moved && ++looks < 8);
  if (plan.empty()) {  // nothing was given a place in it
    --st.step;
    st.spare_flights.push_back(std::move(st.making));
    return;
  }
  st.kv.begin_step(st.step + 1);
  for (Sequence* s : st.to_fork) st.fork_choices(s);  // what they copy is there once this plan has run
  st.to_fork.clear();
  plan.step = st.step;
  plan.tokens = st.options.max_tokens_per_step - st.budget;
  st.making.step = st.step;
  st.making.planned = now;
  st.making.tokens = plan.tokens;
  st.flights.push_back(std::move(st.making));
  ++st.stats.steps;
}

void Scheduler::State::look(Time now, StepPlan& plan) {
  ++asked;
  moved = false;
  budget = options.max_tokens_per_step;
  make_room(now);
  plan_decodes(plan);
  plan_verifications(plan);
  plan_prefills(now, plan);
  plan_admissions(now, plan, nullptr);
  kv.take_orders(plan.copies, plan.moves);
}

void Scheduler::State::expire(Time now) {
  for (; !expiries.empty() && expiries.top().deadline <= now; expiries.pop()) {
    Request* r = find_request(expiries.top().request);
    if (r == nullptr || r->ordinal != expiries.top().ordinal || r->alive == 0) continue;
    end_request(r, Event::Kind::expired);
  }
}

void Scheduler::State::compact() {
  if (!dirty) return;
  std::erase_if(running, [](const Sequence* s) { return !s->running(); });
  dirty = false;
}

void Scheduler::State::put(Sequence* s, Phase phase, int64_t count, bool samples, StepPlan& plan) {
  PlanItem& item = plan.items.emplace_back();
  const kvcache::Lease& lease = *s->lease();
  const int64_t known = static_cast<int64_t>(s->tokens.size()) - s->planned;
  item.seq = s->id;
  item.request = s->request->id;
  item.choice = s->choice;
  item.phase = phase;
  item.samples = samples;
  item.awaits_token = known < 1;
  item.draws = phase == Phase::prefill && samples && !s->request->forked ? s->request->n : 1;
  item.begin = s->planned;
  item.count = static_cast<int32_t>(count);
  if (phase == Phase::verify) {
    item.tokens = std::get<Decoding>(s->state).draft;  // with the known token before it
  } else {
    item.tokens = std::span(s->tokens).subspan(s->planned, std::min(known, count));
  }
  item.pages = lease.pages();
  if (kv.groups() > 1) item.more_pages = lease.more_pages(kv.groups());
  making.named.push_back({s, s->planned, item.count, samples, phase == Phase::verify});
  plan.decoding_batches += phase == Phase::decode;
  budget -= count;
  ++s->in_flight;
  s->last_step = step;
  s->planned += count;
  policy->served(*s, count);
}

// Beams go together or not at all; asked for each of them, found out once a plan.
bool Scheduler::State::secure_beams(Request& r) {
  if (r.beams_asked == asked) return r.beams_go;
  r.beams_asked = asked;
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

void Scheduler::State::plan_decodes(StepPlan& plan) {
  growth_pages = 0;
  verifications.clear();
  prefills.clear();
  // Drafts may have what plain decodes and a page of prefill leave.
  int64_t spare = options.max_tokens_per_step - static_cast<int64_t>(running.size()) - options.page_size;
  for (size_t i = 0; i < running.size(); ++i) {
    if (i + 4 < running.size()) __builtin_prefetch(running[i + 4]);
    Sequence* s = running[i];
    auto* d = std::get_if<Decoding>(&s->state);
    const Request& r = *s->request;
    if (d == nullptr) {
      if (s->running() && !r.paused) prefills.push_back(s);
      continue;
    }
    const int64_t wanted = limit_of(*s) - s->outputs() - s->awaiting;
    if (wanted <= 0) continue;
    growth_pages += kv.pages_missing(d->kv, s->planned + std::min<int64_t>(wanted, options.lookahead_tokens));
    if (r.paused || s->verifying || (r.needs_mask && (!s->mask_ready || s->awaiting > 0))) continue;
    if (r.beam && !secure_beams(*s->request)) continue;
    if (!s->running()) continue;
    if (s->awaiting > 0 && s->last_step + 1 != step) continue;  // its token is not in the plan before this one
    if (budget < 1) continue;
    if (!d->draft.empty()) {
      int64_t n = std::min<int64_t>({static_cast<int64_t>(d->draft.size()), spare, wanted - 1});
      if (n > 0 && s->awaiting == 0 && make_writable(s, false) && kv.grow(d->kv, s->planned + 1 + n)) {
        d->draft.resize(n);
        s->claimed = asked;
        spare -= n;
        verifications.push_back(s);
        continue;
      }
      d->draft.clear();
    }
    if (!secure(s, s->planned + 1)) continue;
    if (r.needs_mask) s->mask_ready = false;
    put(s, Phase::decode, 1, true, plan);
    ++s->awaiting;
  }
}

void Scheduler::State::plan_verifications(StepPlan& plan) {
  for (Sequence* s : verifications) {
    auto* d = std::get_if<Decoding>(&s->state);
    if (d == nullptr) continue;  // preempted since
    d->draft.insert(d->draft.begin(), s->tokens.back());
    if (s->request->needs_mask) s->mask_ready = false;
    put(s, Phase::verify, static_cast<int64_t>(d->draft.size()), true, plan);
    s->verifying = true;
    ++s->awaiting;
  }
}

void Scheduler::State::plan_prefills(Time now, StepPlan& plan) {
  policy->order_prefills(prefills);
  lead = nullptr;
  for (Sequence* s : prefills) {
    if (!s->running()) continue;
    if (const Sequence* w = policy->best(now); w != nullptr && w->in_flight == 0 && policy->goes_first(*w, *s))
      plan_admissions(now, plan, s);
    if (!s->running()) continue;
    growth_pages += kv.pages_missing(*s->lease(), static_cast<int64_t>(s->tokens.size()) + options.lookahead_tokens);
    if (budget > 0 && (lead == nullptr || policy->may_join(*lead, *s))) plan_chunk(s, plan);
  }
}

// Beams that lost their pages take up their next token together, as a decode; others at their prefill's end.
int64_t Scheduler::State::prefill_target(const Sequence& s) const {
  const bool later = s.request->beam && s.outputs() > 0;
  return static_cast<int64_t>(s.tokens.size()) - (later ? 1 : 0);
}

void Scheduler::State::become_decoding(Sequence* s) {
  kvcache::Lease lease = std::move(*s->lease());
  s->state = Decoding{std::move(lease), {}};
}

// Whole pages, except the last chunk. False when the budget or the pages have room for none.
bool Scheduler::State::plan_chunk(Sequence* s, StepPlan& plan) {
  Request& r = *s->request;
  const int64_t size = options.page_size;
  const int64_t target = prefill_target(*s);
  if (s->planned >= target) {  // a beam whose prefix was there
    become_decoding(s);
    return false;
  }
  int64_t end = std::min(target, s->planned + budget);
  const bool samples_at_end = limit_of(*s) > s->outputs() && target == static_cast<int64_t>(s->tokens.size());
  if (end == target && samples_at_end && r.needs_mask && !s->mask_ready) end = target - 1;
  if (end < target) end = end / size * size;
  if (end <= s->planned || !secure(s, end)) return false;
  const bool last = end == target, samples = last && samples_at_end;
  put(s, Phase::prefill, end - s->planned, samples, plan);
  if (lead == nullptr) lead = s;
  if (!last) return true;
  s->awaiting += samples;
  if (samples && r.needs_mask) s->mask_ready = false;
  become_decoding(s);
  if (!r.forked && samples) to_fork.push_back(s);
  return true;
}

// The prompt is in (once this plan has run): each further choice starts from the same pages.
void Scheduler::State::fork_choices(Sequence* s) {
  Request& r = *s->request;
  r.forked = true;
  for (int32_t c = 1; c < r.n; ++c) {
    Sequence* f = make_sequence(&r, c);
    f->tokens = s->tokens;
    f->computed = s->computed;
    f->planned = s->planned;
    f->last_step = step;
    f->in_flight = 1;
    f->awaiting = 1;
    f->mask_ready = !r.needs_mask;
    making.named.push_back({f, f->planned, 0, true, false});
    kvcache::Lease lease = kv.fork(*s->lease(), s->planned, r.prompt_tokens + r.max_new);
    if (lease.empty()) {  // offset mode had no run: it computes the prompt itself, later
      f->state = Waiting{};
      enqueue(f);
      continue;
    }
    f->state = Decoding{std::move(lease), {}};
    start_running(f);
  }
}

void Scheduler::State::start_running(Sequence* s) {
  s->rank = policy->rank(*s);
  s->admitted = clock;
  policy->started(*s);
  running.insert(std::upper_bound(running.begin(), running.end(), s, before), s);
}

bool Scheduler::State::make_writable(Sequence* s, bool urgent) {
  const size_t orders = kv.orders();
  const bool done = kv.make_writable(*s->lease(), s->planned, urgent);
  if (kv.orders() != orders) s->ordered = asked;
  return done;
}

bool Scheduler::State::secure(Sequence* s, int64_t tokens) {
  while (s->running()) {
    kvcache::Lease& lease = *s->lease();
    if (make_writable(s, false) && kv.grow(lease, tokens)) {
      s->claimed = asked;
      return true;
    }
    if (leaving > 0) return false;  // pages are on their way back
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

// The last of those after `s` that this plan does not name; a paused one wherever it stands.
Sequence* Scheduler::State::victim_for(const Sequence* s) const {
  const Sequence* paused = nullptr;
  for (size_t i = running.size(); i-- > 0;) {
    Sequence* v = running[i];
    if (v == s || !v->running() || v->last_step == step || v->claimed == asked ||
        (v->request == s->request && v->request->beam))
      continue;
    if (before(s, v)) return v;
    if (paused_requests == 0) return nullptr;
    if (v->request->paused) {
      paused = v;
      break;
    }
  }
  return const_cast<Sequence*>(paused);
}

void Scheduler::State::preempt(Sequence* s) {
  if (!s->request->beam) return preempt_one(s);
  for (Sequence* b : s->request->sequences)
    if (b->running()) preempt_one(b);
}

void Scheduler::State::preempt_one(Sequence* s) {
  kvcache::Lease lease = std::move(*s->lease());
  policy->stopped(*s);
  ++stats.preemptions;
  event(Event::Kind::preempted, *s);
  kvcache::HostLease host;
  if (s->ordered == asked) {  // this plan copies into its pages: they are not free before it has run
    making.named.push_back({s, s->planned, 0, false, false});
    ++s->in_flight;
    s->last_step = step;
  } else if (!s->verifying && cheaper_to_move(*s, lease))
    host = kv.move_out(lease, s->planned);
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
  dirty = moved = true;
  s->preempted = asked;
  enqueue(s);
}

bool Scheduler::State::cheaper_to_move(const Sequence& s, const kvcache::Lease& lease) const {
  if (options.host_pages == 0 || s.planned == 0 || !kv.can_move_out(lease)) return false;
  const double tokens = static_cast<double>(s.planned);
  const double again = tokens * options.cost.token_us + 0.5 * tokens * tokens * options.cost.context_us;
  return 2.0 * static_cast<double>(kv.pages_for(s.planned)) * options.cost.page_move_us < again;
}

void Scheduler::State::make_room(Time now) {
  for (int tries = 0; tries < 4; ++tries) {
    Sequence* cand = policy->best(now);
    if (cand == nullptr || cand->in_flight > 0 || leaving > 0 || running.empty()) return;
    const int64_t slots = options.max_running - static_cast<int64_t>(running.size());
    const int64_t need = kv.pages_for(static_cast<int64_t>(cand->tokens.size()) + 1);
    if (slots >= (cand->request->forked ? 1 : cand->request->n) &&
        kv.available(0, cand->request->tenant) >= need + growth_pages)
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
    compact();
  }
}

bool Scheduler::State::admit(Sequence* s, bool urgent) {
  compact();  // it may have been preempted in this very plan
  Request& r = *s->request;
  const int32_t sequences_wanted = r.forked ? 1 : r.n;
  if (static_cast<int64_t>(running.size()) + sequences_wanted > options.max_running) return false;
  const int64_t size = static_cast<int64_t>(s->tokens.size());
  if (auto* swapped = std::get_if<Swapped>(&s->state)) {
    const int64_t need = urgent ? kv.pages_for(s->planned) : kv.pages_for(size + 1) + growth_pages;
    if (kv.available(0, r.tenant, urgent) < need) return false;
    dequeue(s);
    kvcache::Lease lease;
    bool in = kv.move_in(swapped->kv, lease, r.cache_key, r.tenant, urgent);
    KVASIR_CHECK(in, "pages were available and did not come");
    if (s->planned + 1 < size || s->outputs() == 0) {
      s->state = Prefilling{std::move(lease)};
    } else {
      s->state = Decoding{std::move(lease), {}};
    }
  } else {
    const bool read = !(r.no_prefix_read && s->outputs() == 0);
    kvcache::Match m;
    const bool offset = options.index_mode == kvcache::IndexMode::offset;
    if (read) m = kv.match(r.cache_key, s->tokens, size - 1);
    for (int g = 0; g < kv.groups(); ++g) {
      // When nothing runs, what it needs to start is enough: it will have all there is.
      int64_t want = urgent ? kv.pages_for(size) : kv.pages_for(size + 1) + sequences_wanted - 1;
      if (offset) want = kv.pages_for(r.prompt_tokens + r.max_new);
      int64_t growth = urgent || offset ? 0 : growth_pages;
      if (options.groups[g].window > 0 && !offset) {
        want = std::min(want, kv.pages_for(options.groups[g].window + options.max_tokens_per_step) + 1);
      } else {
        want += m.idle_pages - (m.pages - m.host_pages);
      }
      const int64_t available = kv.available(g, r.tenant, urgent);
      if (available < want + growth) return false;
      if (available == want + growth) kvcache::drop_partial(m);  // its source would have to stay, too
    }
    kvcache::Lease lease = kv.acquire(r.cache_key, r.tenant, m);
    if (offset && !kv.grow(lease, r.prompt_tokens + r.max_new)) return false;
    dequeue(s);
    s->computed = s->planned = kv.lease_tokens(lease, m);
    if (!r.announced) {
      r.cached_tokens = s->planned;
      stats.cached_tokens += s->planned;
      stats.prompt_tokens += r.prompt_tokens;
    }
    s->state = Prefilling{std::move(lease)};
  }
  growth_pages += kv.pages_missing(*s->lease(), size + options.lookahead_tokens);
  if (!r.announced) {
    r.announced = true;
    event(Event::Kind::admitted, *s);
  } else {
    event(Event::Kind::resumed, *s);
  }
  moved = true;
  start_running(s);
  return true;
}

// `before`: only those that go before this prefill.
void Scheduler::State::plan_admissions(Time now, StepPlan& plan, const Sequence* before) {
  while (budget > 0) {
    compact();
    Sequence* s = policy->best(now);
    if (s == nullptr || s->in_flight > 0 || s->preempted == asked) return;
    if (before != nullptr && !policy->goes_first(*s, *before)) return;
    if (lead != nullptr && !policy->may_join(*lead, *s)) return;
    if (policy->hopeless(*s, now, load)) {
      end_request(s->request, Event::Kind::expired);
      continue;
    }
    if (budget<options.page_size&& static_cast<int64_t>(s->tokens.size())> budget) return;
    if (s->request->beam && s->request->forked) {  // all of them or none: half a search only holds pages
      if (!admit_beams(*s->request, plan)) return;
    } else if (!admit_and_start(s, running.empty(), plan)) {
      return;
    }
  }
}

bool Scheduler::State::admit_beams(Request& r, StepPlan& plan) {
  std::vector<Sequence*> beams;
  int64_t pages = 0;
  for (Sequence* s : r.sequences) {
    if (!s->waits()) continue;
    if (s->in_flight > 0) return false;
    beams.push_back(s);
    const int64_t all = kv.pages_for(static_cast<int64_t>(s->tokens.size())), window = options.groups[0].window;
    pages += window > 0 ? std::min(all, kv.pages_for(window) + 2) : all;
  }
  compact();
  const int64_t others = static_cast<int64_t>(running.size());
  if (others + static_cast<int64_t>(beams.size()) > options.max_running) return false;
  const bool alone = others + static_cast<int64_t>(beams.size()) == r.alive;
  if (kv.available(0, r.tenant, alone) < pages + (alone ? 0 : growth_pages)) return false;
  for (Sequence* s : beams)
    if (!admit_and_start(s, alone, plan)) return false;
  return true;
}

// Admits, and gives its first chunk a place while there is budget.
bool Scheduler::State::admit_and_start(Sequence* s, bool urgent, StepPlan& plan) {
  const size_t orders = kv.orders();
  if (!admit(s, urgent)) return false;
  if (budget > 0 && std::holds_alternative<Prefilling>(s->state) && plan_chunk(s, plan)) return true;
  if (kv.orders() == orders) return true;
  making.named.push_back({s, s->planned, 0, false, false});  // its pages are being filled by this plan
  ++s->in_flight;
  s->last_step = step;
  return true;
}

}  // namespace kvasir::scheduler
