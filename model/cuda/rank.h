// One GPU's part of a network: its weights, its cache, its stream, and what it draws. A network that is not split has
// one. All of it is called with the rank's GPU as the thread's own (OnDevice).
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "model/arch/registry.h"
#include "model/cuda/cache.h"
#include "model/cuda/change.h"
#include "model/cuda/draw.h"
#include "model/cuda/graphs.h"
#include "model/cuda/ops.h"
#include "model/cuda/redraw.h"

namespace kvasir::model::cuda {

// The thread's GPU is this one until the end of the scope.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    cudaGetDevice(&before_);
    if (before_ != device) cudaSetDevice(device);
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

// Of a launch, what the device draws: by sample row.
struct DeviceRows {
  std::vector<Wish> wishes;
  std::vector<bool> there;  // drawn by the device; else by the host
  Changes changes;
  int64_t count() const { return int64_t(wishes.size()); }
};

class Rank {
 public:
  // `link` is null where there is one.
  Rank(const ModelConfig& part, const RunnerOptions& options, int device, int threads, Link* link)
      : config_(part), options_(options), device_(device), link_(link), load_threads_(threads) {}
  ~Rank();

  using Load = std::function<Result<std::unique_ptr<Network>>(CudaOps& ops)>;
  // `network`: how it is loaded, where it is not the one that the configuration names.
  Status load(Weights& weights, const attention::Backend* attention, const LoadProgress& progress,
              const Load& network = {});
  Status allocate_cache(const CachePages& pages, const kvcache::CacheForm& form);
  int64_t cache_room() const;

  // A step of launch slot 0 or 1: pages that are copied and moved, then begin(), then what calls for ops() and
  // network(), then end().
  Status move_pages(const Batch& batch);
  Status begin(const Batch& batch, const std::vector<int32_t>& tokens, int slot);
  Status end(int slot);
  // A step of decodes and all its logits: a graph where it was launched before.
  Result<Buffer> decode();
  // Tokens of rows [first, first + count), whose logits these are, that are for the device.
  Status draw(Buffer logits, const DeviceRows& rows, int64_t first, int64_t count, int slot);
  // Of those that draw() was last called for, rows of a launch whose constraints refused what it drew; at once.
  Status redraw(std::span<const MaskedRow> rows, std::span<DeviceDraw> out, int slot) {
    return redraw_.run(drawn_from_, slots_[size_t(slot)].changes, rows, out, stream_);
  }
  // What draw() needs of room, where it is not there yet; making it may wait for the device.
  bool has_room(const DeviceRows& rows, int slot) const { return slots_[size_t(slot)].changes.has_room(rows.changes); }
  Status make_room(const DeviceRows& rows, int slot);
  // All that was enqueued of the slot's last launch.
  Status wait(int slot) { return attention::cuda::check(cudaEventSynchronize(slots_[size_t(slot)].done), "step"); }

  int device() const { return device_; }
  bool first() const { return config_.part.first(); }
  const ModelConfig& config() const { return config_; }
  CudaOps& ops() { return *ops_; }
  const CudaOps& ops() const { return *ops_; }
  Network& network() { return *network_; }
  cudaStream_t stream() const { return stream_; }
  // What the device drew, by sample row; of the first rank it is in the host's memory.
  const DeviceDraw* drawn(int slot) const { return slots_[size_t(slot)].drawn.as<DeviceDraw>(); }
  const TokenLogprob* top(int slot) const { return slots_[size_t(slot)].top.as<TokenLogprob>(); }
  // For tests: its stream does no more until the link is lost.
  void hang() { launch_hang(link_->view(config_.part.rank), stream_); }
  int64_t replays() const { return graphs_ ? graphs_->replays() : 0; }

 private:
  struct Slot {
    attention::cuda::PinnedMemory drawn, wishes, top;
    attention::cuda::DeviceMemory device_drawn, device_wishes;
    DeviceChanges changes;
    cudaEvent_t done = nullptr;
  };

  const ModelConfig config_;
  const RunnerOptions options_;
  const int device_;
  Link* const link_;
  const int load_threads_;
  cudaStream_t stream_ = nullptr;
  std::array<Slot, 2> slots_;
  DrawnFrom drawn_from_;
  DeviceRedraw redraw_;
  std::optional<CudaOps> ops_;
  std::unique_ptr<Network> network_;
  bool apart_ = false;                          // layers with a window have pages of their own
  std::vector<std::unique_ptr<Cache>> caches_;  // by layer group
  std::optional<Graphs> graphs_;
  Buffer decoded_;  // logits of a step of decodes
};

}  // namespace kvasir::model::cuda
