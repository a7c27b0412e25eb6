// What joins the GPUs of one network: each reads the others' partial results where they lie, over peer access, once a
// barrier has said that they are there. Sums are taken in the order of ranks, so every rank has the same bits.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "attention/cuda/memory.h"
#include "core/status.h"
#include "model/ranks.h"

namespace kvasir::model::cuda {

constexpr int kMostGpus = 8;
// Blocks of a kernel that crosses ranks: each waits for the blocks of its number on the other ranks, so all of them
// must fit on a GPU at once (two fit on each of 108 multiprocessors or more).
constexpr int kLinkBlocks = 208;

// The barrier of one rank, in its own memory: who has come how often, by block and rank.
struct Barrier {
  uint32_t arrived[kLinkBlocks][kMostGpus];
  uint32_t rounds[kLinkBlocks];  // this rank's own
};

// What kernels of one rank know of all.
struct LinkView {
  int32_t rank = 0, ranks = 1;
  Barrier* barriers[kMostGpus] = {};
  const void* partials[2][kMostGpus] = {};  // bfloat16, used by turns
  const float* logits[kMostGpus] = {};
  float* squares[kMostGpus] = {};                        // of queries and keys: two a row
  int64_t first[kMostGpus] = {}, count[kMostGpus] = {};  // columns of logits
  uint32_t* lost = nullptr;                              // in the host's memory: nobody waits any more
};

class Link {
 public:
  // `devices` by rank. Refused where one cannot read another's memory.
  static Result<std::unique_ptr<Link>> open(std::vector<int> devices);
  ~Link();

  int32_t ranks() const { return int32_t(devices_.size()); }
  int device(int32_t rank) const { return devices_[size_t(rank)]; }

  // While a network is loaded, from each rank's own thread; views are whole once all ranks have done so.
  void publish_partials(int32_t rank, const void* first, const void* second);
  void publish_squares(int32_t rank, float* squares);
  void publish_logits(int32_t rank, const float* logits, const Share& columns);
  const LinkView& view(int32_t rank) const { return views_[size_t(rank)]; }

  // Until join() no rank waits for another, and sums and logits are what one rank has: what is made when it is first
  // used (workspaces, kernels, timings) is made then, since making it may wait for kernels that wait for other ranks.
  bool joined() const { return joined_; }
  Status join();

  // A rank will launch no more: kernels that wait for it go on, and every later step fails.
  void lose(int32_t rank, const Status& why);
  // Kernels that have waited too long say so themselves.
  Status lost() const;

 private:
  explicit Link(std::vector<int> devices) : devices_(std::move(devices)) {}

  const std::vector<int> devices_;
  bool joined_ = false;
  std::array<attention::cuda::DeviceMemory, kMostGpus> barriers_;
  attention::cuda::PinnedMemory flag_;
  std::array<LinkView, kMostGpus> views_;
  mutable std::mutex mutex_;
  Status why_;
};

// out = the sum of all ranks' partials[turn], or out += it; `count` elements. By so many blocks (0: as suits the
// count). In one shot each rank reads the whole of all others' partials; in two (which partials pay for) it sums up one
// slice, as bfloat16, and reads the others' slices: fewer bytes where there are three ranks or more, one more barrier.
enum class Shots : uint8_t { fitting, one, two };
void launch_sum(const LinkView& view, int turn, bool add, float* out, int64_t count, cudaStream_t stream,
                int blocks = 0, Shots shots = Shots::fitting);
bool two_shots_win(int32_t ranks, int64_t count);
// The same in one shot, added to `out`, and then `normed` (bfloat16) = norm of its rows, which are not too long.
bool sum_norm_takes(int64_t cols);
void launch_sum_norm(const LinkView& view, int turn, float* out, const float* weight, float eps, void* normed,
                     int64_t rows, int64_t cols, cudaStream_t stream);
// RMS norms in place of all ranks' queries together, and of their keys: of rows `stride` apart this rank has columns
// [0, q_cols) and the next kv_cols, of q_all and kv_all.
struct QkNormOverRanks {
  float* x;
  int64_t stride, q_cols, kv_cols, q_all, kv_all;
  bool counts_keys;  // another rank that has the same ones does not
  const float *q, *k;
  float eps;
};
void launch_qk_norm_over_ranks(const LinkView& view, const QkNormOverRanks& norm, int64_t rows, cudaStream_t stream);
// out[rows, all]: every rank's columns beside one another. None may be overwritten before all ranks have them.
void launch_gather(const LinkView& view, float* out, int64_t rows, int64_t all, cudaStream_t stream);
void launch_barrier(const LinkView& view, cudaStream_t stream);
// The stream hangs until the link is lost: what tests see of a GPU that stops.
void launch_hang(const LinkView& view, cudaStream_t stream);
// own[t] = tokens[t] (below 0: before[-1 - t]) as a row of [first, first + count), 0 where it is another rank's.
void launch_own_tokens(const int32_t* tokens, const int32_t* before, const Share& share, int32_t* own, int64_t rows,
                       cudaStream_t stream);
// out = in as bfloat16, 0 in rows of tokens that are another rank's.
void launch_own_rows(const int32_t* tokens, const int32_t* before, const Share& share, const float* in, void* out,
                     int64_t rows, int64_t cols, cudaStream_t stream);

}  // namespace kvasir::model::cuda
