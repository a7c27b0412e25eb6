// The highest load within an SLO, by bisection: of rates and of clients.
#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <deque>

#include "client/bench.h"
#include "tests/client/slow_server.h"

namespace kvasir::client {
namespace {

TEST(OverGrpc, ASweepMayBeOfConversationsAndIsVerified) {
  SlowServer server(Ms(0), Ms(0));
  for (const char* of : {"rate", "concurrency"}) {
    BenchOptions b;
    b.target.address = server.address();
    b.sweep = of;
    b.sweep_low = b.sweep_high = 4;
    b.duration = 0.3;
    b.turns = 2;
    b.turn_words = 3;
    b.verify = 5;
    b.workload.output_length = "2";
    b.slo = *parse_slo("e2e=20s");
    auto target = *make_target(b.target);
    auto done = run_bench(*target, b, never, {});
    ASSERT_TRUE(done.ok()) << done.status().to_string();
    EXPECT_EQ(done->report.best, 4) << of;
    EXPECT_EQ(done->report.verification.equal, 5) << of;
    EXPECT_TRUE(std::any_of(done->run.records.begin(), done->run.records.end(), [](const Record& r) {
      return r.turn == 1 && r.status.ok();
    })) << of;
  }
}

// Answers so many at a time, a little later, and refuses more: what it carries is known exactly.
class Doorman final : public Target {
 public:
  explicit Doorman(int most) : most_(most), thread_([this] { answer(); }) {}
  ~Doorman() override {
    {
      std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void start(const Ask&, std::shared_ptr<Sink> sink) override {
    {
      std::lock_guard lock(mutex_);
      if (static_cast<int>(inside_.size()) < most_) {
        inside_.emplace_back(std::chrono::steady_clock::now() + Ms(5), std::move(sink));
        changed_.notify_all();
        return;
      }
    }
    sink->on_done(Status(Code::resource_exhausted, "full"), {});
  }

 private:
  void answer() {
    std::unique_lock lock(mutex_);
    while (!over_) {
      if (inside_.empty()) {
        changed_.wait(lock);
      } else if (changed_.wait_until(lock, inside_.front().first) == std::cv_status::timeout) {
        auto sink = std::move(inside_.front().second);
        inside_.pop_front();
        lock.unlock();
        sink->on_tokens({1, "x"});
        sink->on_done({}, {});
        lock.lock();
      }
    }
  }
  const int most_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  std::deque<std::pair<std::chrono::steady_clock::time_point, std::shared_ptr<Sink>>> inside_;
  std::thread thread_;
};

TEST(Bisection, FindsExactlyHowManyClientsAServerCarries) {
  BenchOptions b;
  b.sweep = "concurrency";
  b.duration = 0.2;
  b.slo = *parse_slo("e2e=60s");
  for (const auto& [most, low] : {std::pair(11, 1.0), {11, 64.0}, {1, 1.0}, {3, 2.0}}) {
    b.sweep_low = low;
    Doorman target(most);
    auto done = run_bench(target, b, never, {});
    ASSERT_TRUE(done.ok()) << done.status().to_string();
    EXPECT_EQ(done->report.best, most) << "from " << low;
    for (const Point& p : done->report.points) EXPECT_EQ(p.within, p.load <= most) << p.load;
    EXPECT_EQ(done->report.figures.failed, 0) << "what is told of is the best run";
  }
}

TEST(OverGrpc, ASweepEndsAtTheSlo) {
  SlowServer server(Ms(20), Ms(0));
  BenchOptions b;
  b.target.address = server.address();
  b.sweep = "concurrency";
  b.sweep_low = 1;
  b.sweep_high = 4;
  b.duration = 0.3;
  b.workload.output_length = "1";
  b.slo = *parse_slo("ttft=20s");
  auto target = *make_target(b.target);
  auto done = run_bench(*target, b, never, {});
  ASSERT_TRUE(done.ok()) << done.status().to_string();
  EXPECT_EQ(done->report.best, 4);
  EXPECT_EQ(done->report.points.size(), 3u);
  b.slo = *parse_slo("ttft=1ms");
  done = run_bench(*target, b, never, {});
  EXPECT_EQ(done->report.best, 0);
}

}  // namespace
}  // namespace kvasir::client
