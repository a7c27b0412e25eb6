#include "engine/grammar_worker.h"

#include <sys/resource.h>

#include <algorithm>
#include <system_error>

#include "core/cat.h"
#include "core/host.h"
#include "engine/mailbox.h"
#include "engine/thought_budget.h"
#include "model/text/stoppable.h"

namespace kvasir::engine {
namespace {

// Two at least, whatever the machine: of compilations, so that one tenant's do not keep all others waiting; of masks,
// because one is known to be slow only when it has been computed once.
constexpr int kFewestThreads = 2, kMostThreads = 4;
constexpr int kSlowMaskThreads = 2;
constexpr int kNice = 10;

int some_threads() { return std::clamp(host_limits().cpus, kFewestThreads, kMostThreads); }
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

Status GrammarWorker::Lane::post(const std::string& tenant, Task task) {
  std::lock_guard lock(mutex_);
  try {
    while (int(threads_.size()) < kind_.threads) threads_.emplace_back([this] { run(); });
  } catch (const std::system_error& e) {  // fewer do it, and the next post tries again
    if (threads_.empty())
      return resource_exhausted(cat("no thread can be had for the grammar: ", e.what(), "; try again"));
  }
  tenants_[tenant].tasks.push_back(std::move(task));
  more_.notify_one();
  return {};
}

GrammarWorker::Lane::Tenants::iterator GrammarWorker::Lane::next() {
  auto turn = tenants_.upper_bound(last_);
  for (size_t i = 0; i < tenants_.size(); ++i, ++turn) {
    if (turn == tenants_.end()) turn = tenants_.begin();
    if (!turn->second.tasks.empty() && turn->second.running < kind_.most_a_tenant) return turn;
  }
  return tenants_.end();
}

void GrammarWorker::Lane::run() {
  if (kind_.in_background) (void)setpriority(PRIO_PROCESS, 0, kNice);  // of this thread, and of those it starts
  std::unique_lock lock(mutex_);
  for (;;) {
    auto turn = tenants_.end();
    more_.wait(lock, [&] { return (turn = next()) != tenants_.end() || (stop_ && tenants_.empty()); });
    if (turn == tenants_.end()) return;
    Tenant& tenant = turn->second;  // stays where it is
    last_ = turn->first;
    Task task = std::move(tenant.tasks.front());
    tenant.tasks.pop_front();
    ++tenant.running;
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
    if (--tenant.running == 0 && tenant.tasks.empty()) tenants_.erase(turn);
    if (stop_ || kind_.most_a_tenant < kind_.threads) more_.notify_all();
  }
}

GrammarWorker::GrammarWorker(MakeCompiler make_compiler, text::TokenizerPtr tokenizer, int32_t vocab_size)
    : make_compiler_(std::move(make_compiler)),
      tokenizer_(std::move(tokenizer)),
      vocab_size_(vocab_size),
      compiling_({some_threads(), 1, true}),
      masking_({some_threads(), kMostThreads, false}),
      slowly_({kSlowMaskThreads, kSlowMaskThreads, true}) {}

GrammarWorker::~GrammarWorker() = default;

void GrammarWorker::compile(JobPtr job, std::function<void(JobPtr, Status)> ready) {
  const std::string& tenant = job->request.tenant;
  Status posted = compiling_.post(tenant, [this, job, ready]() mutable {
    const auto over = [this, &job = *job] { return ended_ || job.cancel_requested || now_past(job.request.deadline); };
    Status status = over() ? Status() : first_masks(*job, over);
    if (status.code() == Code::cancelled) status = {};  // the engine says what ended it
    ready(std::move(job), std::move(status));
  });
  if (!posted.ok()) ready(std::move(job), std::move(posted));
}

Result<std::shared_ptr<text::GrammarCompiler>> GrammarWorker::compiler() {
  std::lock_guard lock(compiler_mutex_);
  if (!compiler_) {
    KVASIR_ASSIGN(compiler_, make_compiler_());
  }
  return compiler_;
}

Result<std::unique_ptr<text::Matcher>> GrammarWorker::matcher(const Request& request,
                                                              const std::function<bool()>& over) {
  std::unique_ptr<text::Matcher> grammar;
  if (request.grammar.kind != text::GrammarSpec::Kind::none) {
    KVASIR_ASSIGN(auto compiler, this->compiler());
    auto* stoppable = dynamic_cast<text::StoppableCompiler*>(compiler.get());
    KVASIR_ASSIGN(grammar,
                  stoppable ? stoppable->compile_unless(over, request.grammar) : compiler->compile(request.grammar));
  }
  if (!request.thoughts) return grammar;
  return std::unique_ptr<text::Matcher>(
      std::make_unique<ThoughtBudget>(tokenizer_, *request.thoughts, std::move(grammar)));
}

Status GrammarWorker::first_masks(Job& job, const std::function<bool()>& over) {
  KVASIR_ASSIGN(auto matcher, this->matcher(job.request, over));
  for (size_t i = 1; i < job.choices.size(); ++i) {
    auto copy = matcher->clone();
    if (copy == nullptr)
      return resource_exhausted(cat("no memory is left for the grammar of ", job.choices.size(), " answers"));
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
  const auto done = [this, job, &grammar, step](Status status) {
    if (!status.ok()) job->fail_mask(std::move(status));
    grammar.computed();
    job->touch();
    std::lock_guard lock(step_mutex_);
    if (step == step_ && --left_ == 0) step_complete_.notify_one();
  };
  Status posted = (slow ? slowly_ : masking_).post(tenant, [done, &grammar] { done(grammar.compute()); });
  if (!posted.ok()) done(std::move(posted));
}

}  // namespace kvasir::engine
