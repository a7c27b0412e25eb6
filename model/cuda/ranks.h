// The GPUs of one network, one where it is not split, and a thread for each: so that none waits for what another's
// thread has yet to launch.
#pragma once

#include <exception>
#include <memory>
#include <vector>

#include "model/cuda/rank.h"

namespace kvasir::model::cuda {

class Ranks {
 public:
  explicit Ranks(std::vector<int> devices) : devices_(std::move(devices)) {}
  ~Ranks() { stop(); }

  // With so many threads in all to convert weights. `network`: as Rank::load() has it, where there is one rank.
  Status load(const ModelConfig& config, const RunnerOptions& options, int threads, Weights& weights,
              const attention::Backend* attention, const LoadProgress& progress, const Rank::Load& network = {});
  // Their sizes, names and what of the model is whose.
  Status describe(const kvcache::CacheForm& form, ModelInfo* info) const;
  // As many tokens fit as on the GPU that has room for the fewest; of all ranks together.
  int64_t cache_room(const kvcache::CacheForm& form) const;
  // From here on ranks wait for one another (Link::join).
  Status join() { return link_ ? link_->join() : Status(); }

  // f(rank) on each rank's own thread and GPU; the first that fails is lost to the others.
  template <class F>
  Status on_all(const F& f);
  // No more steps; returns when those under way have ended.
  void stop();
  Status lost() const { return link_ ? link_->lost() : Status(); }

  bool several() const { return devices_.size() > 1; }
  size_t size() const { return ranks_.size(); }
  Rank& operator[](size_t rank) { return *ranks_[rank]; }
  Rank& first() { return *ranks_[0]; }
  const Rank& first() const { return *ranks_[0]; }
  auto begin() const { return ranks_.begin(); }
  auto end() const { return ranks_.end(); }

 private:
  const std::vector<int> devices_;
  std::unique_ptr<Link> link_;           // where there are several
  std::unique_ptr<ThreadPool> leaders_;  // likewise: a thread a rank, of which the caller is the first
  std::vector<std::unique_ptr<Rank>> ranks_;
};

template <class F>
Status Ranks::on_all(const F& f) {
  if (!leaders_) {
    const OnDevice on(devices_[0]);
    return f(*ranks_[0]);
  }
  leaders_->run([&](int rank) {
    Status s;
    try {
      const OnDevice on(devices_[size_t(rank)]);
      s = f(*ranks_[size_t(rank)]);
    } catch (const std::exception& e) {
      s = resource_exhausted(e.what());
    }
    if (!s.ok()) link_->lose(rank, s);
  });
  return link_->lost();
}

}  // namespace kvasir::model::cuda
