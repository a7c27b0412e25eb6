// Grammars off the step thread: compiling on a few threads, one grammar a tenant at a time (it may take a second,
// within the compiler's limits, and ends early when the request does), masks on a few others, and those that are known
// to be slow on others again, so that a heavy schema never holds up somebody else's next token. No thread, nor the
// compiler (some 100 ms and a trie of the vocabulary), exists until the first request with a grammar.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/job.h"

namespace kvasir::engine {

class GrammarWorker {
 public:
  using MakeCompiler = std::function<Result<std::shared_ptr<text::GrammarCompiler>>()>;
  GrammarWorker(MakeCompiler make_compiler, text::TokenizerPtr tokenizer, int32_t vocab_size);
  ~GrammarWorker();

  // Compiles the request's grammar and its first masks, then calls `ready`, whose status says how it went. One that is
  // over before its turn comes is not compiled.
  void compile(JobPtr job, std::function<void(JobPtr, Status)> ready);
  void end() { ended_ = true; }  // the turn of all that still wait does not come
  // Masks asked for from here on are another step's: wait() is for these alone.
  void begin_step();
  // The next mask of a choice of the job's, which is touched when it is done.
  void compute(JobPtr job, ChoiceGrammar& grammar, bool slow);
  // Until those of this step that are not slow are there, or until `until`.
  void wait(Time until);
  int32_t vocab_size() const { return vocab_size_; }

 private:
  // Threads and what they have to do: tenants in turn, each first come first served and with at most so many at a time.
  class Lane {
   public:
    using Task = std::function<void()>;
    struct Kind {
      int threads, most_a_tenant;
      bool in_background;  // the processor goes to those who send tokens first
    };
    explicit Lane(Kind kind) : kind_(kind) {}
    ~Lane();
    Status post(const std::string& tenant, Task task);  // not taken: there is not one thread to run it

   private:
    struct Tenant {
      std::deque<Task> tasks;
      int running = 0;
    };
    using Tenants = std::map<std::string, Tenant>;  // those with tasks, waiting or running
    void run();
    Tenants::iterator next();  // end(): nothing may run
    std::mutex mutex_;
    std::condition_variable more_;
    Tenants tenants_;
    std::string last_;  // whose turn it was
    bool stop_ = false;
    const Kind kind_;
    std::vector<std::thread> threads_;
  };
  Result<std::shared_ptr<text::GrammarCompiler>> compiler();
  // Of the request's grammar, if it has one, and of the limit of its thoughts.
  Result<std::unique_ptr<text::Matcher>> matcher(const Request& request, const std::function<bool()>& over);
  Status first_masks(Job& job, const std::function<bool()>& over);

  const MakeCompiler make_compiler_;
  std::mutex compiler_mutex_;
  std::shared_ptr<text::GrammarCompiler> compiler_;  // made by the first who asks
  const text::TokenizerPtr tokenizer_;               // null: requests have no thoughts to count
  const int32_t vocab_size_;
  std::atomic<bool> ended_{false};
  std::mutex step_mutex_;
  std::condition_variable step_complete_;
  uint64_t step_ = 0;  // counts begin_step()
  int64_t left_ = 0;   // of this step's, those that are not slow
  Lane compiling_, masking_, slowly_;
};

}  // namespace kvasir::engine
