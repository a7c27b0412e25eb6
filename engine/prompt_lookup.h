// Drafts for speculative decoding without a second model (prompt lookup, n-gram speculation): where the last three
// tokens of a sequence stood before, in its prompt or its answer, it may go on as it did there. Summaries, edits and
// code do; a step then verifies several tokens at once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvasir::engine {

// How many tokens of a draft are worth verifying, and the time that they save on average: each is right as often as the
// last ones were, if all before it are. `gain` is the time that a right one saves, `price` the time that any one takes.
struct DraftWorth {
  int tokens = 0;
  double saves = 0;
};
DraftWorth draft_worth(double right, int most, double gain, double price);

class PromptLookup {
 public:
  // `prediction`: what the client expects the answer to be; drafts begin with it.
  PromptLookup(std::span<const int32_t> prediction, std::span<const int32_t> prompt);

  // The next tokens of the answer.
  void add(std::span<const int32_t> tokens);

  DraftWorth draft_length(int most, double gain, double price) const;
  // So many tokens; none where no likeness is known.
  std::vector<int32_t> draft(int count) const;

  bool predicted() const { return source_ >= 0 && size_t(source_) < predicted_; }  // the draft is the client's

  size_t answer_tokens() const { return answer_; }

 private:
  void take(int32_t token);
  void look();
  void index_all();
  size_t slot(size_t end) const;  // of the three tokens before `end`

  std::vector<int32_t> text_;  // prediction, prompt, answer
  std::vector<int32_t>
      after_;               // a hash table: of three tokens, where what follows their last occurrence stands; -1: empty
  int64_t source_ = -1;     // of text_: where the next token is copied from; -1: nowhere
  const size_t predicted_;  // tokens of the prediction
  size_t answer_ = 0;       // of the answer
  double right_ = 0.5;      // share of copied tokens that were right, a moving average
};

}  // namespace kvasir::engine
