// Which beams of a search go on, and which answers it has so far. Scores, penalties and the ways to stop early are
// those of transformers' generate(), so that both find the same sequences.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/request.h"
#include "model/sampling.h"

namespace kvasir::engine {

class BeamSearch {
 public:
  struct Next {  // of one beam: the token it goes on with, and the beam whose tokens stand before it
    int32_t token = 0, parent = 0;
  };
  struct Answer {
    std::vector<TokenOut> tokens;
    float score = 0;       // the sum of its log-probabilities over length^length_penalty
    bool stopped = false;  // by its last token; otherwise by length
  };

  // `stops`: ascending. `max_new`: at least 1.
  BeamSearch(const BeamOptions& options, std::vector<int32_t> stops, int64_t max_new, int32_t shown_logprobs);

  // Of each row's likeliest tokens so many are needed.
  int32_t candidates() const { return candidates_; }
  int32_t width() const { return options_.width; }

  // `rows`: each beam's likeliest next tokens, best first; the first time one beam's, for all of them.
  void advance(std::span<const std::span<const model::TokenLogprob>> rows);
  bool begun() const { return length_ > 0; }
  bool done() const { return done_; }
  std::span<const Next> next() const { return next_; }  // by beam; a beam keeps its place where it can
  std::vector<Answer> best(int32_t n) const;

 private:
  struct Node {
    TokenOut out;
    int32_t before = -1;
  };
  struct Beam {
    double sum = 0;
    int32_t node = -1;
  };
  struct Ended {
    double score = 0;
    int32_t node = -1;
    bool stopped = false;
  };
  struct Candidate {
    double sum = 0;
    int32_t beam = 0;
    const model::TokenLogprob* token = nullptr;
  };
  int32_t add_node(const Candidate& c, std::span<const std::span<const model::TokenLogprob>> rows);
  void place(std::vector<Candidate>& going, std::span<const std::span<const model::TokenLogprob>> rows);
  double scored(double sum, int64_t length) const;

  const BeamOptions options_;
  const std::vector<int32_t> stops_;
  const int64_t max_new_;
  const int32_t shown_logprobs_, candidates_;
  int64_t length_ = 0;  // of the running
  bool done_ = false;
  std::vector<Node> nodes_;
  std::vector<Beam> beams_;
  std::vector<Ended> ended_;  // best first
  std::vector<Next> next_;
};

}  // namespace kvasir::engine
