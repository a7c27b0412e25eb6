// From sampled tokens to what clients read, on a thread of its own: detokenizing, stop strings, events,
// latencies. The step thread hands over one batch of records a step, and never waits for a reader.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/histogram.h"
#include "engine/job.h"
#include "engine/step_trace.h"

namespace kvasir::engine {

struct Publication {
  enum class Kind : uint8_t { started, token, answer, finished, cancelled, failed };
  Kind kind = Kind::token;
  bool stop_token = false;  // token: it ends the choice and is shown only when asked for
  int32_t choice = 0;
  FinishReason reason = FinishReason::length;  // finished
  JobPtr job;
  TokenOut token;
  BeamSearch::Answer answer;  // a whole one, of a search; stop_token says that its last token ended it
  bool last = false;          // token: the choice's finished comes next
};

// What the publisher counts.
struct Published {
  int64_t finished = 0, failed = 0, cancelled = 0, output_tokens = 0;
  std::map<std::string, int64_t> errors;  // by code name
  Histogram first_token = time_histogram(), between_tokens = time_histogram(), whole = time_histogram();
  Histogram prefill = time_histogram(), decode = time_histogram();
  Histogram prompt_tokens = size_histogram(), output_length = size_histogram();
  Histogram preempted = times_histogram();
  int64_t longest = 0;  // tokens of a sequence that has ended
};

class Publisher {
 public:
  // `closed` is told of each request before its last event can be read, on the publisher's thread.
  using Closed = std::function<void(const Job&)>;
  Publisher(std::string trace_file, Closed closed);
  ~Publisher();  // publishes what it has been given, then ends

  // Before the first post. `own_texts`: an answer does not go on from its prompt.
  void set_tokenizer(text::TokenizerPtr tokenizer, bool own_texts) {
    tokenizer_ = std::move(tokenizer), own_texts_ = own_texts;
  }

  // Takes the records. Waits only when this thread is far behind (never for a reader).
  void post(std::vector<Publication>&& records, std::optional<StepSample> step = std::nullopt);
  const Status& trace_status() const { return trace_.status(); }
  Published counts() const;
  void wait_empty();

 private:
  struct Batch {
    std::vector<Publication> records;
    std::optional<StepSample> step;
  };
  void run();
  void publish(Publication& record, Time now);
  void start(Job& job);
  void answer(Job& job, Publication& record, Time now);
  void token(Job& job, Publication& record, Time now);
  void finish(Job& job, int32_t choice, Finished event, Time now);
  void close(Job& job, Time now);
  void push(Job& job, Event event);

  const Closed closed_;
  text::TokenizerPtr tokenizer_;
  bool own_texts_ = false;
  StepTrace trace_;
  mutable std::mutex mutex_;
  std::condition_variable more_, less_;
  std::deque<Batch> queue_;
  bool busy_ = false, stop_ = false;
  mutable std::mutex counts_mutex_;
  Published counts_;
  std::vector<JobPtr> touched_;  // jobs with events since the last announcement
  std::thread thread_;
};

}  // namespace kvasir::engine
