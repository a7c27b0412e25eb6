#include "core/thread_pool.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "core/check.h"

namespace kvasir {
namespace {
using Clock = std::chrono::steady_clock;

constexpr auto kSpin = std::chrono::microseconds(50);
constexpr auto kLongTurn = std::chrono::milliseconds(2);
constexpr auto kNoTurns = std::chrono::seconds(1);

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// Lets who else wants this processor have it: a thread that sends tokens on would wait for the kernel's next tick,
// which is longer than a step. But a turn that long was another program's, which would take one of us each time: then
// no more for a while.
void give_way(Clock::time_point now) {
  thread_local Clock::time_point not_before{};
  if (now < not_before) return;
  std::this_thread::yield();
  auto after = Clock::now();
  if (after - now > kLongTurn) not_before = after + kNoTurns;
}

// Spin on `ready` for at most 50 us.
template <class Ready>
bool spin(const Ready& ready) {
  for (int i = 0; i < 64; ++i) {
    if (ready()) return true;
    relax();
  }
  auto now = Clock::now(), until = now + kSpin;
  for (; now < until; now = Clock::now()) {
    give_way(now);
    for (int i = 0; i < 64; ++i) {
      if (ready()) return true;
      relax();
    }
  }
  return ready();
}
}  // namespace

struct ThreadPool::State {
  struct alignas(64) Next {
    std::atomic<int64_t> at{0};
  };
  int count;
  std::vector<std::thread> workers;
  std::vector<Next> next;  // of for_each_near's stretches: one a thread

  std::atomic<uint64_t> ticket{0};  // goes up once a run: the workers' signal to start
  std::atomic<int> left{0};         // workers still inside the current run
  std::atomic<bool> in_step{false};
  std::atomic<bool> stop{false};
  Fn fn = nullptr;
  void* context = nullptr;

  std::mutex mutex;
  std::condition_variable start, done;
  int parked = 0;  // guarded by mutex
  bool caller_parked = false;

  void work(int index) {
    uint64_t seen = 0;
    auto called = [&] { return ticket.load(std::memory_order_acquire) != seen; };
    while (true) {
      bool ready = in_step.load(std::memory_order_relaxed) ? spin(called) : called();
      if (!ready) {
        std::unique_lock lock(mutex);
        ++parked;
        start.wait(lock, called);
        --parked;
      }
      ++seen;
      if (stop.load(std::memory_order_acquire)) return;
      fn(context, index);
      if (left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        bool wake;
        {
          std::lock_guard lock(mutex);
          wake = caller_parked;
        }
        if (wake) done.notify_one();
      }
    }
  }

  void raise_ticket() {
    bool wake;
    {
      std::lock_guard lock(mutex);
      ticket.fetch_add(1, std::memory_order_release);
      wake = parked > 0;
    }
    if (wake) start.notify_all();  // after the lock is released: whom it wakes takes it first of all
  }
};

ThreadPool::ThreadPool(int threads) : state_(std::make_unique<State>()) {
  KVASIR_CHECK(threads >= 1, "a thread pool needs at least one thread, got ", threads);
  state_->count = threads;
  state_->next = std::vector<State::Next>(size_t(threads));
  for (int i = 1; i < threads; ++i) state_->workers.emplace_back([s = state_.get(), i] { s->work(i); });
}

ThreadPool::~ThreadPool() {
  state_->stop.store(true, std::memory_order_release);
  state_->raise_ticket();
  for (std::thread& t : state_->workers) t.join();
}

int ThreadPool::threads() const { return state_->count; }
std::atomic<int64_t>& ThreadPool::next(int64_t stretch) { return state_->next[size_t(stretch)].at; }

void ThreadPool::begin_step() { state_->in_step.store(true, std::memory_order_relaxed); }
void ThreadPool::end_step() { state_->in_step.store(false, std::memory_order_relaxed); }

void ThreadPool::run(Fn fn, void* context) {
  State& s = *state_;
  if (s.count == 1) return fn(context, 0);
  s.fn = fn;
  s.context = context;
  s.left.store(s.count - 1, std::memory_order_relaxed);
  s.raise_ticket();
  fn(context, 0);
  auto finished = [&] { return s.left.load(std::memory_order_acquire) == 0; };
  if (spin(finished)) return;
  std::unique_lock lock(s.mutex);
  s.caller_parked = true;
  s.done.wait(lock, finished);
  s.caller_parked = false;
}

}  // namespace kvasir
