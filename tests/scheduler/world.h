// A scheduler, a device that checks what it reads, and everything that was said: for scenarios.
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <map>

#include "scheduler/cost_model.h"
#include "tests/scheduler/fake_device.h"

namespace kvasir::scheduler {

using std::chrono::milliseconds;
using std::chrono::seconds;

inline Settings small() {
  Settings o;
  o.page_size = 4;
  o.groups = {{32, 0}};
  o.max_tokens_per_step = 24;
  o.max_running = 8;
  o.max_context = 100;
  o.lookahead_tokens = 4;
  return o;
}

inline std::vector<int32_t> prompt_of(int n, int first = 1) {
  std::vector<int32_t> p(n);
  for (int i = 0; i < n; ++i) p[i] = first + i;
  return p;
}

class World {
 public:
  explicit World(const Settings& o, int32_t vocabulary = 50) : options(o), device(o, vocabulary) {
    auto made = Scheduler::create(o);
    KVASIR_CHECK(made.ok(), made.status().to_string());
    scheduler = std::move(made).value();
  }
  ~World() { scheduler->check_integrity(); }

  Submission make(RequestId id, std::vector<int32_t> prompt, int64_t max_new) {
    Submission s;
    s.id = id;
    s.prompt = std::move(prompt);
    s.max_new = max_new;
    return s;
  }
  SeqId submit(Submission s) {
    prompts[s.id] = s.prompt;
    auto r = scheduler->submit(std::move(s), now);
    KVASIR_CHECK(r.ok(), r.status().to_string());
    return *r;
  }
  SeqId submit(RequestId id, std::vector<int32_t> prompt, int64_t max_new) {
    return submit(make(id, std::move(prompt), max_new));
  }
  bool launch() {
    now += milliseconds(10);
    scheduler->next_step(now, plan);
    scheduler->check_integrity();
    if (plan.empty()) return false;
    runs.push_back(device.launch(*scheduler, plan));
    const std::chrono::duration<double> by_cost(step_seconds(work_of(plan), options.cost));
    durations.push_back(by_work ? std::chrono::duration_cast<Duration>(by_cost) : Duration(milliseconds(10)));
    return true;
  }
  void retire() {
    if (!durations.empty()) {
      now += durations.front();
      durations.pop_front();
    }
    runs.front().link();
    for (SeqResult& r : runs.front().results)
      if (stop_after.contains(r.seq) && outputs[r.seq].size() + 1 == size_t(stop_after[r.seq])) r.stop = true;
    scheduler->advance(runs.front().results, now);
    for (SeqResult& r : runs.front().results)
      outputs[r.seq].insert(outputs[r.seq].end(), r.tokens.begin(), r.tokens.begin() + r.accepted);
    runs.pop_front();
    scheduler->check_integrity();
    collect();
  }
  void collect() {
    std::vector<Notice> more;
    scheduler->take_events(more);
    events.insert(events.end(), more.begin(), more.end());
  }
  // Until nothing is left to do; `depth` plans in flight.
  void run(int most = 10000) {
    for (int i = 0; i < most; ++i) {
      while (scheduler->in_flight() < options.depth && launch()) {
      }
      if (runs.empty()) break;
      retire();
    }
    collect();
  }
  void expect_all_back() {
    scheduler->check_integrity();
    EXPECT_TRUE(scheduler->idle());
    Stats s = scheduler->stats();
    EXPECT_EQ(s.pages_free + s.pages_cached, s.pages_total);
    EXPECT_EQ(s.waiting_tokens, 0);
  }
  void expect_output(RequestId id, SeqId seq, int choice, int64_t n) {
    EXPECT_EQ(outputs[seq], device.continuation(prompts[id], choice, n)) << "request " << id;
  }
  int count(Notice::Kind kind) const {
    int n = 0;
    for (const Notice& e : events) n += e.kind == kind;
    return n;
  }

  Settings options;
  FakeDevice device;
  std::unique_ptr<Scheduler> scheduler;
  Time now{};
  StepPlan plan;
  bool by_work = false;  // a step takes what the cost model says, not always the same
  std::deque<FakeDevice::Run> runs;
  std::deque<Duration> durations;
  std::map<RequestId, std::vector<int32_t>> prompts;
  std::map<SeqId, std::vector<int32_t>> outputs;
  std::map<SeqId, int> stop_after;
  std::vector<Notice> events;
};

}  // namespace kvasir::scheduler
