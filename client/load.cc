#include "client/load.h"

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <random>

namespace kvasir::client {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Ends that the driving thread has not seen yet.
struct Ends {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<int> ended;
};

struct LoadState {
  Clock::time_point start;
  bool keep_text;
  std::deque<Record> records;  // stays put while it grows
  Ends ends;
  std::atomic<int64_t> tokens{0};
};

class AnswerSink final : public Sink {
 public:
  AnswerSink(std::shared_ptr<LoadState> shared, Record& record, int index)
      : shared_(std::move(shared)), record_(record), index_(index) {}

  void on_tokens(const AnswerPiece& piece) override {
    if (shared_->keep_text) {
      if (!std::isnan(piece.logprob)) {
        record_.odds.emplace_back(record_.text.size(), static_cast<float>(piece.logprob));
      }
      record_.text += piece.text;
    }
    if (piece.count == 0) return;
    const double now = since(shared_->start);
    if (record_.first < 0) {
      record_.first = now;
    } else {
      record_.gaps.push_back(static_cast<float>(now - last_));
    }
    record_.counts.push_back(piece.count);
    last_ = now;
    record_.output_tokens += piece.count;
    shared_->tokens.fetch_add(piece.count, std::memory_order_relaxed);
  }
  void on_done(const Status& status, const Usage& usage) override {
    {
      std::lock_guard lock(shared_->ends.mutex);  // whoever holds it sees a record that ended, or one that did not
      record_.end = since(shared_->start);
      record_.status = status;
      record_.usage = usage;
      shared_->ends.ended.push_back(index_);
    }
    shared_->ends.changed.notify_one();
  }

 private:
  std::shared_ptr<LoadState> shared_;
  Record& record_;
  int index_;
  double last_ = 0;
};

// A server that is gone answers nothing but UNAVAILABLE: so many times in a row, or a few for so long.
class Gone {
 public:
  bool see(const Status& status, double now) {
    if (status.code() != Code::unavailable) {
      in_row_ = 0;
      return false;
    }
    if (in_row_++ == 0) since_ = now;
    return in_row_ >= 50 || (in_row_ >= 3 && now - since_ >= 10);
  }

 private:
  int in_row_ = 0;
  double since_ = 0;
};

}  // namespace

const Prompt& prompt_of(const Workload& workload, const Record& record) {
  return workload.prompts[static_cast<size_t>(record.prompt) % workload.prompts.size()];
}

Ask ask_of(const Workload& workload, const Record& record, const LoadOptions& o) {
  const Prompt& p = prompt_of(workload, record);
  Ask ask;
  ask.prompt = record.asked.empty() ? p.text : record.asked;
  ask.max_tokens = p.max_tokens;
  ask.temperature = o.temperature;
  ask.ignore_eos = o.ignore_eos;
  if (o.temperature > 0) ask.seed = (o.seed + static_cast<uint64_t>(record.prompt)) & 0x7FFFFFFF;
  return ask;
}

namespace {

// The driving thread's side of a run: what starts next, and what has ended.
class Driver {
 public:
  Driver(Target& target, const Workload& workload, const LoadOptions& options, const std::atomic<bool>& stop)
      : target_(target), workload_(workload), o_(options), stop_(stop), random_(options.seed) {
    shared_->keep_text = o_.keep_text || o_.turns > 1;
    shared_->start = Clock::now();
  }

  LoadRun run(const std::function<void(const Progress&)>& progress) {
    double next_report = 0;
    for (;;) {
      if (stop_.load() && !run_.partial) cut("interrupted");
      if (!run_.partial && more()) start_what_is_due();
      if (in_flight_ == 0 && !more()) break;
      if (run_.partial) break;
      take_ends(wait_seconds());
      p_.seconds = now();
      p_.tokens = shared_->tokens.load(std::memory_order_relaxed);
      if (progress && p_.seconds >= next_report) {
        progress(p_);
        next_report = p_.seconds + 0.5;
      }
    }
    collect();
    return std::move(run_);
  }

 private:
  double now() const { return since(shared_->start); }
  bool closed() const { return o_.concurrency > 0; }
  void cut(std::string why) {
    run_.partial = true;
    run_.why = std::move(why);
  }

  // Whether anything can still start, now or later.
  bool more() const {
    if (p_.started >= o_.requests || (o_.duration > 0 && now() >= o_.duration)) return false;
    return closed() || begun_ < o_.due.size() || !answered_.empty() || (o_.turns > 1 && in_flight_ > 0);
  }

