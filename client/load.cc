#include "client/load.h"

#include <algorithm>
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

struct Shared {
  Clock::time_point start;
  bool keep_text;
  std::deque<Record> records;  // stays put while it grows
  Ends ends;
  std::atomic<int64_t> tokens{0};
};

class Recorder final : public Sink {
 public:
  Recorder(std::shared_ptr<Shared> shared, Record& record, int index)
      : shared_(std::move(shared)), record_(record), index_(index) {}

  void on_tokens(int count, std::string_view text, double) override {
    if (shared_->keep_text) record_.text += text;
    if (count == 0) return;
    const double now = since(shared_->start);
    if (record_.first < 0) {
      record_.first = now;
    } else {
      record_.gaps.push_back(static_cast<float>(now - last_));
    }
    record_.counts.push_back(count);
    last_ = now;
    record_.output_tokens += count;
    shared_->tokens.fetch_add(count, std::memory_order_relaxed);
  }
  void on_done(const Status& status, const Usage& usage) override {
    record_.end = since(shared_->start);
    record_.status = status;
    record_.usage = usage;
    {
      std::lock_guard lock(shared_->ends.mutex);
      shared_->ends.ended.push_back(index_);
    }
    shared_->ends.changed.notify_one();
  }

 private:
  std::shared_ptr<Shared> shared_;
  Record& record_;
  int index_;
  double last_ = 0;
};

// A server that is gone answers nothing but this.
bool is_gone(const Status& s) { return s.code() == Code::unavailable; }
constexpr int kGoneAfter = 50;

}  // namespace

Ask ask_of(const Workload& workload, const Record& record, const LoadOptions& o) {
  const Prompt& p = workload.prompts[static_cast<size_t>(record.prompt) % workload.prompts.size()];
  Ask ask;
  ask.prompt = record.asked.empty() ? p.text : record.asked;
  ask.max_tokens = p.max_tokens;
  ask.temperature = o.temperature;
  ask.ignore_eos = o.ignore_eos;
  if (o.send_seed || o.temperature > 0) ask.seed = (o.seed + static_cast<uint64_t>(record.prompt)) & 0x7FFFFFFF;
  return ask;
}

Run run_load(Target& target, const Workload& workload, const LoadOptions& o, const std::atomic<bool>& stop,
             const std::function<void(const Progress&)>& progress) {
  auto shared = std::make_shared<Shared>();
  shared->keep_text = o.keep_text || o.turns > 1;
  shared->start = Clock::now();
  const bool closed = o.concurrency > 0;
  Run run;
  int in_flight = 0, gone_in_row = 0;
  Progress p;
  double next_report = 0;
  std::deque<int> ended;

  int conversations = 0;
  std::deque<int> answered;  // whose conversation goes on
  std::mt19937_64 random(o.seed);

  const auto start_one = [&](double due) {
    const int index = p.started++;
    Record& r = shared->records.emplace_back();
    if (answered.empty()) {
      r.prompt = conversations++;
    } else {
      const Record& before = shared->records[answered.front()];
      answered.pop_front();
      r.prompt = before.prompt;
      r.turn = before.turn + 1;
      r.asked = ask_of(workload, before, o).prompt + before.text + " " + words(o.turn_words, random);
    }
    r.sent = since(shared->start);
    r.due = closed ? r.sent : due;
    ++in_flight;
    target.start(ask_of(workload, r, o), std::make_shared<Recorder>(shared, r, index));
  };
  const auto cut = [&](std::string why) {
    run.partial = true;
    run.why = std::move(why);
  };

  for (;;) {
    double now = since(shared->start);
    if (stop.load() && !run.partial) cut("interrupted");
    const bool more = !run.partial && p.started < o.requests && !(o.duration > 0 && now >= o.duration);
    if (!more && (in_flight == 0 || run.partial)) break;
    double wait = 0.2;
    if (more && closed) {
      while (in_flight < o.concurrency && p.started < o.requests) start_one(now);
    } else if (more) {
      while (p.started < o.requests && in_flight < o.max_in_flight &&
             o.due[p.started] <= (now = since(shared->start))) {
        start_one(o.due[p.started]);
      }
      if (p.started < o.requests && in_flight < o.max_in_flight) wait = std::min(wait, o.due[p.started] - now);
    }
    {
      std::unique_lock lock(shared->ends.mutex);
      shared->ends.changed.wait_for(lock, std::chrono::duration<double>(std::max(wait, 0.0)),
                                    [&] { return !shared->ends.ended.empty(); });
      ended.swap(shared->ends.ended);
    }
    for (const int index : ended) {
      const Status& status = shared->records[index].status;
      --in_flight;
      ++(status.ok() ? p.finished : p.failed);
      if (status.ok() && closed && shared->records[index].turn + 1 < o.turns) answered.push_back(index);
      gone_in_row = is_gone(status) ? gone_in_row + 1 : 0;
      if (gone_in_row >= kGoneAfter && !run.partial) cut("the server is gone: " + status.message());
    }
    ended.clear();
    p.seconds = since(shared->start);
    p.tokens = shared->tokens.load(std::memory_order_relaxed);
    if (progress && p.seconds >= next_report) {
      progress(p);
      next_report = p.seconds + 0.5;
    }
  }

  run.seconds = since(shared->start);
  // Those still under way write to their records: copy only what has ended, count the rest as cancelled.
  std::vector<bool> open(shared->records.size(), false);
  std::unique_lock lock(shared->ends.mutex);
  for (size_t i = 0; i < open.size(); ++i) open[i] = shared->records[i].end == 0;
  for (const int index : shared->ends.ended) open[index] = false;
  for (size_t i = 0; i < open.size(); ++i) {
    if (open[i]) {
      Record r;
      r.due = shared->records[i].due;
      r.sent = shared->records[i].sent;
      r.end = run.seconds;
      r.prompt = shared->records[i].prompt;
      r.turn = shared->records[i].turn;
      r.status = Status(Code::cancelled, "still under way when the run was cut short");
      run.records.push_back(std::move(r));
    } else {
      run.records.push_back(shared->records[i]);
    }
  }
  return run;
}

