// Drafts for the next step to verify. A right token saves its sequence's share of a step: the more sequences, the less,
// until no draft pays. A draft continues the last token; where steps overlap (a GPU) that is not known when the next
// step is planned. So while drafts save more than overlapping does, steps wait for one another.
#include <algorithm>

#include "engine/step_loop.h"

namespace kvasir::engine {
namespace {

constexpr double kNewest = 0.125, kForgotten = 1.0 / 32;  // weights in moving averages

}  // namespace

void StepLoop::propose_drafts() {
  drafting_ = false;
  if (options_.max_draft == 0 || options_.max_step_ms == 0 || results_.empty()) return;
  double saved = 0;
  drafts_.clear();
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
  for (Draft& d : drafts_) propose(d);
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
  Draft best{draw.owner->seq, &job, &choice, DraftSource::lookup, {}, {}};
  weigh_lookup(tokens, by, best);
  if (choice.grammar) weigh_grammar(by, best);
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

void StepLoop::propose(Draft& d) {
  std::vector<int32_t> tokens =
      d.source == DraftSource::grammar ? std::move(d.tokens) : d.choice->drafts.lookup->draft(d.worth.tokens);
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
