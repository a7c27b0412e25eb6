// Writes down every call that changes a Scheduler, and a digest of every plan it makes, one JSON object a line;
// recording.h reads that back. Token ids are not written: each is replaced by a keyed hash of itself and all
// tokens before it, under a key that is never written. Equal prefixes stay equal, which is all that scheduling
// looks at, and nothing of a text can be told from a recording but how long it is and with whom it begins alike.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "scheduler/scheduler.h"

namespace kvasir::scheduler {

// Everything a step does, in one number: items, the pages they write and those a prefill reads, copies, moves.
uint64_t plan_digest(const StepPlan& plan, int32_t page_size);

class Recorder {
 public:
  // `sink` is given whole lines, about `chunk` bytes at a time and what is left by flush().
  using Sink = std::function<void(std::string lines)>;
  // `about`: what runs here, for the reader of the recording.
  Recorder(Sink sink, uint64_t key, std::string about = "", size_t chunk = 64 << 10)
      : sink_(std::move(sink)), key_(key), about_(std::move(about)), chunk_(chunk) {}
  ~Recorder() { flush(); }
  Recorder(const Recorder&) = delete;

  void begin(const Settings& options);
  // Two halves of a line: what was asked before it is moved away, and what became of it.
  void submit(const Submission& s, Time now);
  void submitted(const Result<SeqId>& first, int32_t n);
  void request_call(const char* name, RequestId id);  // cancel, pause, resume
  void mask_ready(SeqId seq);
  void stop_at(SeqId seq, int64_t output_tokens);
  void propose(SeqId seq, std::span<const int32_t> draft);
  void flush_prefix_cache();
  void step(Time now, const StepPlan& plan, int32_t page_size);
  void advance(std::span<const SeqResult> results, Time now);
  void forget(SeqId first, int32_t n);  // of a request that is over
  void flush();

 private:
  struct Choice {
    uint64_t chain = 0;  // of all its tokens
    SeqId first = 0;     // choice 0 of its request
  };
  uint64_t chain(uint64_t before, int32_t token) const;
  void put_token(uint64_t chain);
  void end_line();

  Sink sink_;
  const uint64_t key_;
  const std::string about_;
  const size_t chunk_;
  std::string lines_;
  uint64_t prompt_ = 0;  // the chain of the prompt being submitted
  std::unordered_map<SeqId, Choice> choices_;
  std::vector<std::pair<Choice*, uint64_t>> after_;  // scratch of one advance
};

}  // namespace kvasir::scheduler
