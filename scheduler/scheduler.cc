// The calls from outside (submit() is in submit.cc), and the one exit.
#include "scheduler/scheduler.h"

#include <algorithm>

#include "core/check.h"
#include "scheduler/plan_maker.h"
#include "scheduler/recorder.h"

namespace kvasir::scheduler {
namespace {

Status wrong(const char* field, std::string message) { return invalid_argument(std::move(message)).with_field(field); }

}  // namespace

Scheduler::Scheduler(std::unique_ptr<State> state) : state_(std::move(state)) {}
Scheduler::~Scheduler() = default;

Result<std::unique_ptr<Scheduler>> Scheduler::create(const Settings& options) {
  KVASIR_TRY(options.validate());
  KVASIR_ASSIGN(auto policy, make_policy(options));
  kvcache::KvSpaceOptions kv;
  kv.page_size = options.page_size;
  for (const PageGroup& g : options.groups) kv.groups.push_back({g.pages, g.window, g.sinks});
  kv.contiguous = options.index_mode == kvcache::IndexMode::offset;
  kv.prefix_cache = options.prefix_cache;
  kv.host_pages = options.host_pages;
  kv.states = options.recurrent ? options.max_running : 0;
  kv.kept_states = options.recurrent && options.prefix_cache ? options.kept_states : 0;
  kv.tenant_share = options.tenant_cache_share;
  kv.events = options.cache_events;
  kv.recompute_slope = options.cost.context_us * options.page_size / std::max(options.cost.token_us, 1e-9);
  auto state = std::make_unique<State>(options, kv, std::move(policy));
  state->kv.begin_step(1);
  if (options.recorder) options.recorder->begin(options);
  return std::unique_ptr<Scheduler>(new Scheduler(std::move(state)));
}

Result<SeqId> Scheduler::submit(Submission submission, Time now) {
  Recorder* recorder = state_->options.recorder.get();
  if (recorder == nullptr) return state_->submit(std::move(submission), now);
  const int32_t n = submission.n;
  recorder->submit(submission, now);
  Result<SeqId> first = state_->submit(std::move(submission), now);
  recorder->submitted(first, n);
  return first;
}

void Scheduler::next_step(Time now, StepPlan& plan) {
  PlanMaker(*state_, now, plan).make();
  if (auto& recorder = state_->options.recorder) recorder->step(now, plan, state_->options.page_size);
}

void Scheduler::advance(std::span<SeqResult> results, Time now) {
  if (auto& recorder = state_->options.recorder) recorder->advance(results, now);
  state_->retire(results, now);
}

int32_t Scheduler::State::tenant_index(const std::string& name) {
  auto [it, added] = tenant_ids.try_emplace(name, static_cast<int32_t>(tenants.size()));
  if (added) {
    tenants.push_back({name});
    policy->tenant(it->second, name);
    if (options.cache_events) options.cache_events->name(it->second, name);
  }
  return it->second;
}

RequestState* Scheduler::State::find_request(RequestId id) {
  auto it = requests.find(id);
  return it == requests.end() ? nullptr : it->second.get();
}

Sequence* Scheduler::State::find_sequence(SeqId id) const {
  auto it = sequences.find(id);
  return it == sequences.end() ? nullptr : it->second.get();
}

void Scheduler::State::count_waiting(const Sequence& s, int sign) {
  TenantLoad& t = tenants[s.request->tenant];
  const int64_t tokens = s.queued_tokens;
  waiting += sign;
  t.waiting += sign;
  t.waiting_tokens += sign * tokens;
  stats.waiting_tokens += sign * tokens;
}

void Scheduler::State::count_queued(const Sequence& s, int sign) {
  for (Queued* q : {&queued, &tenants[s.request->tenant].queued}) {
    q->slots += sign * s.queued_slots;
    q->tokens += sign * s.queued_tokens;
  }
}

// What is paused counts as well: else one who pauses for ever could fill any amount of memory.
void Scheduler::State::enqueue(Sequence* s) {
  if (s->queued_tokens == 0) {
    s->queued_tokens = static_cast<int64_t>(s->tokens.size());
    count_waiting(*s, 1);
  }
  if (s->request->paused || s->queued) return;
  s->queued = true;
  s->queued_slots = s->request->forked ? 1 : s->request->n;
  policy->push(s);
  count_queued(*s, 1);
}

void Scheduler::State::dequeue(Sequence* s) {
  leave_queue(s);
  if (s->queued_tokens == 0) return;
  count_waiting(*s, -1);
  s->queued_tokens = 0;
}

void Scheduler::State::leave_queue(Sequence* s) {
  if (!s->queued) return;
  s->queued = false;
  policy->erase(s);
  count_queued(*s, -1);
  s->queued_slots = 0;
}

void Scheduler::State::event(Notice::Kind kind, const Sequence& s, Notice::Reason reason) {
  Notice e;
  e.kind = kind;
  e.reason = reason;
  e.request = s.request->id;
  e.seq = s.id;
  e.choice = s.choice;
  e.cached_tokens = s.request->cached_tokens;
  e.output_tokens = s.outputs();
  events.push_back(e);
}

void Scheduler::State::end_sequence(Sequence* s, Notice::Reason reason) {
  if (s->over()) return;
  dequeue(s);
  if (reason != Notice::Reason::none) {
    event(Notice::Kind::finished, *s, reason);
    ++stats.finished;
    for (int32_t c = 1; c < s->request->n && !s->request->forked; ++c) {  // of a prompt alone: nothing forks
      Notice other = events.back();
      other.seq = s->request->first + static_cast<SeqId>(c);
      other.choice = c;
      events.push_back(other);
      ++stats.finished;
    }
    const double weight = std::max(0.02, 1.0 / static_cast<double>(stats.finished));  // at first, the plain mean
    load.output_tokens += weight * (static_cast<double>(s->outputs()) - load.output_tokens);
    load.slot_seconds += weight * (in_seconds(clock - s->admitted) - load.slot_seconds);
  }
  RequestState& r = *s->request;
  if (--r.alive == 0 && r.deadline) expiries.erase({*r.deadline, r.ordinal});
  kvcache::Lease lease;
  std::vector<int32_t> draft;
  if (auto* d = std::get_if<Decoding>(&s->state)) draft = std::move(d->draft);
  if (auto* w = std::get_if<Waiting>(&s->state)) {
    if (!w->leaving.empty()) --leaving;
    lease = std::move(w->leaving);
  } else if (auto* x = std::get_if<Swapped>(&s->state)) {
    if (!x->leaving.empty()) --leaving;
    lease = std::move(x->leaving);
  } else {
    lease = std::move(*s->lease());
    dirty = true;
    policy->stopped(*s);
  }
  s->state = Ended{std::move(lease), std::move(draft)};
  if (s->in_flight == 0) {
    forget(s);
  } else {
    ++leaving;
  }
}

void Scheduler::State::forget(Sequence* s) {
  RequestState* r = s->request;
  auto& ended = std::get<Ended>(s->state);
  kv.finish(std::move(ended.kv), s->tokens, std::min<int64_t>(s->computed, s->tokens.size()));
  std::erase(r->sequences, s);
  auto it = sequences.find(s->id);
  forgotten.push_back(std::move(it->second));
  sequences.erase(it);
  if (!r->sequences.empty()) return;
  Notice e;
  e.kind = Notice::Kind::released;
  e.request = r->id;
  events.push_back(e);
  if (r->paused) --paused_requests;
  if (options.recorder) options.recorder->forget(r->first, r->n);
  s->request = nullptr;
  requests.erase(r->id);
  if (requests.empty() && flights.empty()) kv.abandon_orders();
}

void Scheduler::State::end_request(RequestState* r, Notice::Kind why) {
  Notice e;
  e.kind = why;
  e.request = r->id;
  e.seq = r->first;
  e.cached_tokens = r->cached_tokens;
  events.push_back(e);
  ++(why == Notice::Kind::expired ? stats.expired : stats.cancelled);
  r->forked = true;  // no choice is to come any more
  std::vector<Sequence*> all = r->sequences;
  for (Sequence* s : all) end_sequence(s, Notice::Reason::none);
}

void Scheduler::State::expire(Time now) {
  while (!expiries.empty() && expiries.begin()->first.first <= now)
    end_request(find_request(expiries.begin()->second), Notice::Kind::expired);
}

void Scheduler::State::compact() {
  if (!dirty) return;
  std::erase_if(running, [](const Sequence* s) { return !s->running(); });
  dirty = false;
}

Status Scheduler::cancel(RequestId id) {
  if (auto& recorder = state_->options.recorder) recorder->request_call("cancel", id);
  RequestState* r = state_->find_request(id);
  if (r == nullptr || r->alive == 0) return not_found(cat("request ", id, " is not there, or is over"));
  state_->end_request(r, Notice::Kind::cancelled);
  return {};
}

Status Scheduler::pause(RequestId id) {
  if (auto& recorder = state_->options.recorder) recorder->request_call("pause", id);
  State& st = *state_;
  RequestState* r = st.find_request(id);
  if (r == nullptr || r->alive == 0) return not_found(cat("request ", id, " is not there, or is over"));
  if (r->paused) return {};
  for (Sequence* s : r->sequences) st.leave_queue(s);
  r->paused = true;
  ++st.paused_requests;
  return {};
}

Status Scheduler::resume(RequestId id) {
  if (auto& recorder = state_->options.recorder) recorder->request_call("resume", id);
  State& st = *state_;
  RequestState* r = st.find_request(id);
  if (r == nullptr || r->alive == 0) return not_found(cat("request ", id, " is not there, or is over"));
  if (!r->paused) return {};
  r->paused = false;
  --st.paused_requests;
  for (Sequence* s : r->sequences)
    if (s->waits()) st.enqueue(s);
  return {};
}

int64_t Scheduler::State::limit_of(const Sequence& s) const {
  return s.stop_limit >= 0 ? std::min(s.stop_limit, s.request->max_new) : s.request->max_new;
}

Status Scheduler::stop_at(SeqId id, int64_t output_tokens) {
  if (auto& recorder = state_->options.recorder) recorder->stop_at(id, output_tokens);
  State& st = *state_;
  Sequence* s = st.find_sequence(id);
  if (s == nullptr || s->over()) return not_found(cat("sequence ", id, " is not there, or is over"));
  if (s->request->beam) return failed_precondition("beams end together: cancel the request");
  if (!s->request->forked) return failed_precondition(cat("sequence ", id, " has no output yet"));
  if (output_tokens < 0)
    return wrong("tokens", cat("stop_at ", output_tokens, " output tokens; it must not be negative"));
  s->stop_limit = output_tokens;
  if (s->outputs() < output_tokens) return {};  // it ends when it gets there
  s->tokens.resize(s->request->prompt_tokens + output_tokens);
  s->computed = std::min(s->computed, static_cast<int64_t>(s->tokens.size()));
  st.end_sequence(s, Notice::Reason::stop);
  return {};
}

Status Scheduler::mask_ready(SeqId id) {
  if (auto& recorder = state_->options.recorder) recorder->mask_ready(id);
  Sequence* s = state_->find_sequence(id);
  if (s == nullptr || s->over()) return not_found(cat("sequence ", id, " is not there, or is over"));
  s->mask_ready = true;
  return {};
}

Status Scheduler::propose(SeqId id, std::vector<int32_t> draft) {
  if (auto& recorder = state_->options.recorder) recorder->propose(id, draft);
  State& st = *state_;
  Sequence* s = st.find_sequence(id);
  if (s == nullptr || s->over()) return not_found(cat("sequence ", id, " is not there, or is over"));
  if (static_cast<int64_t>(draft.size()) > st.options.max_draft)
    return wrong("draft", cat("draft has ", draft.size(), " tokens; at most ", st.options.max_draft, " are verified"));
  if (s->request->beam) return failed_precondition("a beam search takes no drafts");
  auto* d = std::get_if<Decoding>(&s->state);
  if (d == nullptr || s->awaiting > 0) return failed_precondition(cat("sequence ", id, " does not decode now"));
  d->draft = std::move(draft);
  return {};
}

void Scheduler::take_events(std::vector<Notice>& out) {
  out.clear();
  std::swap(out, state_->events);
}

std::span<const int32_t> Scheduler::tokens(SeqId id) const {
  const Sequence* s = state_->find_sequence(id);
  return s == nullptr ? std::span<const int32_t>() : std::span<const int32_t>(s->tokens);
}

bool Scheduler::alive(SeqId id) const {
  const Sequence* s = state_->find_sequence(id);
  return s != nullptr && !s->over();
}

int Scheduler::in_flight() const { return static_cast<int>(state_->flights.size()); }
bool Scheduler::idle() const { return state_->requests.empty() && state_->flights.empty(); }

std::optional<Time> Scheduler::wake_at() const {
  if (state_->expiries.empty()) return std::nullopt;
  return state_->expiries.begin()->first.first;
}

Stats Scheduler::stats() const {
  const State& st = *state_;
  Stats s = brief_stats();
  for (const auto& [id, seq] : st.sequences) {
    if (seq->over()) continue;
    const bool swapped = std::holds_alternative<Swapped>(seq->state), paused = seq->request->paused;
    s.swapped += swapped;
    s.paused += paused;
    s.running += !paused && seq->running();
    s.waiting += !paused && !swapped && seq->waits();
    s.preempted += !paused && seq->waits() && seq->request->announced;
  }
  return s;
}

Stats Scheduler::brief_stats() const {
  const State& st = *state_;
  Stats s = st.stats;
  s.pages_total = st.kv.pool(0).size();
  s.pages_free = st.kv.pool(0).free_pages();
  s.pages_cached = st.kv.pool(0).idle_pages();
  s.host_pages_total = st.kv.host_pool().size();
  s.host_pages_free = st.kv.host_pool().free_pages();
  s.tokens_per_second = st.load.tokens_per_second;
  s.outputs_per_second = st.load.outputs_per_second;
  s.expected_wait_s = st.wait_behind(st.queued, 1, st.options.max_context);
  s.wait_bound_s = st.wait_bound(st.options.max_context);
  return s;
}

const StepCost& Scheduler::cost() const { return state_->planning_cost(); }

void Scheduler::flush_prefix_cache() {
  if (auto& recorder = state_->options.recorder) recorder->flush_prefix_cache();
  state_->kv.flush();
}

void Scheduler::flush_recording() {
  if (auto& recorder = state_->options.recorder) recorder->flush();
}

std::vector<RequestId> Scheduler::live_requests() const {
  std::vector<RequestId> ids;
  for (const auto& [id, r] : state_->requests) ids.push_back(id);
  std::sort(ids.begin(), ids.end());
  return ids;
}

}  // namespace kvasir::scheduler
