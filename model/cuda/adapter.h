// Adapters on a GPU: their factors as tiles (low_rank.h), loaded on a stream of their own while steps run, and what a
// step is told of them, which lies in device memory so that graphs serve whichever adapters a batch names.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "attention/cuda/memory.h"
#include "model/batch.h"
#include "model/cuda/low_rank.h"
#include "model/cuda/weight.h"
#include "model/ops.h"

namespace kvasir::model::cuda {

using attention::cuda::PinnedMemory;

// When the last step that an adapter can be part of has ended: its memory is not given back before.
class LastStep {
 public:
  ~LastStep();
  Status make();
  Status record(cudaStream_t stream);
  void wait() const { cudaEventSynchronize(event_); }

 private:
  cudaEvent_t event_ = nullptr;
};

class CudaAdapter final : public Adapter {
 public:
  // What the launches of a step must have room for, of one weight.
  struct Need {
    int32_t ranks = 0, blocks = 0;
    bool stretches = false;
  };
  using WeightOf = std::function<const Weight&(Matrix)>;

  static Result<std::shared_ptr<const CudaAdapter>> make(std::span<const LowRank> changes, size_t weights, int64_t room,
                                                         const WeightOf& weight_of,
                                                         std::shared_ptr<const LastStep> last_step);
  ~CudaAdapter() override { last_step_->wait(); }
  int64_t bytes() const override { return bytes_; }
  int64_t rank() const override { return rank_; }
  const LowRankWeight* weights() const { return memory_.as<LowRankWeight>(); }
  const std::vector<Need>& needs() const { return needs_; }  // by weight
  uint64_t shape() const { return shape_; }                  // equal where all needs are

 private:
  std::shared_ptr<const LastStep> last_step_;
  DeviceMemory memory_;  // the table of weights, then factors
  std::vector<Need> needs_;
  int64_t bytes_ = 0, rank_ = 0;
  uint64_t shape_ = 0;
};

// A step's rows by adapter.
class AdapterRows {
 public:
  // From any thread; what steps need is there once the first adapter is.
  Result<AdapterPtr> load(std::span<const LowRank> changes, size_t weights, int64_t room, int64_t max_tokens,
                          const CudaAdapter::WeightOf& weight_of);

  // Steps take turns in two slots.
  Status begin(const Batch& batch, int32_t rank, int slot, cudaStream_t stream);
  // After all that a step launches.
  Status end(cudaStream_t stream) { return tiles_ > 0 ? last_step_->record(stream) : Status(); }
  uint64_t key() const { return key_; }  // equal: steps launch the same; 0: no row has an adapter
  bool changes(Matrix weight) const { return tiles_ > 0 && needs_[size_t(weight.id)].ranks > 0; }

  // Around a product of `in` that is put into `out` ([rows, n], bfloat16 or float32) or added there.
  Status before_adding(Matrix weight, void* out, int64_t n, cudaStream_t stream);
  Status add(Matrix weight, const void* in, int64_t k, void* out, bool half, int64_t n, bool added,
             cudaStream_t stream);

 private:
  Status make_room(int64_t max_tokens);
  void choose_shapes(std::vector<uint64_t> shapes, const std::vector<const CudaAdapter*>& adapters);
  template <class F>
  Status each(LowRankProduct p, const F& launch);
  LowRankProduct product(Matrix weight, void* out, int64_t n, bool added) const;

  std::mutex loading_;
  std::shared_ptr<LastStep> last_step_;
  int64_t max_tokens_ = 0;
  DeviceMemory device_[2], sums_;  // tiles, then the rows they list
  PinnedMemory host_[2];
  std::map<int64_t, DeviceMemory> saved_;  // by columns
  int slot_ = 0;
  int64_t tiles_ = 0, tile_rows_ = 0;
  uint64_t key_ = 0;
  std::vector<uint64_t> shapes_;  // whose needs these are
  std::vector<CudaAdapter::Need> needs_;
};

}  // namespace kvasir::model::cuda
