// One call of next_step: what is being put together lives here and is gone with it. What it decides is left in State:
// who runs, who holds which pages, and the plan in flight. The passes of a call are in plan_step.cc, who comes in for
// the plan in admission.cc, who loses pages to it in preempt.cc.
#pragma once

#include <vector>

#include "scheduler/state.h"

namespace kvasir::scheduler {

class Scheduler::PlanMaker {
 public:
  PlanMaker(State& state, Time now, StepPlan& plan);
  void make();

 private:
  using Flight = State::Flight;

  // plan_step.cc
  void pass();
  void plan_decodes();
  void plan_verifications();
  void plan_prefills();
  bool plan_chunk(Sequence* s);
  int64_t prompt_room(int64_t begin) const;
  int64_t prefill_target(const Sequence& s) const;
  int64_t kept_before(const Sequence& s, int64_t end) const;
  void become_decoding(Sequence* s);
  void fork_choices(Sequence* s);
  void put(Sequence* s, Phase phase, int64_t count, bool samples);

  // admission.cc
  int64_t forks_to_come() const;
  void make_room();  // for one the policy puts before somebody running
  void plan_admissions(const Sequence* before);
  bool admit(Sequence* s, bool urgent);
  bool admit_swapped(Sequence* s, bool urgent);  // its pages come back from the second tier
  bool admit_waiting(Sequence* s, bool urgent);
  // Whether there are pages for it, given what was found cached. A partial page is dropped where its copy has none.
  bool has_room(const Sequence& s, bool urgent, kvcache::Match& m) const;
  bool admit_and_start(Sequence* s, bool urgent);
  bool admit_beams(RequestState& r);
  void start_chunk(Sequence* s, bool ordered);
  int64_t pages_in_window(int64_t window) const;
  void start_running(Sequence* s);

  // preempt.cc
  bool secure(Sequence* s, int64_t tokens);  // pages for [0, tokens), preempting later ones
  bool secure_beams(RequestState& r);
  bool make_writable(Sequence* s, bool urgent);
  Sequence* victim_for(const Sequence* s) const;
  void preempt(Sequence* s);
  void preempt_one(Sequence* s);
  bool cheaper_to_move(const Sequence& s, const kvcache::Lease& lease) const;

  State& state;
  const Settings& options;
  kvcache::KvSpace& kv;
  Policy* const policy;
  std::vector<Sequence*>& running;
  State::Load& load;
  const Time now;
  StepPlan& plan;

  Flight making;
  std::vector<Sequence*> verifications, prefills, to_fork;
  StepTime work;                   // of the plan, so far
  bool somebody_decodes = false;   // max_step_ms holds for it
  double most_seconds = 0;         // that it is to take then
  bool cut = false;                // max_step_ms kept prompts out of it
  const Sequence* lead = nullptr;  // its first prefill
  bool moved = false;              // this pass admitted or preempted somebody
  bool waits_whole = false;        // a prompt that is computed whole has no room beside those that decode
  int64_t budget = 0;              // tokens left
};

}  // namespace kvasir::scheduler
