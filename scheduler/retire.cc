// A plan has run: what it wrote is there, what it sampled is known, what it held up comes back.
#include <algorithm>

#include "core/check.h"
#include "scheduler/state.h"

namespace kvasir::scheduler {

void Scheduler::State::retire(std::span<SeqResult> results, Time now) {
  KVASIR_CHECK(!flights.empty(), "advance without a plan in flight");
  Flight flight = std::move(flights.front());
  flights.pop_front();
  clock = std::max(clock, now);
  kv.retire_step(flight.step);
  const int64_t outputs_before = stats.output_tokens;

  // Results come in the plan's order, as a rule; then finding one is looking at the next.
  size_t next = 0;
  std::unordered_map<SeqId, size_t> by_id;
  auto result_of = [&](SeqId id) -> SeqResult* {
    if (next < results.size() && results[next].seq == id) return &results[next++];
    if (by_id.empty())
      for (size_t i = 0; i < results.size(); ++i) by_id[results[i].seq] = i;
    auto it = by_id.find(id);
    return it == by_id.end() ? nullptr : &results[it->second];
  };
  std::vector<RequestId> searches;  // not pointers: a search whose last beams end below is gone
  for (const Named& n : flight.named) {
    Sequence* s = n.seq;
    --s->in_flight;
    SeqResult* r = n.samples ? result_of(s->id) : nullptr;
    if (r != nullptr) r->accepted = 0;
    if (s->over()) {
      if (s->in_flight == 0) {
        --leaving;
        forget(s);
      }
      continue;
    }
    const bool late = r != nullptr && r->tokens.empty();  // its last position is computed again
    if (!n.verify) s->computed = std::max(s->computed, n.begin + n.count - late);
    if (n.samples) {
      KVASIR_CHECK(r != nullptr, "sequence ", s->id, " sampled in step ", flight.step, " and has no result");
      if (s->request->beam && s->outputs() > 0 &&
          std::find(searches.begin(), searches.end(), s->request->id) == searches.end())
        searches.push_back(s->request->id);
      take_tokens(s, *r, n);
    }
    settle(s);
  }
  for (RequestId id : searches)
    if (auto it = requests.find(id); it != requests.end()) regroup_beams(it->second.get(), results);

  // It waited for the step before, if that was in flight.
  const double took = in_seconds(now - std::max(flight.planned, last_advance));
  last_advance = now;
  flight.work.seconds = took;
  learned.learn(flight.work);
  if (took > 0 && flight.tokens > 0) {
    const double keep = load.tokens_per_second > 0 ? 0.95 : 0.0;
    const auto follow = [keep](double& average, double now) { average = keep * average + (1 - keep) * now; };
    follow(load.tokens_per_second, static_cast<double>(flight.tokens) / took);
    follow(load.outputs_per_second, static_cast<double>(stats.output_tokens - outputs_before) / took);
    // The plain mean at first, but of the first step: it waits for much that no other waits for.
    const double weight = std::max(0.05, 1.0 / static_cast<double>(std::max<int64_t>(load.steps++, 1)));
    load.step_seconds += weight * (took - load.step_seconds);
  }
  flight.named.clear();
  spare_flights.push_back(std::move(flight));
}

void Scheduler::State::take_tokens(Sequence* s, SeqResult& r, const Named& n) {
  --s->awaiting;
  const bool late = r.tokens.empty();
  KVASIR_CHECK(int64_t(r.tokens.size()) <= (n.verify ? n.count : 1), "sequence ", s->id, " was given ", r.tokens.size(),
               " tokens for ", n.count);
  KVASIR_CHECK(!late || !options.recurrent, "sequence ", s->id, " was given no token, and its state does not go back");
  KVASIR_CHECK(!late || (s->request->needs_mask && !s->request->beam && s->outputs() > 0), "sequence ", s->id,
               " was given no token");
  const int64_t room = limit_of(*s) - s->outputs();
  r.accepted = static_cast<int32_t>(std::min<int64_t>(room, static_cast<int64_t>(r.tokens.size())));
  s->tokens.insert(s->tokens.end(), r.tokens.begin(), r.tokens.begin() + r.accepted);
  stats.output_tokens += r.accepted;
  stats.recomputed_tokens += late;
  if (n.verify) {
    s->verifying = false;
    s->computed = std::max(s->computed, n.begin + r.accepted);
  }
  if (n.verify || late) {
    if (auto* d = std::get_if<Decoding>(&s->state)) {
      d->draft.clear();
      s->planned = s->computed;
      kv.trim_back(d->kv, s->planned);
    }
  }
  if (r.stop && r.accepted == static_cast<int32_t>(r.tokens.size())) {
    s->stop_limit = s->outputs();
  }
}

// At the end of the prompt, so that the same one or what goes on from it finds it; and where it parts from what others
// have begun with. A few tokens are sooner computed than kept.
bool Scheduler::State::keeps_state_at(const Sequence& s, int64_t position) const {
  constexpr int64_t kLeastPages = 4;
  if (!options.recurrent || s.request->cache_key.empty() || position < kLeastPages * options.page_size) return false;
  const int64_t last = (s.request->prompt_tokens - 1) / options.page_size * options.page_size;
  return position == last || position == s.met;
}

// After one of its plans: ends it if it is complete, shares what is whole, drops what no query can see.
void Scheduler::State::settle(Sequence* s) {
  const bool prompt_only = s->request->max_new == 0 && s->computed >= s->request->prompt_tokens;
  if (prompt_only || (s->outputs() > 0 && s->outputs() >= limit_of(*s))) {
    const bool stopped = s->stop_limit >= 0 && s->outputs() >= s->stop_limit;
    end_sequence(s, stopped ? Notice::Reason::stop : Notice::Reason::length);
    return;
  }
  if (kvcache::Lease* lease = s->lease()) {
    kv.commit(*lease, s->tokens, s->computed, s->in_flight == 0);
    if (s->planned == s->computed && keeps_state_at(*s, s->computed)) kv.keep_state(*lease, s->computed);
    if (kv.groups() > 1 || options.groups[0].window > 0) kv.trim_front(*lease, s->computed);
    return;
  }
  if (s->in_flight > 0) return;
  kvcache::Lease* left = nullptr;
  if (auto* w = std::get_if<Waiting>(&s->state)) left = &w->leaving;
  if (auto* x = std::get_if<Swapped>(&s->state)) left = &x->leaving;
  if (left == nullptr || left->empty()) return;
  --leaving;
  kv.finish(std::move(*left), s->tokens, s->computed);
  if (std::holds_alternative<Waiting>(s->state)) s->computed = s->planned = 0;
}

// Every beam goes on from the parent its result names: the parents' pages and tokens, forked. A page that
// two children share is copied by whoever writes first.
void Scheduler::State::regroup_beams(RequestState* r, std::span<SeqResult> results) {
  struct Next {
    Sequence* beam;
    std::vector<int32_t> tokens;
    kvcache::Lease lease;
  };
  std::vector<Next> next;
  for (Sequence* s : r->sequences) {
    auto it = std::find_if(results.begin(), results.end(), [&](const SeqResult& x) { return x.seq == s->id; });
    if (it == results.end() || s->over() || it->parent < 0 || it->parent == s->choice) continue;
    Sequence* parent = find_sequence(r->first + it->parent);
    KVASIR_CHECK(parent != nullptr && !parent->over(), "beam ", s->id, " continues from choice ", it->parent,
                 ", which is over");
    Next& n = next.emplace_back();
    n.beam = s;
    n.tokens.assign(parent->tokens.begin(), parent->tokens.end() - 1);
    n.tokens.push_back(it->tokens.back());
    if (parent->running()) n.lease = kv.fork(*parent->lease(), parent->planned, r->prompt_tokens + r->max_new);
  }
  for (Next& n : next) {
    Sequence* s = n.beam;
    s->tokens = std::move(n.tokens);
    if (auto* d = std::get_if<Decoding>(&s->state)) {
      if (n.lease.empty()) {  // offset mode had no run for it
        lose_pages(s, std::move(d->kv), {});
        s->state = Waiting{};
      } else {
        d->kv = std::move(n.lease);
      }
    } else {
      s->state = Waiting{};  // preempted meanwhile: what was moved out is the old beam's
      s->computed = s->planned = 0;
    }
  }
}

}  // namespace kvasir::scheduler
