// Workers for the inside of a step: fork-join over indices, no queue of tasks.
// Between steps they sleep on a condition variable; inside one (between begin_step and end_step)
// they may spin at most 50 us at a barrier before they park, giving way to threads that want their processor.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace kvasir {

class ThreadPool {
 public:
  explicit ThreadPool(int threads);  // the calling thread is one of them: 1 means no workers
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;

  int threads() const;

  // fn(context, worker): called once on each of the threads, worker in [0, threads()); returns when
  // all have returned. Work is split by the callee, so results need not depend on the thread count.
  using Fn = void (*)(void* context, int worker);
  void run(Fn fn, void* context);

  template <class F>
  void run(const F& f) {
    run([](void* c, int worker) { (*static_cast<const F*>(c))(worker); }, const_cast<F*>(&f));
  }

  // Dynamic split: f(i, worker) for every i in [0, n), chunks of `grain` taken as workers get free; nobody is called
  // for one chunk.
  template <class F>
  void for_each(int64_t n, int64_t grain, const F& f) {
    if (n <= grain) {
      for (int64_t i = 0; i < n; ++i) f(i, 0);
      return;
    }
    std::atomic<int64_t> next{0};
    run([&](int worker) {
      for (int64_t begin; (begin = next.fetch_add(grain, std::memory_order_relaxed)) < n;)
        for (int64_t i = begin, end = begin + grain < n ? begin + grain : n; i < end; ++i) f(i, worker);
    });
  }

  // f(i, worker) for every i in [0, n): each worker takes its own stretch in order, then helps with the others', so
  // that what lies together in memory is read by one core.
  template <class F>
  void for_each_near(int64_t n, const F& f) {
    const int64_t count = threads();
    auto begin = [&](int64_t stretch) { return n * stretch / count; };
    for (int64_t w = 0; w < count; ++w) next(w).store(begin(w), std::memory_order_relaxed);
    run([&](int worker) {
      for (int64_t k = 0; k < count; ++k) {
        const int64_t stretch = (worker + k) % count, end = begin(stretch + 1);
        for (int64_t i; (i = next(stretch).fetch_add(1, std::memory_order_relaxed)) < end;) f(i, worker);
      }
    });
  }

  // Inside a step, workers stay warm: a barrier spins up to 50 us before parking.
  void begin_step();
  void end_step();

 private:
  std::atomic<int64_t>& next(int64_t stretch);

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvasir
