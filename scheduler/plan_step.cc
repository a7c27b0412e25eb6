// One plan: decodes first, then verifications, then prefill chunks, within the token budget.
#include <algorithm>

#include "core/check.h"
#include "scheduler/plan_maker.h"

namespace kvasir::scheduler {

Scheduler::PlanMaker::PlanMaker(State& of, Time at, StepPlan& out)
    : state(of),
      options(of.options),
      kv(of.kv),
      policy(of.policy.get()),
      running(of.running),
      load(of.load),
      now(at),
      plan(out) {}

void Scheduler::PlanMaker::make() {
  state.clock = std::max(state.clock, now);
  plan.step = 0;
  plan.items.clear();
  plan.copies.clear();
  plan.moves.clear();
  plan.decoding_batches = plan.tokens = 0;
  state.expire(now);
  state.compact();
  state.forgotten.clear();
  if (static_cast<int>(state.flights.size()) >= options.depth) return;
  ++state.step;
  if (!state.spare_flights.empty()) {
    making = std::move(state.spare_flights.back());
    state.spare_flights.pop_back();
    making.named.clear();
  }
  policy->refresh(kv);
  load.slots = options.max_running;
  // An empty plan is to mean that there is nothing to do: if this pass moved somebody, make another.
  int passes = 0;
  do {
    pass();
  } while (plan.empty() && moved && ++passes < 8);
  if (plan.empty()) {  // nothing was given a place in it
    --state.step;
    state.spare_flights.push_back(std::move(making));
    return;
  }
  kv.begin_step(state.step + 1);
  for (Sequence* s : to_fork) fork_choices(s);  // what they copy is there once this plan has run
  plan.step = state.step;
  plan.tokens = options.max_tokens_per_step - budget;
  making.step = state.step;
  making.planned = now;
  making.tokens = plan.tokens;
  making.work = work;
  making.work.moves = static_cast<double>(plan.moves.size());
  state.stats.steps_cut += cut;
  state.flights.push_back(std::move(making));
  ++state.stats.steps;
}

void Scheduler::PlanMaker::pass() {
  ++state.passes;
  moved = false;
  budget = options.max_tokens_per_step;
  waits_whole = false;
  work = {};
  most_seconds = 0;
  cut = false;
  make_room();
  plan_decodes();
  plan_verifications();
  load.decodes_seconds = work.decodes > 0 ? step_seconds(work, state.learned.least()) : 0;
  if (somebody_decodes)
    most_seconds = std::max(1e-3 * options.max_step_ms, 2 * step_seconds(work, state.learned.cost()));
  plan_prefills();
  plan_admissions(nullptr);
  kv.take_orders(plan.copies, plan.moves);
}

void Scheduler::PlanMaker::put(Sequence* s, Phase phase, int64_t count, bool samples) {
  PlanItem& item = plan.items.emplace_back();
  kvcache::Lease& lease = *s->lease();
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
  item.cut_begin = kv.sink_pages(0), item.cut_end = std::max(item.cut_begin, lease.first_held(0));
  item.table_version = lease.version();
  item.state = kv.own_state(lease);
  if (kv.groups() > 1) item.more_pages = lease.more_pages(kv.groups());
  making.named.push_back({s, s->planned, item.count, samples, phase == Phase::verify});
  plan.decoding_batches += phase == Phase::decode;
  budget -= count;
  add_work(work, phase, s->planned, count);
  ++s->in_flight;
  s->last_step = state.step;
  s->planned += count;
  policy->served(*s, count);
}

void Scheduler::PlanMaker::plan_decodes() {
  state.growth_pages = 0;
  somebody_decodes = false;
  verifications.clear();
  prefills.clear();
  // Drafts may have what plain decodes and a page of prefill leave.
  int64_t spare = options.max_tokens_per_step - static_cast<int64_t>(running.size()) - options.page_size;
  for (size_t i = 0; i < running.size(); ++i) {
    if (i + 4 < running.size()) __builtin_prefetch(running[i + 4]);
    Sequence* s = running[i];
    auto* d = std::get_if<Decoding>(&s->state);
    const RequestState& r = *s->request;
    if (d == nullptr) {
      if (s->running() && !r.paused) prefills.push_back(s);
      continue;
    }
    const int64_t wanted = state.limit_of(*s) - s->outputs() - s->awaiting;
    if (wanted <= 0) continue;
    state.growth_pages += kv.pages_missing(d->kv, s->planned + std::min<int64_t>(wanted, options.lookahead_tokens));
    somebody_decodes |= options.max_step_ms > 0 && !r.paused;
    if (r.paused || s->verifying || (r.needs_mask && (!s->mask_ready || s->awaiting > 0))) continue;
    if (r.beam && !secure_beams(*s->request)) continue;
    if (!s->running()) continue;
    if (s->awaiting > 0 && s->last_step + 1 != state.step) continue;  // its token is not in the plan before this one
    if (budget < 1) continue;
    if (!d->draft.empty()) {
      int64_t n = std::min<int64_t>({static_cast<int64_t>(d->draft.size()), spare, wanted - 1});
      if (n > 0 && s->awaiting == 0 && make_writable(s, false) && kv.grow(d->kv, s->planned + 1 + n)) {
        d->draft.resize(n);
        s->claimed = state.passes;
        spare -= n;
        verifications.push_back(s);
        continue;
      }
      d->draft.clear();
    }
    if (!secure(s, s->planned + 1)) continue;
    if (r.needs_mask) s->mask_ready = false;
    put(s, Phase::decode, 1, true);
    ++s->awaiting;
  }
}

void Scheduler::PlanMaker::plan_verifications() {
  for (Sequence* s : verifications) {
    auto* d = std::get_if<Decoding>(&s->state);
    if (d == nullptr) continue;  // preempted since
    d->draft.insert(d->draft.begin(), s->tokens.back());
    if (s->request->needs_mask) s->mask_ready = false;
    put(s, Phase::verify, static_cast<int64_t>(d->draft.size()), true);
    s->verifying = true;
    ++s->awaiting;
  }
}

void Scheduler::PlanMaker::plan_prefills() {
  policy->order_prefills(prefills);
  lead = nullptr;
  for (Sequence* s : prefills) {
    if (!s->running()) continue;
    if (const Sequence* w = policy->best(now); w != nullptr && w->in_flight == 0 && policy->goes_first(*w, *s))
      plan_admissions(s);
    if (!s->running()) continue;
    state.growth_pages +=
        kv.pages_missing(*s->lease(), static_cast<int64_t>(s->tokens.size()) + options.lookahead_tokens);
    if (budget > 0 && (lead == nullptr || policy->may_join(*lead, *s))) plan_chunk(s);
  }
}

// Beams that lost their pages take up their next token together, as a decode; others at their prefill's end.
int64_t Scheduler::PlanMaker::prefill_target(const Sequence& s) const {
  const bool later = s.request->beam && s.outputs() > 0;
  return static_cast<int64_t>(s.tokens.size()) - (later ? 1 : 0);
}

// A chunk ends where its state is to be kept.
int64_t Scheduler::PlanMaker::kept_before(const Sequence& s, int64_t end) const {
  const int64_t size = options.page_size;
  for (int64_t at = (s.planned / size + 1) * size; at < end; at += size)
    if (state.keeps_state_at(s, at)) return at;
  return end;
}

void Scheduler::PlanMaker::become_decoding(Sequence* s) {
  kvcache::Lease lease = std::move(*s->lease());
  s->state = Decoding{std::move(lease), {}};
}

// Prompt tokens from `begin` on that this step may still take up. With somebody who decodes they are as many as
// max_step_ms has time for. But prompts may take as long as the decodes beside them, and one page goes in every step:
// else they would crawl where decodes alone fill the time, and each page of them pay for a step of its own.
int64_t Scheduler::PlanMaker::prompt_room(int64_t begin) const {
  if (!somebody_decodes) return budget;
  StepTime so_far = work;
  so_far.moves = static_cast<double>(kv.moves());
  const double left = most_seconds - step_seconds(so_far, state.learned.cost());
  const auto in_time =
      static_cast<int64_t>(std::min(static_cast<double>(budget), prompt_tokens_in(left, begin, state.learned.cost())));
  const int64_t to_page_end = options.page_size - begin % options.page_size;
  return lead == nullptr ? std::max(in_time, std::min(budget, to_page_end)) : in_time;
}

// Whole pages, except the last chunk. False when the budget or the pages have room for none.
bool Scheduler::PlanMaker::plan_chunk(Sequence* s) {
  RequestState& r = *s->request;
  const int64_t size = options.page_size;
  const int64_t target = prefill_target(*s);
  if (s->planned >= target) {  // a beam whose prefix was there
    become_decoding(s);
    return false;
  }
  // A state to be kept here is kept when it is there, which it must be before it goes on.
  if (s->in_flight > 0 && state.keeps_state_at(*s, s->planned)) return false;
  // What is computed whole is not cut for max_step_ms: it would wait for as long as anybody decodes.
  const int64_t whole = r.whole && s->planned < r.prompt_tokens ? r.prompt_tokens : 0;
  const int64_t room = whole > 0 ? budget : prompt_room(s->planned), wanted = target - s->planned;
  int64_t end = std::min(target, s->planned + room);
  cut |= room < std::min(budget, wanted);
  const bool samples_at_end = state.limit_of(*s) > s->outputs() && target == static_cast<int64_t>(s->tokens.size());
  if (end == target && samples_at_end && r.needs_mask && !s->mask_ready) end = target - 1;
  if (end < target) end = std::max(end / size * size, end < whole ? 0 : whole);
  if (options.recurrent && whole == 0) end = kept_before(*s, end);
  if (end < whole) {
    // Nobody is let in who would decode beside it in the next step, and so for ever.
    waits_whole |= room < whole && (plan.decoding_batches > 0 || !verifications.empty());
    return false;
  }
  if (end <= s->planned) return false;
  if (!secure(s, end)) {
    // Before nothing runs at all, a page's worth does: beams that come back share a pool that none could have alone.
    const int64_t least = whole > 0 ? whole : (s->planned / size + 1) * size;
    if (!making.named.empty() || !s->running() || least >= end || !secure(s, least)) return false;
    end = least;
  }
  const bool last = end == target, samples = last && samples_at_end;
  put(s, Phase::prefill, end - s->planned, samples);
  if (lead == nullptr) lead = s;
  if (!last) return true;
  s->awaiting += samples;
  if (samples && r.needs_mask) s->mask_ready = false;
  become_decoding(s);
  if (!r.forked && samples) to_fork.push_back(s);
  return true;
}

// The prompt is in (once this plan has run): each further choice starts from the same pages.
void Scheduler::PlanMaker::fork_choices(Sequence* s) {
  RequestState& r = *s->request;
  r.forked = true;
  for (int32_t c = 1; c < r.n; ++c) {
    Sequence* f = state.make_sequence(&r, c);
    f->tokens = s->tokens;
    f->computed = s->computed;
    f->planned = s->planned;
    f->last_step = state.step;
    f->in_flight = 1;
    f->awaiting = 1;
    f->mask_ready = !r.needs_mask;
    making.named.push_back({f, f->planned, 0, true, false});
    kvcache::Lease lease = kv.fork(*s->lease(), s->planned, r.prompt_tokens + r.max_new);
    if (lease.empty()) {  // offset mode had no run: it computes the prompt itself, later
      f->state = Waiting{};
      state.enqueue(f);
      continue;
    }
    f->state = Decoding{std::move(lease), {}};
    start_running(f);
  }
}

}  // namespace kvasir::scheduler
