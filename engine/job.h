// A request inside the engine. Each part says which thread it belongs to; what crosses threads is
// atomic or goes through the channel.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "engine/adapters.h"
#include "engine/beam_search.h"
#include "engine/channel.h"
#include "engine/choice_grammar.h"
#include "engine/drafts.h"
#include "engine/request.h"
#include "scheduler/plan.h"

namespace kvasir::engine {

class Mailbox;

// One of a request's n answers.
struct Choice {
  std::unique_ptr<ChoiceGrammar> grammar;
  ChoiceDrafts drafts;               // step thread
  std::atomic<int64_t> stop_at{-1};  // publisher: the text ended after this many tokens
  bool stop_told = false;            // step thread: the scheduler knows
  int32_t stop_token = -1;           // step thread: the token that ended it
  bool ended = false;                // step thread
};

// The publisher's view of a choice.
struct ChoiceText {
  std::optional<text::Detokenizer> detokenizer;
  int64_t tokens = 0;
  Time last_token{};
  bool finished = false;
};

struct Job : std::enable_shared_from_this<Job> {
  Job(Request r, std::shared_ptr<Mailbox> box, int64_t event_limit)
      : request(std::move(r)),
        mailbox(std::move(box)),
        channel(event_limit),
        choices(size_t(request.beams ? request.beams->width : request.n)),
        texts(size_t(request.n)) {}

  const Request request;
  const std::shared_ptr<Mailbox> mailbox;
  LoadedAdapterPtr adapter;  // what request.adapter names, whatever the name is given to meanwhile; or null
  uint64_t number = 0;       // the scheduler's name for it
  Time arrived{};
  Channel channel;

  // Any thread: raise a flag, then touch(), and the step thread looks.
  std::atomic<bool> cancel_requested{false};
  std::atomic<bool> touched{false};
  std::atomic<int64_t> drafted{0}, accepted{0};  // tokens of drafts
  std::atomic<int64_t> preempted{0};             // of all its choices
  std::atomic<bool> mask_failing{false}, mask_failed{false};
  Status mask_status;     // written between the two
  Duration mask_wait{0};  // others waited for its masks, in all; step thread
  void touch();
  void fail_mask(Status why);  // the first to say so is heard

  // Step thread.
  std::vector<Choice> choices;
  scheduler::SeqId first_seq = 0;
  std::atomic<bool> left_queue{false};  // read by others
  bool submitted = false, admitted = false, started = false, paused = false, ended = false;
  Time paused_since{};
  Status failure;                      // why the engine ended it; set before the record that says so
  model::SamplingParams score_params;  // prompt log-probabilities
  std::vector<TokenOut> prompt_logprobs;
  int32_t scored = 0;  // prompt positions whose log-probability is known
  int64_t cached_tokens = 0;
  std::vector<uint32_t> allowed_mask;     // allowed_tokens; empty: all
  std::vector<uint32_t> min_tokens_mask;  // of those, everything but what would stop it
  std::vector<int32_t> stop_set;          // ascending
  std::optional<BeamSearch> beams;
  model::SamplingParams beam_params;  // what each beam's row is to give
  int32_t beams_ended = 0;
  std::vector<float> pooled;  // sums of hidden states, or the log-probabilities asked for; the runner adds to it
  int64_t pooled_to = 0;      // positions before this are in it, or on their way
  int64_t pooled_rows = 0;

  // Publisher.
  std::vector<ChoiceText> texts;
  Time started_at{}, first_at{};
  int64_t completion_tokens = 0;
  int32_t open_choices = 0;
  bool closed = false;
};

using JobPtr = std::shared_ptr<Job>;

inline void Job::fail_mask(Status why) {
  if (mask_failing.exchange(true)) return;
  mask_status = std::move(why);
  mask_failed.store(true, std::memory_order_release);
}

}  // namespace kvasir::engine
