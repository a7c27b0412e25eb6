// What may come in: the checks of a submission, of the load and of the wait (overload.cc), before anything is changed.
#include <algorithm>
#include <cmath>

#include "scheduler/state.h"

namespace kvasir::scheduler {
namespace {

Status wrong(const char* field, std::string message) { return invalid_argument(std::move(message)).with_field(field); }

// Lengths go in, so that no two different triples make the same key.
std::string cache_key(const Submission& s) {
  return cat(s.tenant.size(), ":", s.tenant, s.cache_salt.size(), ":", s.cache_salt, s.adapter);
}

}  // namespace

// Of one request, alone in the pool. Choices may take turns, beams may not: each needs its own pages,
// and one more for what they share in part. A window needs no more than itself and a step (options.cc).
int64_t Scheduler::State::most_tokens(int32_t beams) const {
  int64_t most = options.max_context;
  for (int g = 0; g < kv.groups(); ++g) {
    int64_t pages = kv.pool(g).size();
    if (options.groups[g].window > 0 && options.index_mode != kvcache::IndexMode::offset) {
      const int64_t each = kv.pages_for(options.groups[g].window) + 2 + (options.groups[g].sinks > 0);
      if (beams > 1 && beams * each + kv.pages_for(options.max_tokens_per_step) > pages) most = 0;
      continue;
    }
    if (beams > 1) pages = pages / beams - 1;
    most = std::min(most, pages * options.page_size);
  }
  return most;
}

Status Scheduler::State::check(const Submission& s) const {
  if (requests.contains(s.id))
    return Status(Code::already_exists, cat("request ", s.id, " is already there")).with_field("id");
  const int64_t prompt = static_cast<int64_t>(s.prompt.size());
  if (prompt == 0) return wrong("prompt", "prompt has no tokens; at least one is needed");
  for (int32_t t : s.prompt)
    if (t < 0) return wrong("prompt", cat("prompt has token id ", t, "; ids are not negative"));
  if (s.n < 1 || s.n > options.max_running)
    return wrong("n", cat("n is ", s.n, "; it must be from 1 to ", options.max_running));
  const int64_t most = most_tokens(s.beam ? s.n : 1);
  if (prompt > most || (prompt == most && s.max_new.value_or(1) > 0))
    return wrong("prompt", cat("prompt has ", prompt, " tokens; context and cache have room for ", most,
                               " with the output: shorten it, or serve with more kv-memory"));
  if (s.whole && prompt > options.max_tokens_per_step)
    return wrong("prompt", cat("prompt has ", prompt,
                               " tokens, which this model computes in one step; a step has room "
                               "for ",
                               options.max_tokens_per_step, " (max_tokens_per_step)"));
  if (s.max_new && *s.max_new < 0)
    return wrong("max_tokens", cat("max_tokens is ", *s.max_new, "; it must not be negative"));
  if (s.max_new && *s.max_new > most - prompt)
    return wrong("max_tokens", cat("max_tokens is ", *s.max_new, "; with a prompt of ", prompt, " tokens at most ",
                                   most - prompt, " fit"));
  if (!(s.weight >= 0 && s.weight <= kMostWeight))
    return wrong("weight", cat("weight is ", s.weight, "; it must be above 0 and at most ", kMostWeight));
  return {};
}

Status Scheduler::State::check_load(const Submission& s, int32_t tenant) const {
  const int64_t prompt = static_cast<int64_t>(s.prompt.size());
  const TenantLoad& t = tenants[tenant];
  // Of the prompts that wait.
  const double each = static_cast<double>(stats.waiting_tokens) / static_cast<double>(std::max<int64_t>(waiting, 1));
  struct Bound {
    const char* what;
    int64_t now, more, most;
    double a_request;  // what one more counts for
  };
  const Bound bounds[] = {
      {"requests wait", waiting, 1, options.max_waiting, 1},
      {"prompt tokens wait", stats.waiting_tokens, prompt, options.max_waiting_tokens, each},
      {"of your requests wait", t.waiting, 1, options.tenant_max_waiting, 1},
      {"of your prompt tokens wait", t.waiting_tokens, prompt, options.tenant_max_waiting_tokens, each}};
  for (const Bound& b : bounds) {
    // Before an empty queue a prompt longer than all that may wait is let in: it would be refused for ever.
    if (b.most == 0 || b.now == 0 || b.now + b.more <= b.most) continue;
    // So many must come in first; each makes place for the next by being computed, its answer too.
    const double requests = std::ceil(static_cast<double>(b.now + b.more - b.most) / b.a_request);
    const double tokens = requests * (each + load.output_tokens);
    const double wait = load.tokens_per_second > 0 ? tokens / load.tokens_per_second : 1.0;
    auto ms = std::chrono::milliseconds(static_cast<int64_t>(std::ceil(std::clamp(wait, 0.05, 600.0) * 1000)));
    return resource_exhausted(cat(b.now, " ", b.what, ", at most ", b.most, " may; try again in ", ms.count(), " ms"))
        .with_retry_after(ms);
  }
  return {};
}

Sequence* Scheduler::State::make_sequence(RequestState* r, int32_t choice) {
  auto owned = std::make_unique<Sequence>();
  Sequence* s = owned.get();
  s->id = r->first + choice;
  s->request = r;
  s->choice = choice;
  s->mask_ready = !r->needs_mask;
  r->sequences.push_back(s);
  ++r->alive;
  sequences[s->id] = std::move(owned);
  return s;
}

Result<SeqId> Scheduler::State::submit(Submission submission, Time now) {
  clock = std::max(clock, now);
  auto judged = [&]() -> Status {
    KVASIR_TRY(check(submission));
    if (submission.deadline && *submission.deadline <= now)
      return Status(Code::deadline_exceeded, "the deadline has passed already").with_field("deadline");
    return check_load(submission, tenant_index(submission.tenant));
  };
  if (Status s = judged(); !s.ok()) {
    ++stats.refused;
    return s;
  }
  auto owned = std::make_unique<RequestState>();
  RequestState* r = owned.get();
  r->id = submission.id;
  r->tenant = tenant_index(submission.tenant);
  r->priority = submission.priority;
  r->n = submission.n;
  r->beam = submission.beam && submission.n > 1;
  r->needs_mask = submission.needs_mask;
  r->no_prefix_read = submission.no_prefix_read;
  r->forked = submission.n == 1;
  r->prompt_tokens = static_cast<int64_t>(submission.prompt.size());
  r->max_new = submission.max_new.value_or(most_tokens(r->beam ? r->n : 1) - r->prompt_tokens);
  r->ordinal = next_ordinal;
  r->first = next_seq;
  r->arrival = now;
  r->deadline = submission.deadline;
  r->whole = submission.whole;
  if (options.prefix_cache && !submission.no_prefix) r->cache_key = cache_key(submission);

  Sequence probe;  // what is to be judged, before anything is changed
  probe.request = r;
  probe.tokens = std::move(submission.prompt);
  if (Status s = check_wait(probe, now); !s.ok()) {
    ++stats.refused;
    return s;
  }
  if (submission.weight > 0 && !options.tenant_weights.contains(submission.tenant))
    policy->weigh(r->tenant, submission.weight);
  ++next_ordinal;
  next_seq += r->n;
  requests[r->id] = std::move(owned);
  ++stats.requests;
  Sequence* s = make_sequence(r, 0);
  s->tokens = std::move(probe.tokens);
  s->tokens.shrink_to_fit();
  if (r->deadline) expiries[{*r->deadline, r->ordinal}] = r->id;
  enqueue(s);
  return s->id;
}

}  // namespace kvasir::scheduler
