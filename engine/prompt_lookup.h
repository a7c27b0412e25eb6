// Drafts for speculative decoding without a second model (prompt lookup, n-gram speculation): where the last three
// tokens of a sequence stood before, in its prompt or its answer, it may go on as it did there. Summaries, edits and
// code do; a step then verifies several tokens at once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvasir::engine {

class PromptLookup {
 public:
  // `prediction`: what the client expects the answer to be; drafts begin with it.
  PromptLookup(std::span<const int32_t> prediction, std::span<const int32_t> prompt);

  // The next tokens of the answer.
  void add(std::span<const int32_t> tokens);

  // How many tokens are worth drafting, and the time that they save on average: each is right as often as the last ones
  // were, if all before it are. `gain` is the time that a right one saves, `price` the time that verifying any one
  // takes.
  struct Worth {
    int tokens = 0;
    double saves = 0;
  };
  Worth draft_length(int most, double gain, double price) const;
  // So many tokens; none where no likeness is known.
  std::vector<int32_t> draft(int count) const;

  size_t answer_tokens() const { return answer_; }

 private:
  void take(int32_t token);
  void look();
  void index_all();
  size_t slot(size_t end) const;  // of the three tokens before `end`

  std::vector<int32_t> text_;  // prediction, prompt, answer
  std::vector<int32_t>
      after_;            // a hash table: of three tokens, where what follows their last occurrence stands; -1: empty
  int64_t source_ = -1;  // of text_: where the next token is copied from; -1: nowhere
  size_t answer_ = 0;    // tokens of it
  double right_ = 0.5;   // share of copied tokens that were right, a moving average
};

}  // namespace kvasir::engine
