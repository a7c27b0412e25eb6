// Grammars off the step thread: compiling on one thread (it may take long, within the compiler's
// limits), masks on a few others, so that a heavy schema never holds up somebody else's next token.
// No thread, nor the compiler (some 100 ms and a trie of the vocabulary), exists until the first request
// with a grammar.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/job.h"

namespace kvasir::engine {

class GrammarWorker {
 public:
  GrammarWorker(text::TokenizerPtr tokenizer, int32_t vocab_size);
  ~GrammarWorker();

  // Compiles the request's grammar and its first masks, then calls `ready`, whose status says how it went.
  void compile(JobPtr job, std::function<void(JobPtr, Status)> ready);
  // The next mask of a choice: consumes `token`, then computes. The job is touched when it is done.
  void advance(JobPtr job, int32_t choice, int32_t token, int64_t tokens_so_far);

 private:
  class Lane {  // threads and what they have to do, first come first served
   public:
    explicit Lane(int threads) : wanted_(threads) {}
    ~Lane();
    void post(std::function<void()> task);

   private:
    void run();
    std::mutex mutex_;
    std::condition_variable more_;
    std::deque<std::function<void()>> tasks_;
    bool stop_ = false;
    const int wanted_;
    std::vector<std::thread> threads_;
  };
  Status first_masks(Job& job);
  Status fill(Job& job, Choice& choice, int64_t tokens_so_far) const;

  const text::TokenizerPtr tokenizer_;
  std::shared_ptr<text::GrammarCompiler> compiler_;  // the compiling thread's
  const int32_t vocab_size_;
  std::atomic<int64_t> masks_left_{0};
  Lane compiling_, masking_;
};

// Clears the bits of `stops`, unless nothing else is left: a grammar that is over may end.
void forbid_stops(std::vector<uint32_t>& mask, const std::vector<int32_t>& stops);

}  // namespace kvasir::engine
