#include "engine/grammar_worker.h"

#include <algorithm>

#include "core/host.h"
#include "engine/mailbox.h"

namespace kvasir::engine {
namespace {

// A step that waits for masks leaves its own threads idle. Two at least, whatever the machine: a mask is known to be
// slow only when it has been computed once, and until then it must not keep all others waiting.
constexpr int kFewestMaskThreads = 2, kMostMaskThreads = 4;
constexpr int kSlowMaskThreads = 2;

bool now_past(const std::optional<Time>& deadline) { return deadline && *deadline <= std::chrono::steady_clock::now(); }

}  // namespace

GrammarWorker::Lane::~Lane() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    more_.notify_all();
  }
  for (std::thread& t : threads_) t.join();
}

void GrammarWorker::Lane::post(const std::string& tenant, Task task) {
  std::lock_guard lock(mutex_);
  tasks_[tenant].push_back(std::move(task));
  while (int(threads_.size()) < wanted_) threads_.emplace_back([this] { run(); });
  more_.notify_one();
}

GrammarWorker::Lane::Task GrammarWorker::Lane::next() {
  auto turn = tasks_.upper_bound(last_);
  if (turn == tasks_.end()) turn = tasks_.begin();
  last_ = turn->first;
  Task task = std::move(turn->second.front());
  turn->second.pop_front();
  if (turn->second.empty()) tasks_.erase(turn);
  return task;
}

void GrammarWorker::Lane::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    more_.wait(lock, [&] { return stop_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    Task task = next();
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
  }
}

GrammarWorker::GrammarWorker(MakeCompiler make_compiler, int32_t vocab_size)
    : make_compiler_(std::move(make_compiler)),
      vocab_size_(vocab_size),
      compiling_(1),
      masking_(std::clamp(host_limits().cpus, kFewestMaskThreads, kMostMaskThreads)),
      slowly_(kSlowMaskThreads) {}

GrammarWorker::~GrammarWorker() = default;

void GrammarWorker::compile(JobPtr job, std::function<void(JobPtr, Status)> ready) {
  const std::string& tenant = job->request.tenant;
  compiling_.post(tenant, [this, job, ready = std::move(ready)]() mutable {
    const bool over = ended_ || job->cancel_requested || now_past(job->request.deadline);
    Status status = over ? Status() : first_masks(*job);
    ready(std::move(job), std::move(status));
  });
}

Status GrammarWorker::first_masks(Job& job) {
  if (!compiler_) {
    KVASIR_ASSIGN(compiler_, make_compiler_());
  }
  KVASIR_ASSIGN(auto matcher, compiler_->compile(job.request.grammar));
  for (size_t i = 1; i < job.choices.size(); ++i) {
    auto copy = matcher->clone();
    if (copy == nullptr) return internal_error("a compiled grammar could not be copied");
    job.choices[i].grammar = std::make_unique<ChoiceGrammar>(job, *this, std::move(copy));
  }
  job.choices[0].grammar = std::make_unique<ChoiceGrammar>(job, *this, std::move(matcher));
  for (Choice& choice : job.choices) KVASIR_TRY(choice.grammar->compute_first());
  return {};
}

void GrammarWorker::begin_step() {
  std::lock_guard lock(step_mutex_);
  ++step_;
  left_ = 0;
}

void GrammarWorker::wait(Time until) {
  std::unique_lock lock(step_mutex_);
  step_complete_.wait_until(lock, until, [&] { return left_ == 0; });
}

void GrammarWorker::compute(JobPtr job, ChoiceGrammar& grammar, bool slow) {
  uint64_t step = 0;
  if (!slow) {
    std::lock_guard lock(step_mutex_);
    step = step_;
    ++left_;
  }
  const std::string& tenant = job->request.tenant;
  (slow ? slowly_ : masking_).post(tenant, [this, job, &grammar, step] {
    if (Status status = grammar.compute(); !status.ok()) job->fail_mask(std::move(status));
    grammar.computed();
    job->touch();
    std::lock_guard lock(step_mutex_);
    if (step == step_ && --left_ == 0) step_complete_.notify_one();
  });
}

}  // namespace kvasir::engine
