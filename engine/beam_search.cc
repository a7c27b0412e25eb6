#include "engine/beam_search.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace kvasir::engine {

BeamSearch::BeamSearch(const BeamOptions& options, std::vector<int32_t> stops, int64_t max_new, int32_t shown_logprobs)
    : options_(options),
      stops_(std::move(stops)),
      max_new_(max_new),
      shown_logprobs_(shown_logprobs),
      candidates_(options.candidates(stops_.size())),
      beams_(size_t(options.width)),
      next_(size_t(options.width)) {}

double BeamSearch::scored(double sum, int64_t length) const {
  return sum / std::pow(double(length), double(options_.length_penalty));
}

int32_t BeamSearch::add_node(const Candidate& c, std::span<const std::span<const model::TokenLogprob>> rows) {
  Node node{{c.token->token, c.token->logprob, {}}, beams_[size_t(c.beam)].node};
  const auto row = rows[size_t(c.beam)];
  if (shown_logprobs_ > 0)
    node.out.top.assign(row.begin(), row.begin() + std::min<ptrdiff_t>(shown_logprobs_, std::ssize(row)));
  nodes_.push_back(std::move(node));
  return int32_t(nodes_.size() - 1);
}

void BeamSearch::advance(std::span<const std::span<const model::TokenLogprob>> rows) {
  KVASIR_CHECK(!done_ && std::ssize(rows) == (length_ == 0 ? 1 : options_.width), rows.size(), " rows of ",
               options_.width, " beams");
  std::vector<Candidate> all;
  for (size_t b = 0; b < rows.size(); ++b)
    for (const model::TokenLogprob& t : rows[b]) all.push_back({beams_[b].sum + t.logprob, int32_t(b), &t});
  const size_t most = std::min(all.size(), size_t(candidates_));
  // Equals in the order of beams, then of the rows.
  std::stable_sort(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) { return a.sum > b.sum; });
  all.resize(most);

  ++length_;
  std::vector<Candidate> going;
  for (size_t i = 0; i < all.size(); ++i) {
    const bool stops = std::binary_search(stops_.begin(), stops_.end(), all[i].token->token);
    if (!stops && length_ < max_new_) {
      if (std::ssize(going) < options_.width) going.push_back(all[i]);
    } else if (i < size_t(options_.width)) {  // one that ends is an answer only where it would have gone on
      ended_.push_back({scored(all[i].sum, length_), add_node(all[i], rows), stops});
    }
  }
  std::stable_sort(ended_.begin(), ended_.end(), [](const Ended& a, const Ended& b) { return a.score > b.score; });
  if (std::ssize(ended_) > options_.width) ended_.resize(size_t(options_.width));
  if (length_ == max_new_) {
    done_ = true;
    return;
  }
  KVASIR_CHECK(std::ssize(going) == options_.width, going.size(), " beams of ", options_.width, " go on");
  using Early = BeamOptions::Early;
  if (std::ssize(ended_) == options_.width) {
    const int64_t length = options_.early == Early::never && options_.length_penalty > 0 ? max_new_ : length_;
    done_ = options_.early == Early::yes || scored(going[0].sum, length) <= ended_.back().score;
  }
  if (!done_) place(going, rows);
}

// The first child of a beam goes on in its place, and leaves its pages where they are.
void BeamSearch::place(std::vector<Candidate>& going, std::span<const std::span<const model::TokenLogprob>> rows) {
  std::vector<const Candidate*> by_place(size_t(options_.width), nullptr);
  std::vector<const Candidate*> others;
  for (const Candidate& c : going) {
    auto& place = by_place[size_t(c.beam)];
    if (place)
      others.push_back(&c);
    else
      place = &c;
  }
  std::vector<Beam> beams(by_place.size());
  for (size_t b = 0; b < by_place.size(); ++b) {
    if (!by_place[b]) by_place[b] = others.back(), others.pop_back();
    next_[b] = {by_place[b]->token->token, by_place[b]->beam};
    beams[b] = {by_place[b]->sum, add_node(*by_place[b], rows)};
  }
  beams_ = std::move(beams);
}

std::vector<BeamSearch::Answer> BeamSearch::best(int32_t n) const {
  std::vector<Answer> out;
  for (const Ended& e : ended_) {
    if (std::ssize(out) == n) break;
    Answer& a = out.emplace_back();
    a.score = float(e.score), a.stopped = e.stopped;
    for (int32_t i = e.node; i >= 0; i = nodes_[size_t(i)].before) a.tokens.push_back(nodes_[size_t(i)].out);
    std::reverse(a.tokens.begin(), a.tokens.end());
  }
  return out;
}

}  // namespace kvasir::engine