  void start_what_is_due() {
    const int most = closed() ? o_.concurrency : o_.max_in_flight;
    while (p_.started < o_.requests && in_flight_ < most) {
      if (!answered_.empty()) {
        const int before = answered_.front();
        answered_.pop_front();
        start_one(shared_->records[before].end, &shared_->records[before]);
      } else if (closed()) {
        start_one(now(), nullptr);
      } else if (begun_ < o_.due.size() && o_.due[begun_] <= now()) {
        start_one(o_.due[begun_], nullptr);
      } else {
        break;
      }
    }
    send();
  }

  void start_one(double due, const Record* before) {
    const int index = p_.started++;
    Record& r = shared_->records.emplace_back();
    if (before) {
      r.prompt = before->prompt;
      r.turn = before->turn + 1;
      const std::vector<std::string>& later = prompt_of(workload_, r).later;
      const size_t turn = static_cast<size_t>(r.turn) - 1;
      r.asked = ask_of(workload_, *before, o_).prompt + before->text + " " +
                (turn < later.size() ? later[turn] : words(o_.turn_words, random_));
    } else {
      r.prompt = static_cast<int>(begun_++);
    }
    r.sent = now();
    r.due = closed() ? r.sent : due;
    ++in_flight_;
    ready_.emplace_back(ask_of(workload_, r, o_), std::make_shared<AnswerSink>(shared_, r, index));
    if (static_cast<int>(ready_.size()) >= o_.batch) send();
  }

  void send() {
    if (ready_.size() == 1) {
      target_.start(ready_[0].first, std::move(ready_[0].second));
    } else if (!ready_.empty()) {
      target_.start_together(std::move(ready_));
    }
    ready_.clear();
  }

  double wait_seconds() const {
    double wait = 0.2;
    if (!closed() && p_.started < o_.requests && begun_ < o_.due.size() && in_flight_ < o_.max_in_flight) {
      wait = std::clamp(o_.due[begun_] - now(), 0.0, wait);
    }
    return wait;
  }

  void take_ends(double wait) {
    std::deque<int> ended;
    {
      std::unique_lock lock(shared_->ends.mutex);
      shared_->ends.changed.wait_for(lock, std::chrono::duration<double>(wait),
                                     [&] { return !shared_->ends.ended.empty(); });
      ended.swap(shared_->ends.ended);
    }
    for (const int index : ended) {
      const Record& r = shared_->records[static_cast<size_t>(index)];
      --in_flight_;
      ++(r.status.ok() ? p_.finished : p_.failed);
      if (r.status.ok() && r.turn + 1 < o_.turns) answered_.push_back(index);
      if (gone_.see(r.status, now()) && !run_.partial) cut("the server is gone: " + r.status.message());
    }
  }

  // Requests still under way write to their records: only what has ended is copied, the rest counts as cancelled.
  void collect() {
    run_.seconds = now();
    const std::deque<Record>& records = shared_->records;
    std::unique_lock lock(shared_->ends.mutex);
    for (const Record& r : records) {
      if (r.end > 0) {
        run_.records.push_back(r);
        continue;
      }
      Record cut_off;
      cut_off.due = r.due;
      cut_off.sent = r.sent;
      cut_off.end = run_.seconds;
      cut_off.prompt = r.prompt;
      cut_off.turn = r.turn;
      cut_off.status = Status(Code::cancelled, "still under way when the run was cut short");
      run_.records.push_back(std::move(cut_off));
    }
  }

  Target& target_;
  const Workload& workload_;
  const LoadOptions& o_;
  const std::atomic<bool>& stop_;
  const std::shared_ptr<LoadState> shared_ = std::make_shared<LoadState>();
  LoadRun run_;
  Progress p_;
  Gone gone_;
  int in_flight_ = 0;
  size_t begun_ = 0;          // conversations
  std::deque<int> answered_;  // whose conversation goes on
  std::vector<std::pair<Ask, std::shared_ptr<Sink>>> ready_;
  std::mt19937_64 random_;
};

}  // namespace

LoadRun run_load(Target& target, const Workload& workload, const LoadOptions& options, const std::atomic<bool>& stop,
                 const std::function<void(const Progress&)>& progress) {
  return Driver(target, workload, options, stop).run(progress);
}

}  // namespace kvasir::client
