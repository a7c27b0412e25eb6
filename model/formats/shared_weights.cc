#include "model/formats/shared_weights.h"

#include <algorithm>
#include <limits>

namespace kvasir::model {

class SharedWeights::OfRank final : public Weights {
 public:
  OfRank(SharedWeights& all, int rank) : all_(all), rank_(rank) {}
  ~OfRank() override { all_.leave(rank_); }

  bool has(std::string_view name) const override {
    std::lock_guard lock(all_.mutex_);
    return all_.source_.has(name);
  }
  Result<HostTensor> get(std::string_view name, int64_t rows, int64_t cols) override {
    return all_.get(rank_, name, rows, cols);
  }
  void release(const HostTensor& tensor) override { all_.release(tensor); }
  std::vector<std::string> unread() const override {  // said once
    std::lock_guard lock(all_.mutex_);
    return rank_ == 0 ? all_.source_.unread() : std::vector<std::string>();
  }
  int64_t parameters() const override { return all_.source_.parameters(); }
  int64_t bytes() const override { return all_.source_.bytes(); }
  std::vector<HostTensor> tensors() const override { return all_.source_.tensors(); }

 private:
  SharedWeights& all_;
  const int rank_;
};

std::unique_ptr<Weights> SharedWeights::of_rank(int rank) { return std::make_unique<OfRank>(*this, rank); }

Result<HostTensor> SharedWeights::get(int rank, std::string_view name, int64_t rows, int64_t cols) {
  std::unique_lock lock(mutex_);
  moved_.wait(lock, [&] { return asked_[size_t(rank)] < *std::min_element(asked_.begin(), asked_.end()) + kAhead; });
  auto it = held_.find(name);
  if (it == held_.end()) {
    KVASIR_ASSIGN(HostTensor t, source_.get(name, rows, cols));
    it = held_.emplace(std::string(name), Held{std::move(t)}).first;
  }
  Held& h = it->second;
  HostTensor out = h.tensor;
  if (++h.asked == int64_t(asked_.size())) h.tensor.owned.reset();
  ++asked_[size_t(rank)];
  moved_.notify_all();
  return out;
}

// Who has sliced a tensor gives it back in pieces, so a mapped file may be told too early that its pages are not
// needed: then they are found again. What a source has made for one tensor is given back once a rank.
void SharedWeights::release(const HostTensor& tensor) {
  std::lock_guard lock(mutex_);
  const auto it =
      std::find_if(held_.begin(), held_.end(), [&](const auto& h) { return h.second.tensor.name == tensor.name; });
  if (it == held_.end()) return source_.release(tensor);
  Held& h = it->second;
  if (++h.released < int64_t(asked_.size()) || h.asked < int64_t(asked_.size())) return;
  source_.release(h.tensor);
  held_.erase(it);
}

void SharedWeights::leave(int rank) {
  std::lock_guard lock(mutex_);
  asked_[size_t(rank)] = std::numeric_limits<int64_t>::max() / 2;
  moved_.notify_all();
}

}  // namespace kvasir::model