Verification verify(Target& target, const Workload& workload, const LoadOptions& options, const Run& run, int sample,
                    const std::atomic<bool>& stop) {
  struct Alone final : Sink {
    std::mutex mutex;
    std::condition_variable changed;
    std::string text;
    std::vector<std::pair<size_t, double>> gaps;  // where each piece begins, and how far apart its top two are
    Status status;
    bool done = false;
    void on_tokens(int, std::string_view piece, double gap) override {
      gaps.emplace_back(text.size(), gap);
      text += piece;
    }
    void on_done(const Status& s, const Usage&) override {
      std::lock_guard lock(mutex);
      status = s;
      done = true;
      changed.notify_one();
    }
  };
  std::vector<int> good;
  for (size_t i = 0; i < run.records.size(); ++i) {
    if (run.records[i].status.ok()) good.push_back(static_cast<int>(i));
  }
  Verification v;
  const int n = std::min<int>(sample, static_cast<int>(good.size()));
  for (int k = 0; k < n && !stop; ++k) {
    const Record& r = run.records[good[static_cast<size_t>(k) * good.size() / n]];
    Ask ask = ask_of(workload, r, options);
    ask.top_two = true;
    auto alone = std::make_shared<Alone>();
    target.start(ask, alone);
    std::unique_lock lock(alone->mutex);
    alone->changed.wait(lock, [&] { return alone->done; });
    ++v.compared;
    if (!alone->status.ok()) {
      ++v.failed;
      if (v.examples.size() < 5)
        v.examples.push_back("request " + std::to_string(r.prompt) + ": " + alone->status.to_string());
      continue;
    }
    if (alone->text == r.text) {
      ++v.equal;
      continue;
    }
    size_t at = 0;
    while (at < alone->text.size() && at < r.text.size() && alone->text[at] == r.text[at]) ++at;
    double gap = -1;
    for (const auto& [begin, g] : alone->gaps) {
      if (begin <= at) gap = g;
    }
    ++(gap >= 0 && gap < 1e-3 ? v.near_ties : v.different);
    if (v.examples.size() < 5) {
      v.examples.push_back("request " + std::to_string(r.prompt) + " differs from character " + std::to_string(at) +
                           ": under load \"" + r.text.substr(at, 40) + "\", alone \"" + alone->text.substr(at, 40) +
                           "\"");
    }
  }
  return v;
}

}  // namespace kvasir::client
