// How every other thread reaches the step thread. It is bounded without ever refusing: submissions are
// counted before they come here, and a job is in `touched` at most once, however much happens to it.
#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>
#include <vector>

#include "core/clock.h"
#include "engine/job.h"

namespace kvasir::engine {

class Mailbox {
 public:
  struct Mail {
    std::vector<JobPtr> submitted, touched;
    bool wake = false;  // something else changed: drain, flush
    bool empty() const { return submitted.empty() && touched.empty() && !wake; }
  };

  // False when the step thread is gone and will not read it.
  bool submit(JobPtr job) {
    std::lock_guard lock(mutex_);
    if (closed_) return false;
    mail_.submitted.push_back(std::move(job));
    ready_.notify_one();
    return true;
  }
  void touch(JobPtr job) {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    mail_.touched.push_back(std::move(job));
    ready_.notify_one();
  }
  void wake() {
    std::lock_guard lock(mutex_);
    mail_.wake = true;
    ready_.notify_one();
  }

  // What has come in, at once.
  void take(Mail& out) {
    clear(out);
    std::lock_guard lock(mutex_);
    std::swap(out, mail_);
  }
  // Sleeps until something comes in or `until`.
  void wait(Mail& out, std::optional<Time> until) {
    clear(out);
    std::unique_lock lock(mutex_);
    auto something = [&] { return !mail_.empty(); };
    if (until) {
      ready_.wait_until(lock, *until, something);
    } else {
      ready_.wait(lock, something);
    }
    std::swap(out, mail_);
  }
  // The last take: whoever submits later is told so.
  void close(Mail& out) {
    clear(out);
    std::lock_guard lock(mutex_);
    closed_ = true;
    std::swap(out, mail_);
  }

 private:
  static void clear(Mail& out) {
    out.submitted.clear();
    out.touched.clear();
    out.wake = false;
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  Mail mail_;
  bool closed_ = false;
};

inline void Job::touch() {
  if (!touched.exchange(true, std::memory_order_acq_rel)) mailbox->touch(shared_from_this());
}

}  // namespace kvasir::engine
