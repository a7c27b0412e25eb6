#include "engine/grammar_worker.h"

#include <algorithm>

#include "core/host.h"
#include "engine/mailbox.h"

namespace kvasir::engine {
namespace {

// A step waits for its masks, so its own threads are idle then.
constexpr int kMostMaskThreads = 4;

}  // namespace

GrammarWorker::Lane::~Lane() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    more_.notify_all();
  }
  for (std::thread& t : threads_) t.join();
}

void GrammarWorker::Lane::post(std::function<void()> task) {
  std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  while (int(threads_.size()) < wanted_) threads_.emplace_back([this] { run(); });
  more_.notify_one();
}

void GrammarWorker::Lane::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    more_.wait(lock, [&] { return stop_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
  }
}

GrammarWorker::GrammarWorker(text::TokenizerPtr tokenizer, int32_t vocab_size)
    : tokenizer_(std::move(tokenizer)),
      vocab_size_(vocab_size),
      compiling_(1),
      masking_(std::clamp(host_limits().cpus, 1, kMostMaskThreads)) {}

GrammarWorker::~GrammarWorker() = default;

void GrammarWorker::compile(JobPtr job, std::function<void(JobPtr, Status)> ready) {
  compiling_.post([this, job = std::move(job), ready = std::move(ready)]() mutable {
    Status status = job->cancel_requested.load() ? Status() : first_masks(*job);
    ready(std::move(job), std::move(status));
  });
}

Status GrammarWorker::first_masks(Job& job) {
  if (!compiler_) {
    KVASIR_ASSIGN(compiler_, text::GrammarCompiler::create(tokenizer_));
  }
  KVASIR_ASSIGN(auto matcher, compiler_->compile(job.request.grammar));
  for (size_t i = 1; i < job.choices.size(); ++i) job.choices[i].matcher = matcher->clone();
  job.choices[0].matcher = std::move(matcher);
  for (Choice& choice : job.choices) KVASIR_TRY(fill(job, choice, 0));
  return {};
}

Status GrammarWorker::fill(Job& job, Choice& choice, int64_t tokens_so_far) const {
  choice.mask.assign((size_t(vocab_size_) + 31) / 32, 0);
  KVASIR_TRY(choice.matcher->mask(choice.mask));
  if (tokens_so_far < job.request.min_tokens) forbid_stops(choice.mask, job.stop_set);
  return {};
}

void GrammarWorker::advance(JobPtr job, int32_t c, int32_t token, int64_t tokens_so_far) {
  masks_left_.fetch_add(1, std::memory_order_relaxed);
  masking_.post([this, job = std::move(job), c, token, tokens_so_far] {
    Choice& choice = job->choices[c];
    Status status = choice.matcher->consume(token);
    if (status.ok()) status = fill(*job, choice, tokens_so_far);
    if (!status.ok() && !job->mask_failed.load()) {
      job->mask_status = std::move(status);
      job->mask_failed.store(true, std::memory_order_release);
    }
    choice.mask_done.store(true, std::memory_order_release);
    const bool last = masks_left_.fetch_sub(1, std::memory_order_acq_rel) == 1;
    job->touch(!last);
    if (last) job->mailbox->wake();  // its job may have been touched before, quietly
  });
}

void forbid_stops(std::vector<uint32_t>& mask, const std::vector<int32_t>& stops) {
  std::vector<uint32_t> without = mask;
  for (int32_t t : stops) without[size_t(t) / 32] &= ~(1u << (t % 32));
  if (std::any_of(without.begin(), without.end(), [](uint32_t word) { return word != 0; })) mask = std::move(without);
}

}  // namespace kvasir::engine
