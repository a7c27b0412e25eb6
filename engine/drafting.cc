// Drafts for the next step to verify. A right token saves its sequence's share of a step: the more sequences, the less,
// until no draft pays. A draft continues the last token; where steps overlap (a GPU) that is not known when the next
// step is planned. So while drafts save more than overlapping does, steps wait for one another.
#include <algorithm>
#include <utility>

#include "core/log.h"
#include "engine/step_loop.h"

namespace kvasir::engine {
namespace {

constexpr double kNewest = 0.125, kForgotten = 1.0 / 32;  // weights in moving averages
// Where a draft model does not seem to pay: its acceptance is forgotten as slowly, and it is tried once in so many
// steps, with so many tokens for a sequence of which it lacks little. Tries of the beginning tell what tokens of a step
// take from what the step takes.
constexpr double kHope = 0.75, kHoping = 1.0 / 256;
constexpr int64_t kTriedEvery = 256, kLacksLittle = 64;
constexpr int kTriedTokens = 2;
constexpr int64_t kFarAhead = 256;  // tokens over which what it lacks must pay

}  // namespace

void StepLoop::propose_drafts() {
  drafting_ = false;
  if (options_.max_draft == 0 || options_.max_step_ms == 0 || results_.empty()) return;
  if (runner_.info().state_bytes > 0) return;  // a state does not go back to where a draft was wrong
  double saved = 0;
  drafts_.clear();
  ++unmodelled_steps_;
  for (const Draw& draw : draws_) {
    if (draw.owner->after_draft) continue;
    auto draft = best_draft(draw);
    if (!draft) continue;
    saved += draft->worth.saves;
    drafts_.push_back(std::move(*draft));
  }
  if (drafts_.empty()) return;
  if (runner_.depth() > 1) {
    drafting_ = saved > alone_us_ - ahead_us_;
    if (!drafting_) alone_us_ += kForgotten * (ahead_us_ - alone_us_);  // so that it is tried again some time
    if (!drafting_ || !in_flight_.empty()) return;
  }
  for (Draft& d : drafts_) {
    if (d.source == DraftSource::grammar) propose(d, std::move(d.tokens));
    if (d.source <= DraftSource::prediction) propose(d, d.choice->drafts.lookup->draft(d.worth.tokens));
  }
  if (draft_model_) ask_draft_model();
}

std::optional<StepLoop::Draft> StepLoop::best_draft(const Draw& draw) {
  Job& job = *draw.owner->job;
  Choice& choice = job.choices[size_t(draw.owner->choice)];
  if (job.ended || job.beams || choice.ended || results_[draw.result].accepted == 0) return {};
  if (choice.grammar && choice.grammar->pending()) return {};
  const auto tokens = scheduler_->tokens(draw.owner->seq);
  if (tokens.size() <= job.request.prompt.size()) return {};
  const scheduler::StepCost& cost = scheduler_->cost();
  const double price = cost.decode_token_us + cost.decode_context_us * double(tokens.size());
  const double share = cost.fixed_us / double(results_.size());
  const Gain by{share + price, price, share};
  Draft best{draw.owner->seq, &job, &choice, DraftSource::lookup, {}, {}, tokens};
  weigh_lookup(tokens, by, best);
  if (choice.grammar) weigh_grammar(by, best);
  if (best.worth.tokens == 0 && draft_model_) weigh_model(by, best);
  if (best.worth.tokens == 0) return {};
  return best;
}

void StepLoop::weigh_lookup(std::span<const int32_t> tokens, const Gain& by, Draft& best) const {
  const Request& request = best.job->request;
  auto& lookup = best.choice->drafts.lookup;
  if (!lookup) lookup = std::make_unique<PromptLookup>(request.prediction, request.prompt);
  lookup->add(tokens.subspan(request.prompt.size() + lookup->answer_tokens()));
  best.worth = lookup->draft_length(options_.max_draft, by.gain, by.price);
  best.source = lookup->predicted() ? DraftSource::prediction : DraftSource::lookup;
}

// What a grammar leaves no choice about is drafted, too. Asking it takes time on this thread: only where there is much
// to save.
void StepLoop::weigh_grammar(const Gain& by, Draft& best) const {
  ChoiceDrafts& drafts = best.choice->drafts;
  if (8 * drafts.asking_us > by.share) {
    drafts.asking_us *= 1 - kForgotten;
    return;
  }
  if (draft_worth(drafts.forced_right, options_.max_draft, by.gain, by.price).saves <= best.worth.saves) return;
  const Time began = now();
  std::vector<int32_t> forced = best.choice->grammar->forced();
  const double took = std::chrono::duration<double, std::micro>(now() - began).count();
  drafts.asking_us += kNewest * (std::min(took, 4 * (by.share + drafts.asking_us)) - drafts.asking_us);
  const int most = std::min<int>(options_.max_draft, int(forced.size()));
  const DraftWorth worth = draft_worth(drafts.forced_right, most, by.gain, by.price);
  if (worth.saves <= best.worth.saves) return;
  best.worth = worth;
  best.source = DraftSource::grammar;
  best.tokens = std::move(forced);
}

// The draft model's own time counts, too, and what it must prefill before.
void StepLoop::weigh_model(const Gain& by, Draft& best) {
  if (!draft_model_->takes(best.seq, best.before)) return;
  double& right = best.choice->drafts.model_right;
  if (right < 0) right = model_right_;
  const auto known = int64_t(best.before.size());
  const double token = draft_model_->token_us(known, std::max(1.0, model_batch_));
  DraftWorth worth = draft_worth(right, options_.max_draft, by.gain, by.price + token);
  const int64_t lacks = draft_model_->lacks(best.seq, best.before);
  const int64_t limit = best.job->request.max_tokens.value_or(runner_.info().context_length);
  const int64_t left = std::min(kFarAhead, limit + int64_t(best.job->request.prompt.size()) - known);
  const double each = worth.saves / (worth.tokens + 1);
  if (lacks > 0 && each * double(left) < draft_model_->prefill_us(known - 1 - lacks, lacks)) worth = {};
  if (worth.tokens == 0) {
    right += kHoping * (kHope - right);
    if ((first_tries_ == 0 && unmodelled_steps_ < kTriedEvery) || lacks > kLacksLittle) return;
    worth = {std::min(kTriedTokens, options_.max_draft), alone_us_};  // whatever overlapping saves
    if (first_tries_ == 0) unmodelled_steps_ = 0;
  }
  best.worth = worth;
  best.source = DraftSource::model;
}

// For all sequences that want it together. A failure is the end of the model and of nothing else.
void StepLoop::ask_draft_model() {
  wants_.clear();
  for (const Draft& d : drafts_)
    if (d.source == DraftSource::model) wants_.push_back({d.seq, d.before, d.worth.tokens, {}});
  if (wants_.empty()) return;
  model_batch_ = double(wants_.size());
  unmodelled_steps_ = 0;
  first_tries_ = std::max(0, first_tries_ - 1);
  const double spare = 1e-3 * options_.max_step_ms - std::chrono::duration<double>(last_step_).count();
  if (Status drafted = draft_model_->draft(wants_, std::max(0.0, spare)); !drafted.ok())
    return draft_model_failed(drafted);
  auto want = wants_.begin();
  for (Draft& d : drafts_)
    if (d.source == DraftSource::model) propose(d, std::move((want++)->draft));
}

void StepLoop::draft_model_failed(const Status& why) {
  log_error("the draft model failed and drafts no more", {{"why", why.message()}});
  draft_model_.reset();
  std::lock_guard lock(shared_.mutex);
  shared_.stats.draft_model.fault = why.message();
  shared_.stats.draft_model.pages_free = shared_.stats.draft_model.pages_total;
}

// What a head reads of a step. Prompts are taken up where drafts of as many sequences as run would pay.
void StepLoop::show_states(PackedStep& step) {
  const std::span<int32_t> places = step.batch.kept_at;
  if (!draft_model_ || places.empty()) return;
  size_t row = 0;
  for (size_t i = 0; i < step.computed.size() && !step.failed; ++i) {
    const Job& job = *step.jobs[i];
    const PackedStep::Computed& c = step.computed[i];
    const auto of = places.subspan(std::exchange(row, row + size_t(c.count)), size_t(c.count));
    if (!job.ended && !job.beams && !job.request.pooled)
      draft_model_->see({c.seq, scheduler_->tokens(c.seq), c.begin, of});
  }
  draft_model_->give_back_places(places);
  if (step.failed) return;
  const double sequences = double(step.computed.size());
  const scheduler::StepCost& cost = scheduler_->cost();
  const double price = cost.decode_token_us, share = cost.fixed_us / sequences;
  const DraftWorth worth =
      draft_worth(model_right_, options_.max_draft, share + price, price + draft_model_->token_us(0, sequences));
  if (Status taken = draft_model_->catch_up(worth.tokens > 0); !taken.ok()) draft_model_failed(taken);
}

void StepLoop::forget_drafts(const Job& job) {
  if (!draft_model_) return;
  for (size_t c = 0; c < job.choices.size(); ++c) draft_model_->forget(job.first_seq + scheduler::SeqId(c));
}

void StepLoop::propose(Draft& d, std::vector<int32_t> tokens) {
  tokens.resize(std::min(tokens.size(), size_t(d.worth.tokens)));
  // Behind a token that ends the answer nothing is drawn.
  const auto& stops = d.job->stop_set;
  tokens.erase(std::find_if(tokens.begin(), tokens.end(),
                            [&](int32_t t) { return std::binary_search(stops.begin(), stops.end(), t); }),
               tokens.end());
  if (tokens.empty()) return;
  d.choice->drafts.source = d.source;
  (void)scheduler_->propose(d.seq, std::move(tokens));
}

}  // namespace kvasir::engine
