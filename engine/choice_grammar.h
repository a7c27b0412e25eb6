// The grammar of one choice: follows the tokens drawn, and knows what may come next when that is asked for. Most draws
// are what the grammar wants anyway, and cost it a few microseconds; a mask costs some hundred, so that one is computed
// only where a draw was refused, on the worker's threads.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "core/clock.h"
#include "model/sampling.h"
#include "model/text/text.h"

namespace kvasir::engine {

class GrammarWorker;
struct Job;

// Belongs to the worker while a mask is pending, else to the thread that draws for the choice, or the step thread.
class ChoiceGrammar final : public model::Constraint {
 public:
  ChoiceGrammar(Job& job, GrammarWorker& worker, std::unique_ptr<text::Matcher> matcher)
      : job_(job), worker_(worker), matcher_(std::move(matcher)) {}

  bool take(int32_t token, bool masked) override;
  const uint32_t* mask() override;

  // Begins computing the next mask. `slow`: it may take longer than a step, and nobody waits for it.
  void ask(bool slow);
  bool pending() const { return state_ == State::pending; }
  bool came();                                                                // true once for a mask that was pending
  bool is_computed() const { return done_.load(std::memory_order_acquire); }  // a pending mask, before it came()
  Duration mask_took() const { return took_; }
  // What must come next, cut into tokens as the model most likely would. Empty where there is a choice, or this grammar
  // takes long for whatever it is asked. Step thread.
  std::vector<int32_t> forced();
  // Whatever comes from here on is allowed. Step thread.
  bool indifferent() const { return !pending() && matcher_->indifferent(); }

  // Worker.
  Status compute();
  void computed() { done_.store(true, std::memory_order_release); }
  // At the beginning, before anything is drawn.
  Status compute_first();

 private:
  enum class State : uint8_t { unknown, pending, there };
  Job& job_;
  GrammarWorker& worker_;
  const std::unique_ptr<text::Matcher> matcher_;
  std::vector<uint32_t> mask_;
  Duration took_{};            // computing the last one
  bool tells_quickly_ = true;  // what must come next
  State state_ = State::unknown;
  std::atomic<bool> done_{false};
  int64_t taken_ = 0;
};

// Clears the bits of `stops`, unless nothing else is left: a grammar that is over may end.
// Whether it cleared them.
bool forbid_stops(std::vector<uint32_t>& mask, const std::vector<int32_t>& stops);

}  // namespace kvasir::engine
