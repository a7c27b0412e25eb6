// What steps take on this machine, learned from those that ran: the cost it starts from says how a step's time is made
// up, and each measured step corrects the parts that had a share in it. Plain arithmetic on the times the scheduler is
// told, so that a recording replays to the same plans on any machine.
#pragma once

#include <array>

#include "scheduler/cost_model.h"

namespace kvasir::scheduler {

class LearnedCost {
 public:
  explicit LearnedCost(const StepCost& first_guess);
  void learn(const StepTime& measured);
  const StepCost& cost() const { return cost_; }
  StepCost least() const;  // what is sure: each part as low as the doubt about it leaves it

 private:
  static constexpr int kParts = 6;
  using Parts = std::array<double StepCost::*, kParts>;
  static const Parts kMembers;

  StepCost cost_;
  std::array<double, kParts> doubt_;  // of each part: the variance of its relative error
};

}  // namespace kvasir::scheduler
