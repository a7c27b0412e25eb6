// What a sequence will say next, guessed from what it has read and said: where its last three tokens stood before, it
// may go on as it did there. Summaries, edits and code do; a step then checks several guesses at once (the scheduler's
// verifications), and the answer is the same one, sooner.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvasir::engine {

class PromptLookup {
 public:
  // `prediction`: what somebody expects the answer to be; `prompt`: its tokens are read, and no guesses judged by them.
  PromptLookup(std::span<const int32_t> prediction, std::span<const int32_t> prompt);

  // The next tokens of the answer.
  void add(std::span<const int32_t> tokens);

  // How far it would pay to guess ahead: a guess is right as often as those before it lately were, and one after it
  // only if it is. `gain` is what a right guess saves, `price` what any guess costs.
  int worth(int most, double gain, double price) const;
  // So many guesses, fewer where nothing is expected.
  std::vector<int32_t> guess(int count) const;

  size_t answer_tokens() const { return answer_; }

 private:
  void take(int32_t token);
  void look();
  void index_all();
  size_t slot(size_t end) const;  // of the three tokens before `end`

  std::vector<int32_t> text_;   // prediction, prompt, answer
  std::vector<int32_t> after_;  // by slot: what follows where those three stood last; -1: nowhere
  int64_t source_ = -1;         // of text_: what is expected next; -1: nothing is
  size_t answer_ = 0;           // tokens of it
  double right_ = 0.5;          // of the guesses, lately
};

}  // namespace kvasir::engine
