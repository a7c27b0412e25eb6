// Who computes drafts: a smaller model (draft_model.h), or a head on the model's own hidden states (draft_head.h). The
// step thread's.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/status.h"
#include "model/runner.h"
#include "scheduler/plan.h"

namespace kvasir::engine {

class Drafter {
 public:
  virtual ~Drafter() = default;

  struct Want {
    scheduler::SeqId seq = 0;
    std::span<const int32_t> tokens;  // all that are known of the sequence
    int count = 0;
    std::vector<int32_t> draft;  // out: at most so many; none while it still prefills what it lacks, or cannot
  };
  // What it lacks of them is prefilled in about so many seconds, at least a page. A failure is the drafter's: it is not
  // to be asked again.
  virtual Status draft(std::span<Want> wants, double seconds) = 0;
  virtual void forget(scheduler::SeqId seq) = 0;
  virtual void forget_ended() {}  // what it has of sequences that are no more, for others that begin alike

  // Where a step of the model is to leave the states of so many rows (Batch::kept_at); none: nobody reads them. Not
  // where no places are left: what then lacks is gone without. Given back once the step was seen.
  virtual void lend_places(int64_t /*rows*/, std::vector<int32_t>& out) { out.clear(); }
  virtual void give_back_places(std::span<const int32_t>) {}
  // Rows that a step has computed of a sequence, from position `begin`; those that a draft was wrong about are passed
  // over. Places that it keeps are -1 then.
  struct Seen {
    scheduler::SeqId seq = 0;
    std::span<const int32_t> tokens;  // Want's
    int64_t begin = 0;
    std::span<int32_t> places;
  };
  virtual void see(const Seen&) {}
  // What was seen of many rows (prompts) is taken up, or most of it is let go where drafts do not pay.
  virtual Status catch_up(bool /*pays*/) { return {}; }

  // Whether a sequence may be drafted for at all.
  virtual bool takes(scheduler::SeqId seq, std::span<const int32_t> tokens) const = 0;
  virtual int64_t lacks(scheduler::SeqId seq, std::span<const int32_t> tokens) const = 0;  // beside the last token
  // Microseconds: of one more token of a draft at this length, where so many sequences are drafted for together; and of
  // prefilling so many tokens.
  virtual double token_us(int64_t context, double sequences) const = 0;
  virtual double prefill_us(int64_t begin, int64_t count) const = 0;

  virtual const model::ModelInfo& info() const = 0;
  virtual int64_t pages() const = 0;
  virtual int64_t free_pages() const = 0;
  virtual double seconds() const = 0;  // that it has taken so far
};

}  // namespace kvasir::engine
